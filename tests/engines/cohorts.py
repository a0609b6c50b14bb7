"""Cohorts to train, by either engine, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task
from fot.engines.base import Extraction, Round, RoundKeys, RoundOutcome, Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized import VectorizedEngine
from fot.methods.base import Batch, Method, Server
from fot.models import alexnet, mlp, resnet18, resnet18_norm
from fot.network import Network, Tree
from fot.randomness import key

CLASSES = 4


def a_task(shape: Sequence[int], sizes: Sequence[int], index: int = 0, augment: Any = None) -> Task:
    draw = torch.Generator().manual_seed(index)
    total = sum(sizes)
    x = torch.randn(total, *shape, generator=draw)
    y = torch.randint(0, CLASSES, (total,), generator=draw)
    clients = torch.randperm(total, generator=draw).split(list(sizes))
    return Task(index, f"task {index}", CLASSES, x, y, x[:20], y[:20], clients, augment)


def keys(task: int, number: int) -> RoundKeys:
    return RoundKeys(
        key(1, "order", task, number), key(1, "dropout", task, number), key(1, "augment", task, number)
    )


def one_round(
    engine: SequentialEngine, server: Server, task: Task, number: int, clients: dict[int, Tree] | None = None,
    cohort: Sequence[int] | None = None, **options: Any,
) -> tuple[Server, RoundOutcome]:  # fmt: skip
    cohort = range(len(task.clients)) if cohort is None else cohort
    summation = make_aggregation("plain", seed=0).open(list(cohort), kind="update", path=(task.index, number))
    drawn = keys(task.index, number)
    outcome = engine.train(Round(server, task, list(cohort), drawn, clients or {}, summation, **options))
    if outcome.sums is None:
        return server, outcome
    mean = {n: t / len(outcome.sums.clients) for n, t in outcome.sums.arrays.items() if n != LOSS}
    return engine.method.aggregate(engine.network, server, mean), outcome


def rounds(
    kind: type[SequentialEngine], model: Callable[[], nn.Module], method: Method, tasks: Sequence[Task],
    number: int, *, device: str = "cpu", training: Training | None = None, **options: Any,
) -> tuple[Tree, list[float], SequentialEngine]:  # fmt: skip
    torch.manual_seed(0)
    network = Network(model(), device=device, dtype=torch.float64)
    training = training or Training(batch_size=4, lr=0.05, weight_decay=0.02)
    engine = kind(network, method, training, **options)
    server = Server(network.tree(), {})
    losses = []
    for task in tasks:
        server = Server({**server.params, **network.add_task(CLASSES, 0, task.index)}, server.state)
        before = {name: tensor.clone() for name, tensor in server.params.items()}
        for r in range(number):
            first = server
            server, outcome = one_round(engine, server, task, r)
            if r == 0:  # the server's own tensors are never written to
                assert all(torch.equal(first.params[n], before[n]) for n in before)
            assert outcome.sums is not None
            losses.append(float(outcome.sums.arrays[LOSS]))
        if task is not tasks[-1] and method.extracts:
            everyone = range(len(task.clients))
            summation = make_aggregation("plain", seed=0).open(
                everyone, kind="statistics", path=(task.index,)
            )
            outcome = engine.extract(Extraction(server, task, everyone, 7, {}, summation))
            assert outcome.sums is not None
            server, _ = method.consolidate(network, server, outcome.sums.arrays, task.index, 7)
    return server.params, losses, engine


def assert_engines_agree(
    model: Callable[[], nn.Module], method: Method, tasks: Sequence[Task], number: int, **more: Any
) -> None:
    vectorized = {name: more.pop(name) for name in ("at_once",) if name in more}
    wanted, wanted_losses, _ = rounds(SequentialEngine, model, method, tasks, number, **more)
    got, losses, engine = rounds(VectorizedEngine, model, method, tasks, number, **more, **vectorized)
    assert engine.fallback is None
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-10, atol=1e-10, msg=name)
    assert losses == pytest.approx(wanted_losses, abs=1e-10)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(inputs=12, hidden=(9, 8), classes=CLASSES, dropout=(0.2, 0.5)), (12,)),
    "multi-head mlp": (lambda: mlp(inputs=12, hidden=(9, 8), multi_head=True), (12,)),
    "alexnet": (lambda: alexnet(channels=(4, 5, 6), hidden=(60, 70)), (3, 32, 32)),
    "resnet18": (lambda: resnet18(filters=2, size=16), (3, 16, 16)),
    "resnet18_norm": (lambda: resnet18_norm(filters=4, size=32), (3, 32, 32)),
}


class Reader(nn.Module):
    """A sequence read by attention, then by recurrent layers; dropout in both."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True)
        self.read = nn.LSTM(6, 5, num_layers=2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.read(self.attend(x))[0][:, -1])
        return y


@dataclass(frozen=True)
class Proximal(Method):
    """A loss with a term in the parameters and a client's state, and a preconditioner."""

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        pull = sum((client[name] * params[name].square()).sum() for name in client)
        return super().loss(network, params, batch, client) + pull

    def precondition(self, network: Network, gradients: Tree, client: Tree) -> Tree:
        return {name: 2 * g for name, g in gradients.items()}
