"""Train a whole cohort at once.

``folding`` runs a module on a folded batch with a stack of parameters; ``products`` and ``steps`` hold
the arithmetic; ``cohort`` the samples; ``local`` a round's training; ``trial`` the check that it is right;
``extraction`` the end of a task; ``engine`` the engine.
"""

from __future__ import annotations

from fot.engines.vectorized.engine import VectorizedEngine
from fot.engines.vectorized.folding import Fold
from fot.engines.vectorized.stacked import CannotBatch, Stacked
from fot.engines.vectorized.trial import check_folding

__all__ = ["CannotBatch", "Fold", "Stacked", "VectorizedEngine", "check_folding"]
