"""A cohort that trains by kernels equals its clients."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cohorts import CLASSES, MODELS, Reader, a_task, keys, one_round
from random_networks import random_network
from torch import Tensor, nn

from fot.aggregation import make_aggregation
from fot.engines.base import Round
from fot.engines.sequential import SequentialEngine
from fot.engines.vectorized import VectorizedEngine, local, steps
from fot.engines.vectorized.aside import Aside
from fot.methods import FOT, FedAvg
from fot.methods.base import Batch, Method, Server
from fot.models import mlp
from fot.network import Network, Tree

pytest.importorskip("triton")
from by_kernels import DEVICE, SMALL_MAPS, TRAINING, agree, by_kernels, small_alexnet, untried  # noqa: F401


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.8)], ids=["fedavg", "fot"])
def test_equals_the_sequential_engine_by_kernels(
    request: pytest.FixtureRequest, name: str, method: Method
) -> None:
    """Dropout, weight decay, a step that not all clients take; under FOT two tasks of a step each."""
    model, shape = MODELS[name]
    if name.startswith("resnet"):  # of so many layers the trial takes long
        request.getfixturevalue("untried")
    tasks = [a_task(shape, (2, 2), t) for t in range(2)] if method.extracts else [a_task(shape, (4, 2))]
    agree(model, method, tasks, 1)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("seed", range(30))
def test_random_networks_by_kernels(seed: int) -> None:
    model, shape = random_network(seed, CLASSES)
    agree(model, FedAvg(), [a_task(shape, (4, 7, 6))], 1, training=replace(TRAINING, batch_size=4))


STEPS = [((6, 7, 3, 5), 4, 4), ((5, 3), 4, 2), ((2, 3), 1, 2), ((4, 3, 6), 3, 2)]


@pytest.mark.parametrize(("sizes", "batch_size", "at_once"), STEPS)
def test_steps_of_any_length(sizes: Sequence[int], batch_size: int, at_once: int) -> None:
    """Also of a single sample, all of them or the last one; clients in pieces."""
    training, (model, shape) = replace(TRAINING, batch_size=batch_size), MODELS["mlp"]
    agree(model, FedAvg(), [a_task(shape, sizes)], 2, training=replace(training, epochs=2), at_once=at_once)
    if sizes == (5, 3):
        agree(small_alexnet, FedAvg(), [a_task(SMALL_MAPS, sizes)], 1, training=training, at_once=at_once)


def test_sequences_by_kernels() -> None:
    agree(Reader, FedAvg(), [a_task((3, 6), (4, 2))], 1)


def test_a_client_alone() -> None:
    """Layers of one channel besides: its weights must not share memory with those that it was sent."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 3, 3, bias=False), nn.Conv2d(3, 1, 1, bias=False), nn.Conv2d(1, 1, 2, bias=False),
            nn.Flatten(), nn.Linear(9, CLASSES),
        )  # fmt: skip

    agree(model, FedAvg(), [a_task((2, 6, 6), (4, 3))], 2, at_once=1)


@pytest.mark.parametrize(
    ("sizes", "enough", "parts"), [((4, 6, 2), 200, 3), ((4, 6, 2, 5), 2, 2), ((4, 6), 1, 1)]
)
def test_wide_layers_are_factored_by_kernels(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], enough: int, parts: int
) -> None:
    """A table holds the rows of a round and no more; a sum is taken in as many parts as fill a GPU."""
    monkeypatch.setattr(steps, "ENOUGH", enough)
    made, tables, taken = [], [], []
    start, count = steps._Factored.__init__, steps._Factored._parts

    def note(self: Any, weight: Tensor, clients: int, rows: int) -> None:
        made.append(tuple(weight.shape))
        tables.append(rows)
        start(self, weight, clients, rows)

    def counted(self: Any) -> int:
        taken.append(count(self))
        return taken[-1]

    monkeypatch.setattr(steps._Factored, "__init__", note)
    monkeypatch.setattr(steps._Factored, "_parts", counted)
    model = lambda: mlp(inputs=60, hidden=(90, 80), classes=CLASSES, dropout=(0.2, 0.5))  # noqa: E731
    agree(model, FedAvg(), [a_task((60,), sizes)], 2)
    assert made[-4:] == [(1, 90, 60), (1, 80, 90)] * 2  # and not the last layer, in neither round
    assert tables[-4:] == [6] * 4 and taken[-4:] == [parts] * 4


class Late(Aside):
    """A second stream that does nothing until it is waited for."""

    def do(self, work: Callable[..., None], *given: Any) -> Callable[[], None]:
        todo = [lambda: work(*given)]
        return lambda: todo.pop()() if todo else None


@pytest.mark.parametrize("totals", [True, False])
def test_filters_are_not_read_before_they_are_stepped(monkeypatch: pytest.MonkeyPatch, totals: bool) -> None:
    """Neither by the next step, nor by a sum or by what a client sends."""
    monkeypatch.setattr(local, "Aside", Late)
    outcomes = []
    for kind in (SequentialEngine, VectorizedEngine):
        torch.manual_seed(0)
        network = Network(small_alexnet(), device=DEVICE.type, dtype=torch.float64)
        server = Server(network.tree() | network.add_task(CLASSES, 0, 0), {})
        made = kind(network, FedAvg(), TRAINING)
        outcomes.append(one_round(made, server, a_task(SMALL_MAPS, (5, 2, 4)), 0, keep_local=not totals)[0])
    alone, folded = outcomes
    assert made.fallback is None
    for name, wanted in alone.params.items():
        torch.testing.assert_close(folded.params[name], wanted, rtol=1e-10, atol=1e-10, msg=name)


class Doubled(Method):
    """A loss that is not the cross-entropy itself."""

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        return 2 * super().loss(network, params, batch, client)


def test_a_loss_may_multiply_the_cross_entropy() -> None:
    agree(small_alexnet, Doubled(), [a_task(SMALL_MAPS, (4, 4, 4))], 1)


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize(("inputs", "factored"), [(8, False), (9, True)])
def test_a_first_layer_needs_its_factors_once(
    monkeypatch: pytest.MonkeyPatch, inputs: int, factored: bool
) -> None:
    """Nobody asks for the gradient at the data themselves: 8 rows of 8 + 4 numbers against thrice 8 x 4."""
    made: list[Any] = []
    factored_form = steps._Factored
    monkeypatch.setattr(steps, "_Factored", lambda *rest: made.append(rest) or factored_form(*rest))
    agree(lambda: nn.Linear(inputs, CLASSES), FedAvg(), [a_task((inputs,), (8, 3))], 1)
    assert bool(made) == factored


def test_runs_side_by_side_by_kernels() -> None:
    """Two runs of other models and other data: each cohort's sums are those of its own engine."""
    outcomes: list[list[Any]] = []
    tasks = [replace(a_task(SMALL_MAPS, (5, 2, 4), t), index=0) for t in range(2)]
    for kind in (SequentialEngine, VectorizedEngine):
        made = []
        for seed, task in enumerate(tasks):
            torch.manual_seed(seed)
            network = Network(small_alexnet(), device=DEVICE.type, dtype=torch.float64)
            server = Server(network.tree() | network.add_task(CLASSES, 0, 0), {})
            summation = make_aggregation("plain", seed=0).open(range(3), kind="update", path=(0, seed))
            made.append((network, Round(server, task, range(3), keys(0, seed), {}, summation)))
        own = [kind(network, FedAvg(), TRAINING) for network, _ in made]
        if kind is SequentialEngine:
            outcomes.append([e.train(r) for e, (_, r) in zip(own, made, strict=True)])
        else:
            outcomes.append(own[0].train_together([r for _, r in made]))
    for alone, together in zip(*outcomes, strict=True):
        assert alone.sums.arrays.keys() == together.sums.arrays.keys()
        for name, wanted in alone.sums.arrays.items():
            torch.testing.assert_close(together.sums.arrays[name], wanted, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
def test_a_client_that_diverges_is_left_out_by_kernels() -> None:
    """NaN and infinity come through ReLU, dropout and pooling to the client's own update, and to no other."""
    task = a_task(SMALL_MAPS, (4, 2, 3, 2))
    task.train_x[task.clients[1][0], 0, 4, 4] = float("nan")
    task.train_x[task.clients[2][2], 1, 5, 5] = float("inf")
    outcomes = []
    for kind in (SequentialEngine, VectorizedEngine):
        torch.manual_seed(0)
        network = Network(small_alexnet(), device=DEVICE.type, dtype=torch.float64)
        made = kind(network, FedAvg(), TRAINING)
        server = Server(network.tree() | network.add_task(CLASSES, 0, 0), {})
        outcomes.append(one_round(made, server, task, 0, keep_local=True)[1])
    alone, folded = outcomes
    assert made.fallback is None and folded.excluded == alone.excluded == (1, 2)
    for client in (0, 3):
        for name, tensor in alone.local_params[client].items():
            torch.testing.assert_close(folded.local_params[client][name], tensor, rtol=1e-10, atol=1e-10)


FIRST_ROUND = """
import sys
from dataclasses import replace
from fot.engines.bench import WORKS, _keys, _set_up, _ways
from fot.engines.vectorized import kernels
from fot.methods.base import Server

given = sys.argv[1] == "True"
kernels.at_hand = lambda device: given
network, task, training = _set_up(replace(WORKS["digits"], cohort=2, samples=20), "cpu", "float64")
_ways(network, training)["vectorized"](Server(network.tree(), {}), task, [0, 1], _keys(0))
sys.exit("sympy is imported" if "sympy" in sys.modules else 0)
"""


@pytest.mark.parametrize("given", [False, True])
def test_the_first_round_imports_nothing_that_takes_seconds(given: bool) -> None:
    """Parts of torch import sympy on their first use, which takes as long as hundreds of rounds on a GPU."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_ROUND, str(given)], check=True, timeout=300)
