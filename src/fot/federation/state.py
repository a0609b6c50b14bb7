"""What a run carries from one round to the next: all of it, so that a checkpoint of this is enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fot.methods.base import Server
from fot.network import Tree
from fot.results import metrics


@dataclass
class State:
    """The server, the clients' own states, where the run stands, and what was measured so far."""

    server: Server
    clients: dict[int, Tree] = field(default_factory=dict)
    """What clients keep between rounds, for the methods that keep anything there."""
    task: int = 0
    """The task at hand, and ``round`` the next round of it."""
    round: int = 0
    accuracy: list[list[float | None]] = field(default_factory=list)
    """Row i: task i; column t: after task t."""
    initial: list[float] = field(default_factory=list)
    zero_shot: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    usage: dict[str, list[float]] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=lambda: {"training": 0, "extraction": 0})
    bytes_down: dict[str, int] = field(default_factory=lambda: {"training": 0, "extraction": 0})
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("train", "extract", "evaluate"), 0.0)
    )
    rounds: int = 0
    excluded: int = 0
    clipped: int = 0

    def measured(self) -> dict[str, Any]:
        """The results so far, as ``summary.json`` names them."""
        return {
            "acc": metrics.average_accuracy(self.accuracy),
            "fgt": metrics.forgetting(self.accuracy),
            "fgt_max": metrics.forgetting_max(self.accuracy),
            "bwt": metrics.backward_transfer(self.accuracy),
            # A head of its own has not been trained before its task: no transfer to speak of.
            "fwt": metrics.forward_transfer(self.zero_shot, self.initial) if self.initial else None,
            "accuracy": self.accuracy,
            "zero_shot": self.zero_shot or None,
            "initial": self.initial or None,
            "tasks": self.names,
            "rounds": self.rounds,
            "excluded": self.excluded,
            "clipped": self.clipped,
            "subspace": self.usage,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "seconds": self.seconds,
        }
