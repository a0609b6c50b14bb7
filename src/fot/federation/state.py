"""What a run carries from one round to the next: all of it, so that a checkpoint of this is enough."""

from __future__ import annotations

from dataclasses import dataclass, field

from fot.methods.base import Server
from fot.network import Tree


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
