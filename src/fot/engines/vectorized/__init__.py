"""Train a whole cohort at once.

``folding`` runs a module on a folded batch with a stack of parameters; ``products`` and ``steps`` hold
the arithmetic; ``cohort`` the samples; ``local`` a round's training; ``engine`` the engine.
"""

from __future__ import annotations

from fot.engines.vectorized.engine import VectorizedEngine, check_folding
from fot.engines.vectorized.folding import Fold
from fot.engines.vectorized.stacked import CannotBatch, Stacked

__all__ = ["CannotBatch", "Fold", "Stacked", "VectorizedEngine", "check_folding"]
