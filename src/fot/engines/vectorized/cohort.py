"""The samples of a cohort, step by step: one padded table for all clients.

Everything is drawn on the device from the round's keys (see ``RoundKeys``), so that a client sees the
same samples in the same order, and is augmented and dropped alike, as when it trains alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fot.benchmarks.stream import Task
from fot.engines.vectorized import kernels
from fot.methods.base import Batch
from fot.randomness import bits, fold


class Holdings:
    """The samples of one task of each of R runs, one after another, and which of them a client holds."""

    def __init__(self, tasks: Sequence[Task], data: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.tasks = list(tasks)
        self.sizes = [[len(rows) for rows in task.clients] for task in tasks]
        """How many samples each client of each run holds."""
        self.x, self.y = (
            torch.cat(parts) if len(data) > 1 else parts[0] for parts in zip(*data, strict=True)
        )
        device = self.x.device
        held, begin = [torch.zeros(0, dtype=torch.int64)], 0
        for task, (x, _) in zip(tasks, data, strict=True):
            held += [rows + begin for rows in task.clients]
            begin += len(x)
        self.rows = torch.cat(held).to(device)
        ends = torch.tensor([len(rows) for rows in held]).cumsum(0).to(device)
        self.begins, self.counts = ends[:-1], ends.diff()
        numbers = torch.tensor([0, *(len(task.clients) for task in tasks)])
        self.first = numbers.cumsum(0)[:-1, None].to(device)
        """``[R, 1]``, the place of each run's client 0 among the clients of all runs."""

    def take(self, other: Holdings) -> bool:
        """Hold another task's samples in the tensors that a recorded round reads, where they are alike.

        False where they are not alike, and then nothing is taken.
        """
        names = ("x", "y", "rows", "begins", "counts")
        both = [(getattr(self, name), getattr(other, name)) for name in names]
        if any(a.shape != b.shape or a.dtype != b.dtype for a, b in both):
            return False
        if self.bounds() != other.bounds() or any(
            a.augment is not b.augment for a, b in zip(self.tasks, other.tasks, strict=True)
        ):
            return False
        for old, new in both:
            old.copy_(new)
        self.tasks, self.sizes = other.tasks, other.sizes
        return True

    def bounds(self) -> tuple[int, int]:
        """The fewest and the most samples of a client that has any."""
        some = [size for own in self.sizes for size in own if size]
        return min(some), max(some)

    def of(self, tasks: Sequence[Task]) -> bool:
        """Whether these are the holdings of those tasks."""
        return len(tasks) == len(self.tasks) and all(a is b for a, b in zip(tasks, self.tasks, strict=True))


@dataclass(frozen=True)
class FoldedBatch(Batch):
    """A cohort's batch; it remembers each client's own mean, for the record of losses."""

    clients: int
    plain: bool
    """Whether the loss is the cross-entropy itself, so that nothing multiplies its gradient."""
    means: list[Tensor] = field(default_factory=list)

    def mean(self, values: Tensor) -> Tensor:
        weighted = values * self.weight
        self.means.append(weighted.detach().view(self.clients, -1).sum(1))
        return weighted.sum()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        if logits.dim() != 2 or not kernels.at_hand(logits.device):
            return super().cross_entropy(logits)
        total, own = _CrossEntropy.apply(logits, self.y, self.weight, self)  # type: ignore[no-untyped-call]
        self.means.append(own)
        return total  # type: ignore[no-any-return]


class _CrossEntropy(torch.autograd.Function):
    """The clients' losses, summed and each, by a kernel that finds the gradient on the way."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, y: Tensor, weight: Tensor, batch: FoldedBatch
    ) -> tuple[Tensor, Tensor]:
        from fot.engines.vectorized.kernels import linear

        own, d = linear.cross_entropy(logits, y, weight, batch.clients)
        ctx.plain = batch.plain
        ctx.set_materialize_grads(False)  # nobody asks for the gradient at each client's own
        ctx.save_for_backward(d)
        ctx.mark_non_differentiable(own)
        return own.sum(), own

    @staticmethod
    def backward(ctx: Any, of_total: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (d,) = ctx.saved_tensors
        return d if ctx.plain else d * of_total, None, None, None


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
    holdings: Holdings,
    clients: Tensor,
    keys: Tensor,
    *,
    shortest: int,
    longest: int,
    epochs: int,
    batch_size: int,
    dtype: torch.dtype,
    plain: bool,
) -> Iterator[Step]:
    """Yield the steps of a round.

    Parameters
    ----------
    clients, keys
        ``[R, C/R]`` clients of each run, and each run's three keys (order, dropout, augment), ``[R, 3]``;
        on the device.
    shortest, longest
        Bounds of the numbers of samples that these clients hold: steps that all fill need no masks.
    plain
        Whether the clients' loss is the cross-entropy itself.
    """
    fold, bits, in_order = _drawing(clients.device)
    places = (clients + holdings.first).flatten()
    count, begin = holdings.counts[places], holdings.begins[places]
    order, dropout, augment = (fold(keys[:, k : k + 1], clients).flatten() for k in range(3))
    position = torch.arange(longest, device=clients.device)
    number, whole = -(-longest // batch_size), longest // batch_size * batch_size
    nth = torch.arange(number, device=clients.device)[:, None]

    def by_step(table: Tensor) -> list[Tensor]:
        """What each step takes of a table ``[C, longest]``; a call for all costs as much as one for each."""
        steps = table[:, :whole].view(len(table), -1, batch_size).transpose(0, 1).contiguous()
        return [*steps.flatten(1), *([table[:, whole:].flatten()] if longest > whole else [])]

    if shortest == longest:  # all fill the same steps
        own_steps: int | Tensor = number
        valid: list[Tensor] = []
        sizes = [min(batch_size, longest - start) for start in range(0, longest, batch_size)]
        of_size = {size: holdings.x.new_full((len(places) * size,), 1 / size, dtype=dtype) for size in sizes}
        shares = [of_size[size] for size in sizes]
    else:
        own_steps = (count + batch_size - 1) // batch_size
        present = position < count[:, None]
        batches = (count - nth * batch_size).clamp(1, batch_size).to(dtype).T.repeat_interleave(batch_size, 1)
        valid, shares = by_step(present), by_step(present.to(dtype) / batches[:, :longest])
    for epoch in range(epochs):
        draw = bits(fold(order, epoch)[:, None], position)
        draw = torch.where(present, draw, 1 << 33) if valid else draw
        shuffled = in_order(draw)
        held = holdings.rows[begin[:, None] + (torch.where(present, shuffled, 0) if valid else shuffled)]
        masks = fold(dropout, own_steps * epoch + nth)
        for j, (rows, y, share) in enumerate(
            zip(by_step(held), by_step(holdings.y[held]), shares, strict=True)
        ):
            inputs, start = holdings.x[rows], j * batch_size
            if any(task.augment for task in holdings.tasks):
                step, size = own_steps * epoch + j, len(rows) // len(places)
                own = fold(fold(augment, step)[:, None], position[:size]).flatten()
                inputs = _augmented(holdings.tasks, inputs, own)
            full = shortest >= min(longest, start + batch_size)
            yield Step(
                FoldedBatch(inputs, y, holdings.tasks[0].index, share, len(places), plain),
                None if full else valid[j],
                None if shortest > start else valid[j].view(len(places), -1)[:, 0],
                masks[j],
            )


def _drawing(device: torch.device) -> tuple[Any, Any, Any]:
    """``fold``, ``bits`` and what puts rows in order; on a GPU by kernels, in one launch each."""
    if not kernels.at_hand(device):
        return fold, bits, lambda numbers: numbers.argsort(dim=1, stable=True)
    from fot.engines.vectorized.kernels import draws

    return draws.fold, draws.bits, draws.order


def _augmented(tasks: Sequence[Task], inputs: Tensor, keys: Tensor) -> Tensor:
    """The samples, run after run, as each run's task augments them."""
    parts = zip(tasks, inputs.chunk(len(tasks)), keys.chunk(len(tasks)), strict=True)
    return torch.cat([task.augment(x, own) if task.augment else x for task, x, own in parts])


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
