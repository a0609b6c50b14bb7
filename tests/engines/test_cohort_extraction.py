"""The end of a task for many clients at once equals the sequential engine's, client by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task
from fot.engines.base import Extraction, RoundOutcome, Training
from fot.engines.sequential import SequentialEngine
from fot.engines.sharded import ShardedEngine, World
from fot.engines.vectorized import VectorizedEngine, extraction
from fot.methods import FOT
from fot.methods.base import ClientData, Method, Server
from fot.models import mlp
from fot.network import Network, Tree

SIZES = (6, 17, 1, 9, 140, 4)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(inputs=12, hidden=(9, 8), classes=3, dropout=(0.2, 0.5)), (12,)),
    "conv": (conv_net, (4, 6, 6)),
    "tokens": (lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Linear(4, 5), nn.Linear(5, 2)), (12,)),
}


def a_task(shape: Sequence[int], sizes: Sequence[int] = SIZES) -> Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), *shape, generator=draw)
    y = torch.zeros(len(x), dtype=torch.int64)
    return Task(0, "task", 3, x, y, x[:2], y[:2], torch.randperm(len(x), generator=draw).split(list(sizes)))


def extracted(
    kind: type[SequentialEngine], model: Callable[[], nn.Module], method: Method, task: Task, *,
    kept: float = 0.0, aggregation: str = "plain", sharded: bool = False,
    clients: dict[int, Tree] | None = None, participants: Sequence[int] | None = None, **options: Any,
) -> RoundOutcome:  # fmt: skip
    """The end of a task, where a share `kept` of each layer's input space is protected already."""
    torch.manual_seed(0)
    network = Network(model(), dtype=torch.float64)
    state = {}
    if kept and isinstance(method, FOT):
        for layer in method._layers(network):
            wide = torch.randn(layer.groups, layer.dimension, layer.dimension).double()
            state[layer.name] = torch.linalg.qr(wide).Q[:, :, : round(kept * layer.dimension)]
    engine: Any = kind(network, method, Training())
    engine = ShardedEngine(engine, World()) if sharded else engine
    everyone = range(len(task.clients)) if participants is None else participants
    summation = make_aggregation(aggregation, seed=0).open(everyone, kind="statistics", path=(0,))
    server, states = Server(network.tree(), state), {} if clients is None else clients
    outcome: RoundOutcome = engine.extract(
        Extraction(server, task, everyone, 7, states, summation, **options)
    )
    return outcome


def assert_alike(got: RoundOutcome, wanted: RoundOutcome, tolerance: float = 1e-10) -> None:
    assert got.excluded == wanted.excluded
    assert got.sums is not None and wanted.sums is not None
    assert got.sums.clients == wanted.sums.clients and got.sums.bytes_up == wanted.sums.bytes_up
    assert got.sums.arrays.keys() == wanted.sums.arrays.keys()
    for name, array in wanted.sums.arrays.items():
        torch.testing.assert_close(got.sums.arrays[name], array, rtol=tolerance, atol=tolerance)


@pytest.fixture
def nobody_alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, FOT cannot ask a client alone."""

    def forbid() -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("a client was asked alone")

        monkeypatch.setattr(FOT, "end_of_task", refuse)

    return forbid


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kept", [0.0, 0.4], ids=["empty", "grown"])
@pytest.mark.parametrize(
    "method",
    [
        FOT(),
        FOT(rule="authors", sketch={"*": "2.5d"}, bias=True),
        FOT(exact=True),
        FOT(shared_sketch_seed=2, freeze_first=True),
    ],
    ids=["energy", "authors", "exact", "shared"],
)
def test_equals_the_sequential_engine(
    name: str, kept: float, method: FOT, nobody_alone: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shape = MODELS[name]
    task = a_task(shape)
    wanted = extracted(SequentialEngine, model, method, task, kept=kept)
    nobody_alone()
    for numbers in (1 << 23, 30 * task.train_x[0].numel(), 1):
        monkeypatch.setattr(extraction, "CPU_NUMBERS", numbers)
        assert_alike(extracted(VectorizedEngine, model, method, task, kept=kept), wanted)
    assert_alike(extracted(VectorizedEngine, model, method, task, kept=kept, sharded=True), wanted)


def test_the_ratio_is_summed_over_clients_not_that_of_their_pool() -> None:
    """A client whose inputs are protected already (ratio 0) and one whose are not (ratio 1), as large."""
    task = a_task((12,), (5, 10))
    with torch.no_grad():
        task.train_x[task.clients[0]] = torch.eye(12)[:5]
        task.train_x[task.clients[1]] = 3 * torch.eye(12)[[5] * 10]
    network = Network(nn.Linear(12, 3), dtype=torch.float64)
    server = Server(network.tree(), {"": torch.eye(12).double()[None, :, :5]})
    summation = make_aggregation("plain", seed=0).open([0, 1], kind="statistics", path=(0,))
    engine = VectorizedEngine(network, FOT(), Training())
    sums = engine.extract(Extraction(server, task, [0, 1], 7, {}, summation)).sums
    assert sums is not None
    assert sums.arrays["/ratio"].item() == pytest.approx(10)
    assert sums.arrays["/residual"].item() == pytest.approx(90)
    assert sums.arrays["/energy"].item() == pytest.approx(95)


def test_positions_are_those_among_all(nobody_alone: Callable[[], None]) -> None:
    """As under ``torchrun``: two halves, each with its places, add up to the whole."""
    model, shape = MODELS["mlp"]
    task, method = a_task(shape), FOT(shared_sketch_seed=2)
    wanted = extracted(SequentialEngine, model, method, task).sums
    nobody_alone()
    halves = [range(len(SIZES))[half::2] for half in (0, 1)]
    parts = [extracted(VectorizedEngine, model, method, task, participants=h, positions=h) for h in halves]
    assert wanted is not None
    for name, array in wanted.arrays.items():
        total = sum(part.sums.arrays[name] for part in parts if part.sums)
        torch.testing.assert_close(total, array, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("numbers", [1 << 23, 20 * 144])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_client_with_damaged_data_is_left_out(
    numbers: int, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "CPU_NUMBERS", numbers)
    model, shape = MODELS["conv"]
    task = a_task(shape)
    task.train_x[task.clients[1][3]] = float("nan")
    task.train_x[task.clients[5][2]] = float("inf")
    method = FOT(shared_sketch_seed=2)  # by the places among all, whoever is asked alone
    wanted = extracted(SequentialEngine, model, method, task)
    assert wanted.excluded == (1, 5)
    assert_alike(extracted(VectorizedEngine, model, method, task, sharded=sharded), wanted)


def test_all_data_are_damaged_or_those_of_the_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "CPU_NUMBERS", 1)
    model, shape = MODELS["mlp"]
    task = a_task(shape)
    task.train_x[task.clients[5]] = float("nan")
    wanted = extracted(SequentialEngine, model, FOT(), task)
    assert_alike(extracted(VectorizedEngine, model, FOT(), task), wanted)
    task.train_x.fill_(float("nan"))
    outcome = extracted(VectorizedEngine, model, FOT(), task)
    assert outcome.sums is None and outcome.excluded == tuple(range(len(SIZES)))


def test_clients_without_samples(nobody_alone: Callable[[], None]) -> None:
    model, shape = MODELS["conv"]
    task = a_task(shape, (0, 5, 0, 0, 7, 0))
    wanted = extracted(SequentialEngine, model, FOT(rule="authors"), task, kept=0.3)
    nobody_alone()
    assert_alike(extracted(VectorizedEngine, model, FOT(rule="authors"), task, kept=0.3), wanted)


def test_sums_that_need_each_clients_own_are_formed_one_by_one() -> None:
    model, shape = MODELS["mlp"]
    task = a_task(shape)
    wanted, got = (
        extracted(kind, model, FOT(), task, aggregation="encoded")
        for kind in (SequentialEngine, VectorizedEngine)
    )
    assert_alike(got, wanted, tolerance=0.0)


def test_clients_with_models_of_their_own_are_asked_alone() -> None:
    model, shape = MODELS["mlp"]
    task = a_task(shape)
    own = {
        c: {n: t + 0.1 * c for n, t in Network(model(), dtype=torch.float64).tree().items()} for c in (1, 3)
    }
    wanted, got = (
        extracted(kind, model, FOT(model="local"), task, local_params=own)
        for kind in (SequentialEngine, VectorizedEngine)
    )
    assert_alike(got, wanted, tolerance=0.0)


@dataclass(frozen=True)
class Counting(Method):
    """Clients keep how often they took part, and send it."""

    def end_of_task(
        self, network: Network, params: Tree, data: ClientData, client: Tree, broadcast: Tree
    ) -> tuple[Tree, Tree]:
        times = client.get("times", torch.zeros(())) + 1
        return {"times": times}, {"times": times * len(data.x)}


@dataclass(frozen=True)
class Doubled(FOT):
    """FOT with another end of a task, which FOT's own way to pool knows nothing of."""

    def end_of_task(
        self, network: Network, params: Tree, data: ClientData, client: Tree, broadcast: Tree
    ) -> tuple[Tree, Tree]:
        state, statistics = super().end_of_task(network, params, data, client, broadcast)
        return state, {name: 2 * array for name, array in statistics.items()}


@pytest.mark.parametrize("method", [Counting(), Doubled()], ids=["state", "subclass"])
def test_methods_that_do_not_pool(method: Method) -> None:
    model, shape = MODELS["mlp"]
    task = a_task(shape)
    states: list[dict[int, Tree]] = [{2: {"times": torch.ones(())}} for _ in range(2)]
    wanted, got = (
        extracted(kind, model, method, task, clients=own)
        for kind, own in zip((SequentialEngine, VectorizedEngine), states, strict=True)
    )
    assert_alike(got, wanted, tolerance=0.0)
    assert states[0] == states[1] and (len(states[1]) == len(SIZES)) == isinstance(method, Counting)


class Mixing(nn.Module):
    """The second layer's input depends on the other samples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) - x.mean(0))


class Twice(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x)))


class Constant(Mixing):
    """A layer that receives the same for every batch, however many samples that has."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x) + self.first(torch.ones(1, 12, dtype=x.dtype)).sum()


@pytest.mark.parametrize("model", [Mixing, Twice, Constant])
def test_networks_whose_samples_cannot_share_a_batch(model: type[nn.Module]) -> None:
    task = a_task((12,))
    wanted = extracted(SequentialEngine, model, FOT(), task)
    with pytest.warns(UserWarning, match="one by one after a task: what a layer receives"):
        got = extracted(VectorizedEngine, model, FOT(), task)
    assert_alike(got, wanted, tolerance=0.0)


def test_what_does_not_fit_into_memory_is_asked_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape = MODELS["mlp"]
    task, pool = a_task(shape), FOT.pooled_statistics
    wanted = extracted(SequentialEngine, model, FOT(), task)

    def short(self: FOT, network: Network, params: Tree, clients: Any, broadcast: Tree) -> Tree | None:
        if len(clients) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pool(self, network, params, clients, broadcast)

    monkeypatch.setattr(FOT, "pooled_statistics", short)
    monkeypatch.setattr(extraction, "CPU_NUMBERS", 30 * task.train_x[0].numel())
    with pytest.warns(UserWarning, match="some are asked alone"):
        assert_alike(extracted(VectorizedEngine, model, FOT(), task), wanted)


def test_memory_is_that_of_one_sum_and_of_chunks(nobody_alone: Callable[[], None]) -> None:
    """Three hundred clients: nothing that is made has a matrix for each."""
    task, largest = a_task((40,), (2,) * 300), 0
    nobody_alone()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        extracted(VectorizedEngine, lambda: mlp(inputs=40, hidden=(30,), classes=3), FOT(sketch="2d"), task)
    assert 600 * 40 <= largest <= 256 * 80 * 2 < 300 * 40 * 80
