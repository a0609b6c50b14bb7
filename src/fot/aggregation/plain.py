"""The plain sum: addition in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fot.aggregation.interface import Aggregation, Kind, Ledger, Sums


def sum_rows(array: Tensor) -> Tensor:
    """The sum over the first axis, in float64.

    A CPU would first copy the whole array into float64: a large one is added up row by row instead.
    """
    if array.is_cuda or array.numel() < 1 << 18:
        return array.sum(0, dtype=torch.float64)
    total = array[0].to(torch.float64, copy=True)
    for row in array[1:]:
        total.add_(row)
    return total


def copied(arrays: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Copies in the types that are given, all in one call: on a GPU a call costs as much as many."""
    copies = {name: torch.empty_like(array, dtype=dtypes[name]) for name, array in arrays.items()}
    torch._foreach_copy_(list(copies.values()), list(arrays.values()))
    return copies


class PlainAggregation(Aggregation):
    """Sums in the open, the reference for all other ways.

    Examples
    --------
    >>> summation = PlainAggregation().open([4, 7, 9], kind="update", path=(0, 0))
    >>> summation.add([7], {"weight": torch.tensor([[1.0, 2.0]])})
    >>> summation.add([4], {"weight": torch.tensor([[0.5, 0.5]])})
    >>> sums = summation.close()
    >>> sums.arrays["weight"].tolist(), sums.clients, sums.bytes_up
    ([1.5, 2.5], (4, 7), 8)
    """

    def open(
        self, cohort: Sequence[int], *, kind: Kind, path: tuple[int, ...], drawn_from: int | None = None
    ) -> PlainSummation:
        """Begin a sum over `cohort`."""
        return PlainSummation(cohort)


class PlainSummation:
    """A running sum in float64, on the device of the arrays.

    Each call adds its clients in the order of their ids. The order of the calls can move the float64 total
    by its rounding, no more: to hold every client's arrays until the end and sort them costs the memory of
    a cohort and gains that one bit.
    """

    discreet = False

    def __init__(self, cohort: Sequence[int]) -> None:
        self.ledger = Ledger(cohort)
        self.totals: dict[str, Tensor] = {}

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Add one row of each array for each client, in the order of client ids."""
        self.ledger.enter(clients, arrays)
        order = sorted(range(len(clients)), key=lambda row: clients[row])
        for name, array in arrays.items():
            if order != list(range(len(order))):
                array = array[order]
            total = sum_rows(array)
            self.totals[name] = self.totals[name].add_(total) if name in self.totals else total

    def add_total(
        self, clients: Sequence[int], totals: dict[str, Tensor], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Add what is summed over the clients already, as if each had sent arrays of these types."""
        self.ledger.note(clients, {name: tuple(t.shape) for name, t in totals.items()}, dict(dtypes))
        if self.totals:
            torch._foreach_add_([self.totals[name] for name in totals], list(totals.values()))
        else:
            self.totals = {name: total.to(torch.float64) for name, total in totals.items()}

    def close(self) -> Sums:
        """The totals in the arrays' own dtype; a client sent its arrays and received nothing."""
        clients = self.ledger.close()
        arrays = copied(self.totals, self.ledger.dtypes)
        sent = sum(array.numel() * array.element_size() for array in arrays.values())
        return Sums(arrays=arrays, clients=clients, bytes_up=sent, bytes_down=0)
