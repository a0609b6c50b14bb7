"""FOT as its authors' published code runs it: for comparing figures with the paper's, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fot.methods.fot import FOT
from fot.options import Between


@dataclass(frozen=True)
class FOTAuthors(FOT):
    """FOT with the authors' rank rule, sketched by the last cohort on its own models, G shared by workers.

    The rule adds the share that is *not* yet covered, and at least one direction. Worker processes that start
    from one seed draw the same G, which favours directions that clients share and lowers the ranks. That the
    authors' do is inferred, and RESULTS.md says how far it leads to the paper's figures.

    Examples
    --------
    >>> FOTAuthors() == FOTAuthors(rule="authors", participants="cohort", model="local", shared_sketch_seed=8)
    True
    """

    rule: Literal["energy", "authors"] = "authors"
    participants: Literal["all", "cohort"] = "cohort"
    model: Literal["global", "local"] = "local"
    shared_sketch_seed: Annotated[int, Between(0)] = 8
