"""The samples of a cohort, step by step: one padded table for all clients.

Everything is drawn on the device from the round's keys (see ``RoundKeys``), so that a client sees the
same samples in the same order, and is augmented and dropped alike, as when it trains alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fot.benchmarks.stream import Task
from fot.methods.base import Batch
from fot.randomness import bits, fold


class Holdings:
    """Which samples each client of a task holds: one list for all clients, and where each begins."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        self.sizes = [len(held) for held in task.clients]
        self.rows = torch.cat([*task.clients, torch.zeros(0, dtype=torch.int64)]).to(device)
        ends = torch.tensor([0, *self.sizes]).cumsum(0).to(device)
        self.begins, self.counts = ends[:-1], ends.diff()


@dataclass(frozen=True)
class FoldedBatch(Batch):
    """A cohort's batch; it remembers each client's own mean, for the record of losses."""

    clients: int
    means: list[Tensor] = field(default_factory=list)

    def mean(self, values: Tensor) -> Tensor:
        weighted = values * self.weight
        self.means.append(weighted.detach().view(self.clients, -1).sum(1))
        return weighted.sum()


@dataclass(frozen=True)
class Step:
    """One local step of all clients."""

    batch: FoldedBatch
    valid: Tensor | None
    """``[C·B]``, 1 for rows that count; None where all do."""
    active: Tensor | None
    """``[C]``, whether a client has samples in this step; None where all have."""
    dropout: Tensor
    """``[C]``, the key of each client's masks."""


def cohort_steps(
    task: Task,
    data: tuple[Tensor, Tensor],
    holdings: Holdings,
    clients: Tensor,
    keys: Tensor,
    *,
    shortest: int,
    longest: int,
    epochs: int,
    batch_size: int,
    dtype: torch.dtype,
) -> Iterator[Step]:
    """Yield the steps of a round.

    Parameters
    ----------
    clients, keys
        ``[C]`` clients, and the round's three keys (order, dropout, augment), on the device.
    shortest, longest
        Bounds of the numbers of samples that these clients hold: steps that all fill need no masks.
    """
    x, y = data
    count = holdings.counts[clients]
    begin = holdings.begins[clients]
    order, dropout, augment = (fold(key, clients) for key in keys)
    position = torch.arange(longest, device=clients.device)
    present = position < count[:, None]
    own_steps = (count + batch_size - 1) // batch_size
    for epoch in range(epochs):
        draw = bits(fold(order, epoch)[:, None], position)
        shuffled = torch.where(present, draw, 1 << 33).argsort(dim=1, stable=True)
        held = holdings.rows[begin[:, None] + torch.where(present, shuffled, 0)]
        for j in range(-(-longest // batch_size)):
            piece = slice(j * batch_size, min(longest, (j + 1) * batch_size))
            rows, valid = held[:, piece].flatten(), present[:, piece]
            step = own_steps * epoch + j
            inputs = x[rows]
            if task.augment is not None:
                inputs = task.augment(
                    inputs, fold(fold(augment, step)[:, None], position[: valid.shape[1]]).flatten()
                )
            everyone, full = shortest > piece.start, shortest >= piece.stop
            number = valid.sum(1, keepdim=True).clamp(min=1)
            weight = valid.to(dtype) / number.to(dtype)
            yield Step(
                FoldedBatch(inputs, y[rows], task.index, weight.flatten(), len(clients)),
                None if full else valid.flatten(),
                None if everyone else valid[:, 0],
                fold(dropout, step),
            )


def chunks(cohort: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """The cohort in pieces of at most ``most`` clients, those with like numbers of samples together.

    Examples
    --------
    >>> list(chunks([0, 1, 2], sizes=[5, 9, 5], most=2))
    [[0, 1], [2]]
    """
    ordered = sorted(cohort, key=lambda client: (-sizes[client], client))
    for start in range(0, len(ordered), most):
        yield sorted(ordered[start : start + most])
