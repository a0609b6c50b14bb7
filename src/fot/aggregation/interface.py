"""What a sum is to the engines: opened for a cohort, added to, closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fot.errors import UserError

Kind = Literal["update", "statistics"]
AddTotal = Callable[[Sequence[int], dict[str, Tensor], Mapping[str, torch.dtype]], None]
"""``add_total(clients, totals, dtypes)``; the dtypes are those in which a client would have sent its own.

The totals are the sum's own from there on.
"""


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

    discreet: bool
    """Whether a client whose numbers are not finite may be added and counts as one that sent zeros. Elsewhere
    it is to be left out; of a private sum, that somebody is missing would be news without noise."""

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Add the arrays of `clients`, each of shape ``[len(clients), *shape]``: one row a client."""

    @property
    def add_total(self) -> AddTotal | None:
        """Adds arrays that are summed over some clients already; None where each client's own are needed.

        An engine that finds a cohort's sum by one product need not form every client's arrays for it.
        """

    def close(self) -> Sums:
        """Form the sum of all that was added. A client of the cohort that added nothing has dropped out."""
        ...


class Aggregation(ABC):
    """A way to form sums."""

    only_sums: bool = False
    """Whether the server learns sums alone: it can name no client, and methods that need more are refused."""

    @abstractmethod
    def open(
        self, cohort: Sequence[int], *, kind: Kind, path: tuple[int, ...], drawn_from: int | None = None
    ) -> Summation:
        """Begin a sum over `cohort`; `path` (task, round) names it.

        `drawn_from` says from how many clients the cohort was drawn, uniformly and for this sum alone; None
        where it was not.
        """

    def expect(self, cohort: Sequence[int]) -> None:
        """Hear who will form the sum after the one now open (nobody: not known); a protocol may prepare."""
        return

    def plan(self, sums: Mapping[Kind, int] | None) -> None:
        """Hear, before the first, how many sums of each kind the run will form; None where nobody knows."""
        return

    def notes(self) -> list[str]:
        """What the user should be told once the run is over."""
        return []

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
    """A sum that could not be formed, and why; nothing of any client was revealed.

    `bytes_up` and `bytes_down` are what a client had sent and received by then.
    """

    bytes_up: int = 0
    bytes_down: int = 0


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
        self.dtypes: dict[str, torch.dtype] = {}
        self.closed = False

    def enter(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Note the clients' arrays, one row each, or say what is wrong with them and change nothing."""
        check_rows(clients, arrays)
        shapes = {name: tuple(array.shape[1:]) for name, array in arrays.items()}
        self.note(clients, shapes, {name: array.dtype for name, array in arrays.items()})

    def note(
        self,
        clients: Sequence[int],
        shapes: dict[str, tuple[int, ...]],
        dtypes: dict[str, torch.dtype],
    ) -> None:
        """Note that clients send arrays of these shapes and types."""
        self._open()
        if self.added and (shapes, dtypes) != (self.shapes, self.dtypes):
            names = sorted(shapes.keys() | self.shapes.keys())
            wrong = [n for n in names if shapes.get(n) != self.shapes.get(n)]
            what, which = "names or shapes", wrong or [n for n in names if dtypes[n] != self.dtypes[n]]
            raise UserError(
                f"clients differ in the {what if wrong else 'types'} of '{', '.join(which)}': "
                "all must send the same"
            )
        for client in clients:
            if client not in self.cohort:
                raise UserError(f"client {client} is not in the cohort of this sum: open the sum with it")
            if client in self.added:
                raise UserError(f"client {client} was added twice: add each client once")
        if len(set(clients)) != len(clients):
            raise UserError("a client is named twice in one call: add each client once")
        self.added.update(clients)
        self.shapes, self.dtypes = shapes, dtypes

    def close(self) -> tuple[int, ...]:
        """The clients that were added; none at all is an error."""
        self._open()
        if not self.added:
            raise UserError("an empty sum: every client of the cohort dropped out; enlarge the cohort")
        self.closed = True
        return tuple(sorted(self.added))

    def _open(self) -> None:
        if self.closed:
            raise UserError("this sum is closed: open another")
