"""The sum in the ring without the masks: what secure aggregation gives, bit for bit, at the cost of a sum."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fot.aggregation.codec import Codec, Coding, packed_size
from fot.aggregation.interface import Aggregation, Kind, Ledger, Sums


class EncodedAggregation(Aggregation):
    """Encode every client's arrays, add the integers, decode.

    Examples
    --------
    >>> import torch
    >>> summation = EncodedAggregation(Codec()).open([0, 1], kind="update", path=(0, 0))
    >>> summation.add([0, 1], {"weight": torch.tensor([[0.25, 9.0], [0.5, 0.0]])})
    >>> sums = summation.close()
    >>> sums.arrays["weight"].tolist(), sums.clipped
    ([0.75, 4.0], 1)
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def open(
        self, cohort: Sequence[int], *, kind: Kind, path: tuple[int, ...], drawn_from: int | None = None
    ) -> EncodedSummation:
        """Begin a sum over `cohort`."""
        return EncodedSummation(self.codec, cohort, kind)

    def notes(self) -> list[str]:
        """Clips that were of no use."""
        return self.codec.notes()


class EncodedSummation:
    """A running sum of integers, on the device of the arrays; the codec leaves no room for an overflow."""

    discreet = False
    add_total = None

    def __init__(self, codec: Codec, cohort: Sequence[int], kind: Kind) -> None:
        self.codec = codec
        self.kind = kind
        self.ledger = Ledger(cohort)
        self.codings: dict[str, Coding] = {}
        self.totals: dict[str, Tensor] = {}
        self.clipped = 0

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Encode and add one row of each array for each client."""
        self.ledger.enter(clients, arrays)
        if not self.codings:
            self.codings = self.codec.codings(self.kind, self.ledger.shapes, len(self.ledger.cohort))
        for name, array in arrays.items():
            for row in array:  # one at a time: the integers take twice the memory of float32
                integers, clipped = self.codings[name].encode(row)
                self.clipped += clipped
                self.totals[name] = self.totals[name].add_(integers) if name in self.totals else integers

    def close(self) -> Sums:
        """The decoded totals; a client sent its packed words."""
        clients = self.ledger.close()
        dtypes = self.ledger.dtypes
        arrays = {n: self.codings[n].decode(total, dtypes[n]) for n, total in self.totals.items()}
        sent = sum(packed_size((self.codings[n].bits, total.numel())) for n, total in self.totals.items())
        return Sums(arrays=arrays, clients=clients, bytes_up=sent, bytes_down=0, clipped=self.clipped)
