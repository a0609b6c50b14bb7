"""The package against the specification: the same draws, whole runs of tasks, equal to 1e-10 in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import fot_minimal as fm
import pytest
import torch
from torch import Tensor, nn

from fot.benchmarks.catalogue import build
from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.federation.run import Run
from fot.methods import FOT, FedAvg
from fot.models import MultiHead
from fot.randomness import fold, key, permutation
from fot.subspace.sketch import _GaussianRows

SEED = 5


class KeyedDraws(fm.Draws):
    """The package's draws, under the names that the specification uses."""

    def __init__(self, layers: list[str]) -> None:
        self.layers = layers
        self.rows: dict[tuple[int, int, str], _GaussianRows] = {}

    def cohort(self, task, round, clients, size):
        drawn = permutation(key(SEED, "cohort", task, round), len(clients))[:size]
        return sorted(clients[j] for j in drawn.tolist())

    def order(self, task, round, client, epoch, n):
        return permutation(fold(fold(key(SEED, "order", task, round), client), epoch), n)

    def gaussian(self, task, client, layer, batch, n, s):
        if (task, client, layer) not in self.rows:
            of = fold(fold(key(SEED, "extraction", task), client), self.layers.index(layer))
            self.rows[task, client, layer] = _GaussianRows(of, "cpu")
        rows = torch.empty(n, 1, s, dtype=torch.float64)
        self.rows[task, client, layer].fill(rows)
        return rows[:, 0]


@dataclass(frozen=True)
class Case:
    stream: TaskStream
    model: nn.Module
    batch: int


def digits(tasks: int) -> Case:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 20, bias=False), nn.ReLU(), nn.Linear(20, 10)
    )
    return Case(build("digits", seed=SEED, partition="shards", tasks=tasks, clients=7), model, 16)


def pictures(tasks: int) -> Case:
    """A convolutional network with a head a task, on noise with a client that holds nothing."""
    g = torch.Generator().manual_seed(2)

    def make(index: int) -> Task:
        x, y = torch.randn(90, 2, 9, 9, generator=g), torch.randint(3, (90,), generator=g)
        held = (*torch.arange(60).split([13, 27, 20]), torch.empty(0, dtype=torch.int64))
        return Task(index, f"{index}", 3, x[:60], y[:60], x[60:], y[60:], held)

    made = [make(index) for index in range(tasks)]
    torch.manual_seed(3)
    body = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, dilation=2),
        nn.ReLU(),
        nn.Flatten(),
    )
    return Case(TaskStream("noise", 4, True, (2, 9, 9), tasks, made.__getitem__), MultiHead(body, 27), 10)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("rule", ["energy", "authors"])
@pytest.mark.parametrize("case", [digits, pictures])
def test_fot(case, rule, engine):
    """Three tasks: the second extraction finds bases that hold the first, and grows them."""
    extractions = compare(case(3), "fot", fot(rule), rule, engine)
    first, second = (told["layers"] for told in extractions)
    assert [told["threshold"] for told in extractions] == [0.7, pytest.approx(0.75)]
    for layer in first:
        assert 0 < first[layer]["rank"] == second[layer]["rank"] - second[layer]["added"]
        assert second[layer]["added"] > 0 and 5 < second[layer]["covered"] < 75


@pytest.mark.parametrize("case", [digits, pictures])
def test_fot_on_two_tasks(case):
    (extraction,) = compare(case(2), "fot", fot("energy"), "energy", "sequential")
    assert all(layer["added"] == layer["rank"] > 0 for layer in extraction["layers"].values())


def test_fedavg():
    assert compare(digits(2), "fedavg", FedAvg(), "energy", "sequential") == []


def fot(rule: str) -> FOT:
    return FOT(threshold=0.7, increment=0.05, rule=rule, sketch="2d")


def compare(case: Case, name: str, method: FOT | FedAvg, rule: str, engine: str) -> list[dict[str, Any]]:
    """Run both and hold one to the other; returns what the package told of its extractions."""
    extractions: list[dict[str, Any]] = []

    def observe(event: str, **told: Any) -> None:
        extractions.extend([told] if event == "extracted" else [])

    training = Training(rounds=4, cohort=3, epochs=2, batch_size=case.batch, lr=0.1, weight_decay=1e-3)
    options = EngineOptions(kind=engine, device="cpu", precision="float64")
    run = Run(
        case.stream, case.model, method, training=training, engine=options, seed=SEED, observer=observe
    )  # fmt: skip
    summary = run()

    model = Run(case.stream, case.model, method, engine=options, seed=SEED).network  # at the same start
    for task in case.stream:
        model.add_task(task.classes, SEED, task.index)
    settings = fm.Settings(
        rounds=4, cohort=3, epochs=2, batch=case.batch, lr=0.1, weight_decay=1e-3,
        threshold=0.7, increment=0.05, sampling=2, rule=rule,
    )  # fmt: skip
    tasks = [
        fm.Task(t.train_x.double(), t.train_y, t.test_x.double(), t.test_y, t.clients) for t in case.stream
    ]
    layers = list(fm.protected(model.module))
    result = fm.run(model.module, tasks, settings, name, KeyedDraws(layers))

    moved = 0.0
    for parameter, value in result.W.items():
        torch.testing.assert_close(run.state.server.params[parameter], value, rtol=0, atol=1e-10)
        moved += float((value - model.tree()[parameter]).abs().sum())
    assert moved > 1  # the two agree on something that happened
    for task, row in enumerate(result.accuracy):
        assert summary["accuracy"][task][task:] == pytest.approx(row)
    assert summary["acc"] == pytest.approx(result.acc)
    assert summary["fgt"] == pytest.approx(result.fgt)
    for layer in run.state.server.state:
        O, P = run.state.server.state[layer][0], result.O[layer]
        assert 0 < O.shape[1] == P.shape[1] < O.shape[0]
        torch.testing.assert_close(projector(O), projector(P), rtol=0, atol=1e-10)
    return extractions


def projector(O: Tensor) -> Tensor:
    return O @ O.T
