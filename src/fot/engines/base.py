"""What an engine is: the place where clients compute.

An engine trains a cohort for one round, lets clients take part at the end of a task, and evaluates.
It never changes what is computed: two engines agree to rounding, because every draw comes from the
key (seed, purpose, task, round, client).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from fot.aggregation import Summation, Sums
from fot.benchmarks.stream import Task
from fot.errors import UserError
from fot.methods.base import Server
from fot.network import Tree
from fot.options import Between


@dataclass(frozen=True)
class Training:
    """How clients train, and for how long: the same for every method."""

    rounds: Annotated[int, Between(1)] | tuple[Annotated[int, Between(1)], ...] = 10
    """Rounds for each task: one number, or one for each task."""
    cohort: Annotated[int, Between(1)] = 10
    """Clients that train in a round, drawn anew each time among those with data of the task."""
    min_clients: Annotated[int, Between(1)] = 1
    """A round with fewer usable updates is void: the model stays as it was."""
    epochs: Annotated[int, Between(1)] = 1
    batch_size: Annotated[int, Between(1)] = 32
    lr: Annotated[float, Between(0)] = 0.01
    weight_decay: Annotated[float, Between(0)] = 0.0

    def __post_init__(self) -> None:
        if self.rounds == ():
            raise UserError("training.rounds: the list is empty; give a number, or one for each task")
        if self.min_clients > self.cohort:
            raise UserError(
                f"training.min_clients: {self.min_clients} is more than the cohort of {self.cohort}, "
                "so that every round would be void; lower it, or raise training.cohort"
            )

    def rounds_of(self, task: int) -> int:
        """The rounds of a task; past the end of a list, its last entry holds."""
        return self.rounds if isinstance(self.rounds, int) else self.rounds[min(task, len(self.rounds) - 1)]


@dataclass(frozen=True)
class EngineOptions:
    """Where clients compute, and how exactly."""

    kind: Literal["vectorized", "sequential"] = "vectorized"
    """``vectorized`` trains a whole cohort at once, ``sequential`` one client after another."""
    device: str = "auto"
    """``auto`` is the first GPU, or the CPU where there is none."""
    precision: Literal["float32", "float64", "tf32", "bfloat16"] = "tf32"
    """Of what clients compute. ``tf32`` and ``bfloat16`` round the factors of matrix products alone; TF32
    takes effect on GPUs, and a CPU computes in float32."""
    threads: Annotated[int, Between(0)] = 0
    """CPU threads of one operation; 0 for torch's own choice. Small networks are faster with 1."""

    def resolved_device(self) -> torch.device:
        """The device that ``device`` names, which must be there."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError):
            raise UserError(
                f"engine.device: {self.device!r} is not to be had here; try auto or cpu"
            ) from None
        return device


@dataclass(frozen=True)
class RoundKeys:
    """The keys of one round, from which an engine draws all it needs.

    A client's key is ``fold(order, client)``; its samples of epoch e come in the order
    ``permutation(fold(fold(order, client), e), n)``; step s (counted over epochs) drops units by
    ``fold(fold(dropout, client), s)``, and the sample at position b of that step is augmented by
    ``fold(fold(fold(augment, client), s), b)``.
    """

    order: int
    dropout: int
    augment: int


@dataclass(frozen=True)
class Round:
    """One round of one run, as an engine is asked to train it."""

    server: Server
    task: Task
    cohort: Sequence[int]
    keys: RoundKeys
    clients: dict[int, Tree]
    """The clients' own states."""
    summation: Summation
    keep_local: bool = False
    """Whether each client's own model is wanted besides the sum."""
    provisional: bool = False
    """Whether sums may be given before it is known that they are finite: see ``RoundOutcome.finite``."""


@dataclass(frozen=True)
class Extraction:
    """The end of a task of one run, as an engine is asked to let clients take part in it."""

    server: Server
    task: Task
    participants: Sequence[int]
    key: int
    """From which, with the client's index, a method draws."""
    clients: dict[int, Tree]
    """The clients' own states."""
    summation: Summation
    local_params: dict[int, Tree] = field(default_factory=dict)
    """The models of clients that use their own in place of the server's."""
    positions: Sequence[int] | None = None
    """The participants' places among all that take part, where these are only some."""

    @property
    def places(self) -> Sequence[int]:
        """Each participant's place among all that take part."""
        return range(len(self.participants)) if self.positions is None else self.positions


@dataclass(frozen=True)
class RoundOutcome:
    """What a round's training, or the end of a task, brought, once its sum was formed."""

    sums: Sums | None
    """Summed updates and, under ``metric/loss``, the summed mean losses, or summed statistics; None where
    nothing is to be summed."""
    excluded: tuple[int, ...] = ()
    """Clients that were left out: their numbers were not finite, and the sum is not a discreet one."""
    local_params: dict[int, Tree] = field(default_factory=dict)
    """Each client's own model after training, where the method asks for it."""
    finite: Tensor | None = None
    """Of provisional sums, whether they are finite: a device may still be at it. Where they are not, the
    round is to be trained anew and not provisionally, which finds out who is to be left out."""


class Engine(Protocol):
    """Where clients compute."""

    name: str
    device: torch.device

    def train(self, round: Round) -> RoundOutcome:
        """Train the cohort from the server's model and sum the updates."""

    def extract(self, extraction: Extraction) -> RoundOutcome:
        """Let clients take part at the end of a task; updates their states in place."""

    def evaluate(self, params: Tree, x: Tensor, y: Tensor, task: int) -> float:
        """Accuracy in percent."""
