"""What a sum is to the engines: opened for a cohort, added to, closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from fot.errors import UserError

Kind = Literal["update", "statistics"]


@dataclass(frozen=True)
class Sums:
    """The sum over the clients that were included, and what it cost one of them.

    Attributes
    ----------
    arrays : dict of str to Tensor
        The sums, by name.
    clients : tuple of int
        The clients whose arrays the sums hold, in ascending order.
    bytes_up, bytes_down : int
        What one client sent and received for this sum beyond the broadcast (the mean over clients, rounded).
    clipped : int
        Entries that the codec clipped, over all clients.
    """

    arrays: dict[str, Tensor]
    clients: tuple[int, ...]
    bytes_up: int
    bytes_down: int
    clipped: int = 0


class Summation(Protocol):
    """One sum being formed."""

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Add the arrays of `clients`, each of shape ``[len(clients), *shape]``: one row a client."""

    def close(self) -> Sums:
        """Form the sum of all that was added. A client of the cohort that added nothing has dropped out."""
        ...


class Aggregation(ABC):
    """A way to form sums."""

    @abstractmethod
    def open(self, cohort: Sequence[int], *, kind: Kind, path: tuple[int, ...]) -> Summation:
        """Begin a sum over `cohort`; `path` (task, round) names it."""

    def expect(self, cohort: Sequence[int]) -> None:
        """Hear who will form the sum after the one now open; a protocol may prepare for it."""
        return

    def report(self) -> dict[str, Any] | None:
        """The privacy that the sums have kept so far; None where none was promised."""
        return None

    def state(self) -> list[Any]:
        """What a checkpoint must keep, as JSON can hold it."""
        return []

    def restore(self, state: list[Any]) -> None:
        """Take up where `state` left off."""
        return


class RoundAborted(UserError):
    """A sum that could not be formed, and why; nothing of any client was revealed."""


def check_rows(clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
    """Refuse arrays that do not have one row for each client."""
    if not arrays:
        raise UserError("nothing to add: give at least one named array")
    for name, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != len(clients):
            raise UserError(f"array '{name}' must have one row for each of the {len(clients)} clients")


class Ledger:
    """Who has added what: the checks that every kind of sum shares."""

    def __init__(self, cohort: Sequence[int]) -> None:
        self.cohort = frozenset(cohort)
        if len(self.cohort) != len(cohort):
            raise UserError("a cohort names a client twice: name each client once")
        self.added: set[int] = set()
        self.shapes: dict[str, tuple[int, ...]] = {}

    def enter(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Note the clients' arrays, or say what is wrong with them."""
        check_rows(clients, arrays)
        shapes = {name: tuple(array.shape[1:]) for name, array in arrays.items()}
        if self.added and shapes != self.shapes:
            names = shapes.keys() | self.shapes.keys()
            wrong = ", ".join(sorted(name for name in names if shapes.get(name) != self.shapes.get(name)))
            raise UserError(f"clients differ in the names or shapes of '{wrong}': all must send the same")
        for client in clients:
            if client not in self.cohort:
                raise UserError(f"client {client} is not in the cohort of this sum: open the sum with it")
            if client in self.added:
                raise UserError(f"client {client} was added twice: add each client once")
            self.added.add(client)
        self.shapes = shapes

    def clients(self) -> tuple[int, ...]:
        """The clients that were added; none at all is an error."""
        if not self.added:
            raise UserError("an empty sum: every client of the cohort dropped out; enlarge the cohort")
        return tuple(sorted(self.added))
