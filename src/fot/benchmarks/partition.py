"""Who holds what: one task's training samples dealt to the clients.

Every draw is keyed by (seed, task), so the same seed deals the same samples on every platform, and each
task is dealt anew. No sample is dealt twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fot.errors import UserError
from fot.options import Between
from fot.randomness import fold, key, permutation, uniform

KINDS = ("iid", "shards", "dirichlet", "natural")


@dataclass(frozen=True)
class Partition:
    """How a task's samples are dealt to the clients.

    Parameters
    ----------
    kind
        ``iid``: equal random parts. ``shards``: the samples sorted by label and cut into two equal shards
        a client, two random ones each (the paper's non-IID), with no third class where it can be helped.
        ``dirichlet``: every class is shared out in proportions drawn from a symmetric Dirichlet
        distribution. ``natural``: by the owner that the data name for each sample; owner j is client j
        modulo `clients`.
    clients
        The clients that hold data of one task.
    alpha
        The concentration of ``dirichlet``; small is uneven.
    task_share
        The share of the tasks that a client sees: there are ``int(clients / task_share)`` clients in
        all, and a random `clients` of them hold data of a task. 1: all of them, always.
    imbalance
        The spread of the clients' sizes for ``iid``, and of the shards' for ``shards``: proportional to
        ``exp(imbalance * z)``, z standard normal. 0: equal sizes, and what is left over is not used.
    seed
        The run's seed.

    Examples
    --------
    >>> deal = Partition("shards", clients=3)
    >>> labels = torch.arange(6).repeat_interleave(2)
    >>> [labels[held].unique().numel() for held in deal(labels, task=0)]
    [2, 2, 2]
    >>> Partition("iid", clients=125, task_share=0.6).num_clients
    208
    """

    kind: str = "iid"
    clients: Annotated[int, Between(1)] = 10
    alpha: Annotated[float, Between(0)] = 0.5
    task_share: Annotated[float, Between(0, 1)] = 1.0
    imbalance: Annotated[float, Between(0)] = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"there is no partition {self.kind!r}; choose one of {', '.join(KINDS)}")
        if self.clients < 1:
            raise UserError(f"clients = {self.clients}: a federation needs at least 1 client")
        if not 0 < self.task_share <= 1:
            raise UserError(f"task_share = {self.task_share}: give a share above 0 and up to 1")
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise UserError(f"alpha = {self.alpha}: give a positive number")
        if not (self.imbalance >= 0 and math.isfinite(self.imbalance)):
            raise UserError(f"imbalance = {self.imbalance}: give 0 or a positive number")
        if self.imbalance and self.kind not in ("iid", "shards"):
            raise UserError(f"imbalance is for iid and shards; {self.kind} is unequal by itself: set it to 0")
        if self.task_share < 1 and self.kind == "natural":
            raise UserError("task_share is not for the natural partition, whose data say who holds what")

    @property
    def num_clients(self) -> int:
        """All clients of the federation, with data of a given task or without."""
        return int(self.clients / self.task_share)

    def __call__(self, labels: Tensor, task: int, owners: Tensor | None = None) -> tuple[Tensor, ...]:
        """The indices into `labels` that each of the `num_clients` clients holds; some may be empty."""
        if self.kind == "natural":
            if owners is None:
                raise UserError("the natural partition needs data that name each sample's owner; use iid")
            return tuple((owners % self.clients == c).nonzero().flatten() for c in range(self.clients))
        if self.kind != "dirichlet" and len(labels) < self.clients * (2 if self.kind == "shards" else 1):
            raise UserError(
                f"{len(labels)} samples of task {task + 1} are too few for {self.clients} clients"
            )
        of = key(self.seed, "partition", task)
        order = permutation(fold(of, 0), len(labels))
        if self.kind == "iid":
            parts = _cut(self._dealt(order, 1), self._weights(of, self.clients))
        elif self.kind == "shards":
            parts = self._shards(of, order[labels[order].argsort(stable=True)], labels)
        else:
            parts = self._dirichlet(of, order, labels)
        held = [torch.empty(0, dtype=torch.int64)] * self.num_clients
        chosen = permutation(fold(of, 1), self.num_clients)[: self.clients].sort().values
        for client, part in zip(chosen.tolist(), parts, strict=True):
            held[client] = part.sort().values
        return tuple(held)

    def _weights(self, of: int, parts: int) -> Tensor:
        """The sizes of the parts, up to a factor."""
        return torch.exp(self.imbalance * _normal(fold(of, 2), torch.arange(parts)))

    def _dealt(self, order: Tensor, parts: int) -> Tensor:
        """The samples that are dealt: all of them, less what equal parts would leave over.

        Shards may leave over more: 50,000 samples are 333 for each of 150 clients, but two shards of 166.
        """
        return order if self.imbalance else order[: len(order) - len(order) % (parts * self.clients)]

    def _shards(self, of: int, by_label: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Two random shards a client, without a third class wherever the shards allow it."""
        shards = _cut(self._dealt(by_label, 2), self._weights(of, 2 * self.clients))
        classes = [set(labels[shard].tolist()) for shard in shards]
        drawn = permutation(fold(of, 3), len(shards)).tolist()
        pairs = _pairs(classes, drawn)
        if any(len(classes[i] | classes[j]) > 2 for i, j in pairs):
            pairs = _pairs(classes, drawn, by_label=True)
        parts = [torch.cat([shards[i], shards[j]]) for i, j in pairs]
        return [parts[i] for i in permutation(fold(of, 5), self.clients).tolist()]

    def _dirichlet(self, of: int, order: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Class c goes to the clients in proportions p_c ~ Dirichlet(alpha): normalised Gamma draws."""
        by_class = []
        for label in range(int(labels.max()) + 1):
            log_gamma = _log_gamma(fold(fold(of, 4), label), self.clients, self.alpha)
            by_class.append(_cut(order[labels[order] == label], log_gamma.softmax(0)))
        return [torch.cat(pieces) for pieces in zip(*by_class, strict=True)]


def stratified(labels: Tensor, test_share: float, of: int) -> tuple[Tensor, Tensor]:
    """Training and test indices, the same share of every class in the test part (rounded).

    Examples
    --------
    >>> train, test = stratified(torch.tensor([0] * 10 + [1] * 5), 0.2, of=7)
    >>> len(train), len(test)
    (12, 3)
    """
    if not 0 < test_share < 1:
        raise UserError(f"test_share = {test_share}: give a share between 0 and 1")
    order = permutation(of, len(labels))
    members = [order[labels[order] == label] for label in sorted(set(labels.tolist()))]
    cuts = [round(len(m) * test_share) for m in members]
    train = torch.cat([m[cut:] for m, cut in zip(members, cuts, strict=True)])
    test = torch.cat([m[:cut] for m, cut in zip(members, cuts, strict=True)])
    return train.sort().values, test.sort().values


def _pairs(
    classes: Sequence[set[int]], drawn: Sequence[int], by_label: bool = False
) -> list[tuple[int, int]]:
    """The shards two by two, each shard being known by the classes it holds.

    One that crosses from a class to the next has two already: those choose first, among the shards that
    bring no third. At random they may take what a neighbour needs. By label, each takes a shard of its
    lower class if there is one, which only its neighbour below, already served, could have used as well;
    else of its upper one, else an empty shard. So as many as can be are served. Who remains takes the
    shard that adds least, and shards of one class are paired as they were drawn.
    """
    crossing = [j for j in drawn if len(classes[j]) > 1]
    free = [*crossing, *(j for j in drawn if len(classes[j]) < 2)]
    pairs: list[tuple[int, int]] = []

    def third(i: int, j: int) -> int:  # how many classes the two would have beyond two
        return max(len(classes[i] | classes[j]) - 2, 0)

    def pair(i: int, j: int) -> None:
        pairs.append((i, j))
        free.remove(i)
        free.remove(j)

    for i in sorted(crossing) if by_label else crossing:
        fitting = [j for j in free if j != i and not third(i, j)] if i in free else []
        if fitting and by_label:
            pair(i, min(fitting, key=lambda j: min(classes[j], default=math.inf)))
        elif fitting:
            pair(i, fitting[0])
    while free:
        first, *others = free
        pair(first, min(others, key=lambda j: third(first, j)))
    return pairs


def _cut(samples: Tensor, weights: Tensor) -> Sequence[Tensor]:
    """Consecutive pieces of sizes proportional to the weights, each within 1 of its share."""
    ends = (weights.cumsum(0) / weights.sum() * len(samples)).round().long()
    return samples.tensor_split(ends[:-1].tolist())


def _unit(of: int, counter: Tensor) -> Tensor:
    """Uniform draws strictly inside (0, 1), in float64."""
    return uniform(of, counter).double() + 2.0**-25


def _normal(of: int, counter: Tensor) -> Tensor:
    z: Tensor = torch.special.ndtri(_unit(of, counter))
    return z


def _log_gamma(of: int, n: int, alpha: float, tries: int = 64) -> Tensor:
    """Logarithms of `n` draws of Gamma(alpha, 1), by the rejection of Marsaglia and Tsang (2000).

    Gamma(alpha) has the law of Gamma(alpha + 1) * U**(1/alpha); the logarithm holds what would underflow
    at a small alpha. A try is accepted with probability above 0.95, so one of 64 always is.
    """
    d = alpha + 1 - 1 / 3
    counter = torch.arange(n * tries).view(n, tries)
    z = _normal(fold(of, 0), counter)
    v = (1 + z / math.sqrt(9 * d)).clamp_min(1e-12) ** 3
    accepted = _unit(fold(of, 1), counter).log() < z**2 / 2 + d - d * v + d * v.log()
    first = accepted.int().argmax(1, keepdim=True)
    log_v = v.log().gather(1, first).flatten()
    return math.log(d) + log_v + _unit(fold(of, 2), torch.arange(n)).log() / alpha
