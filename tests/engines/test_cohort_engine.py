"""The vectorised engine equals the sequential one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from random_networks import random_network
from torch import Tensor, nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task
from fot.engines.base import Extraction, Round, RoundKeys, RoundOutcome, Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized import VectorizedEngine, steps
from fot.federation.experiment import resolve
from fot.methods import FOT, FedAvg
from fot.methods.base import Batch, Method, Server
from fot.models import alexnet, mlp, multi_head, resnet18, resnet18_norm
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.8)], ids=["fedavg", "fot"])
def test_equals_the_sequential_engine(name: str, method: Method) -> None:
    """Five rounds, over two tasks under FOT; unequal clients, short last batches, dropout, weight decay."""
    model, shape = MODELS[name]
    sizes = (6, 7, 3, 9) if name.startswith("m") else (6, 7, 3)
    tasks = [a_task(shape, sizes, t) for t in range(2 if isinstance(method, FOT) else 1)]
    assert_engines_agree(model, method, tasks, 5 // len(tasks) + 1)


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("pmnist", (784,)),
        ("cifar100", (3, 32, 32)),
        ("five-datasets", (3, 32, 32)),
        ("miniimagenet", (3, 84, 84)),
    ],
)
@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.8, sketch=16)], ids=["fedavg", "fot"])
def test_the_papers_networks_at_full_size(recipe: str, shape: tuple[int, ...], method: Method) -> None:
    """Five rounds a task of unequal clients with short last steps.

    Few samples, and the paper's step: with a larger one training diverges here.
    """
    tasks = [a_task(shape, (5, 3, 4), t) for t in range(2 if method.extracts else 1)]
    training = Training(batch_size=2, lr=0.01, weight_decay=0.02)
    assert_engines_agree(resolve(recipe).make_model, method, tasks, 5, training=training)


@pytest.mark.parametrize("seed", range(60))
def test_random_networks(seed: int) -> None:
    model, shape = random_network(seed, CLASSES)
    assert_engines_agree(model, FedAvg(), [a_task(shape, (4, 7, 6))], 2)


def test_epochs_augmentation_and_pieces_of_a_cohort() -> None:
    def augment(x: Tensor, keys: Tensor) -> Tensor:
        return x * (1 + (keys % 5).to(x.dtype)[:, None] / 10)

    model, shape = MODELS["mlp"]
    training = Training(batch_size=4, epochs=3, lr=0.05, weight_decay=0.02)
    tasks = [a_task(shape, (6, 7, 3, 9, 6), augment=augment)]
    for at_once in (1, 2, 5):
        assert_engines_agree(model, FedAvg(), tasks, 2, training=training, at_once=at_once)


def test_running_statistics_are_each_clients_own() -> None:
    def model() -> nn.Module:
        return multi_head(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), (3, 5, 5)
        )

    assert_engines_agree(model, FedAvg(), [a_task((3, 5, 5), (6, 7, 3, 8))], 3)


def test_wide_layers_are_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    start = steps._Factored.__init__

    def note(self: Any, weight: Tensor, *rest: Any) -> None:
        made.append(tuple(weight.shape))
        start(self, weight, *rest)

    monkeypatch.setattr(steps._Factored, "__init__", note)
    model, shape = (lambda: mlp(inputs=90, hidden=(120, 100), classes=CLASSES, dropout=(0.2, 0.5))), (90,)
    training = Training(batch_size=3, epochs=2, lr=0.05, weight_decay=0.5)
    assert_engines_agree(model, FedAvg(), [a_task(shape, (6, 7, 3))], 3, training=training)
    assert {(1, 120, 90), (1, 100, 120)} <= set(made) and (1, CLASSES, 100) not in made


@pytest.mark.parametrize("name", ["mlp", "alexnet"])
def test_what_a_round_gives_may_be_overwritten_by_the_next(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As on a GPU, where a recording is replayed into the same tensors again and again."""
    train, outputs = VectorizedEngine.local_cohort, {}

    def replayed(self: VectorizedEngine, *rest: Any, **options: Any) -> Tree:
        found = train(self, *rest, **options)
        kept = outputs.setdefault(tuple((n, t.shape, t.dtype) for n, t in found.items()), found)
        for n, tensor in found.items():
            kept[n].copy_(tensor)
        return kept

    monkeypatch.setattr(VectorizedEngine, "local_cohort", replayed)
    model, shape = MODELS[name]
    for method in (FedAvg(), FOT(threshold=0.8)):
        outputs.clear()
        assert_engines_agree(model, method, [a_task(shape, (6, 7, 3, 9), t) for t in range(2)], 2, at_once=2)


class Tied(nn.Module):
    """One weight used twice, and one used by hand: both must be left to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twice(torch.tanh(self.twice(x)))) + self.out.weight.sum(1)


def test_weights_used_twice() -> None:
    assert_engines_agree(Tied, FedAvg(), [a_task((6,), (6, 7, 3))], 3)


@dataclass(frozen=True)
class Proximal(Method):
    """A loss with a term in the parameters and a client's state, and a preconditioner."""

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        pull = sum((client[name] * params[name].square()).sum() for name in client)
        return super().loss(network, params, batch, client) + pull

    def precondition(self, network: Network, gradients: Tree, client: Tree) -> Tree:
        return {name: 2 * g for name, g in gradients.items()}


def test_methods_with_state_see_stacks() -> None:
    task = a_task((12,), (6, 7, 3, 6))
    servers, losses = [], []
    for kind in (SequentialEngine, VectorizedEngine):
        torch.manual_seed(0)
        network = Network(MODELS["mlp"][0](), dtype=torch.float64)
        engine = kind(network, Proximal(), Training(batch_size=4, lr=0.05))
        states = {c: {"fc1.weight": torch.full((9, 12), 0.1 * c, dtype=torch.float64)} for c in range(4)}
        server, outcome = one_round(engine, Server(network.tree(), {}), task, 0, states)
        servers.append(server.params)
        assert outcome.sums is not None
        losses.append(float(outcome.sums.arrays[LOSS]))
    assert engine.fallback is None
    for name in servers[0]:
        torch.testing.assert_close(servers[1][name], servers[0][name], rtol=1e-10, atol=1e-10)


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


@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.8)], ids=["fedavg", "fot"])
def test_sequences(method: Method) -> None:
    assert_engines_agree(Reader, method, [a_task((5, 6), (6, 7, 3, 9), t) for t in range(2)], 3)


class Mixing(nn.Module):
    """Subtracts the mean over the batch: no parameter is met, so only the check can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x - x.mean(0))


class Unknown(Mixing):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,oi->no", x, self.fc.weight)


class Noisy(Mixing):
    """Draws by itself: no engine can know for whom."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + torch.rand_like(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Mixing, "differ from clients trained alone"),
        (Noisy, "differ from clients trained alone"),
        (Unknown, "einsum"),
    ],
)
def test_what_cannot_be_folded_is_trained_sequentially(model: type[nn.Module], reason: str) -> None:
    task = a_task((6,), (6, 7, 3))
    with pytest.warns(UserWarning, match=reason):
        got, losses, engine = rounds(VectorizedEngine, model, FedAvg(), [task], 2)
    assert engine.fallback is not None and reason in engine.fallback
    wanted, wanted_losses, _ = rounds(SequentialEngine, model, FedAvg(), [task], 2)
    assert losses == wanted_losses and all(torch.equal(got[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize("at_once", [2, 5])
def test_a_client_that_diverges_is_left_out(at_once: int) -> None:
    task = a_task((12,), (6, 7, 3, 6, 8))
    task.train_x[task.clients[1][0]] = float("nan")
    task.train_x[task.clients[4][2]] = float("inf")
    outcomes = []
    for kind, options in ((SequentialEngine, {}), (VectorizedEngine, {"at_once": at_once})):
        torch.manual_seed(0)
        network = Network(MODELS["mlp"][0](), dtype=torch.float64)
        engine = kind(network, FedAvg(), Training(batch_size=4, lr=0.05), **options)
        outcomes.append(one_round(engine, Server(network.tree(), {}), task, 0, keep_local=True))
    assert engine.fallback is None
    (one, alone), (other, folded) = outcomes
    assert folded.excluded == alone.excluded == (1, 4)
    assert folded.sums is not None and folded.sums.clients == (0, 2, 3)
    for name in one.params:
        torch.testing.assert_close(other.params[name], one.params[name], rtol=1e-10, atol=1e-10)
    assert set(folded.local_params) == set(alone.local_params) == {0, 2, 3}
    for client, params in alone.local_params.items():
        for name, tensor in params.items():
            torch.testing.assert_close(folded.local_params[client][name], tensor, rtol=1e-10, atol=1e-10)


def test_all_clients_diverge() -> None:
    task = a_task((12,), (6, 7))
    task.train_x.fill_(float("nan"))
    network = Network(MODELS["mlp"][0]())
    engine = VectorizedEngine(network, FedAvg(), Training(batch_size=4))
    _, outcome = one_round(engine, Server(network.tree(), {}), task, 0)
    assert outcome.sums is None and outcome.excluded == (0, 1)


def test_bfloat16_is_near_float32() -> None:
    task = a_task((90,), (6, 7, 3))
    results = []
    for autocast in (False, True):
        torch.manual_seed(0)
        module = mlp(inputs=90, hidden=(120, 100), classes=CLASSES)
        network = Network(module, autocast=autocast)
        engine = VectorizedEngine(network, FedAvg(), Training(batch_size=3, lr=0.05))
        server, _ = one_round(engine, Server(network.tree(), {}), task, 0)
        assert engine.fallback is None
        results.append({n: server.params[n] - t for n, t in network.tree().items()})
    for name, exact in results[0].items():
        assert 0 < (results[1][name] - exact).norm() < 0.15 * exact.norm()


def test_memory_follows_the_cohort_not_the_clients() -> None:
    """Ten thousand clients of which four train: nothing that is made has a row for each client."""
    shape, many = (6,), 10_000
    x = torch.randn(many, *shape, generator=torch.Generator().manual_seed(0))
    y = torch.arange(many) % CLASSES
    task = Task(0, "many", CLASSES, x, y, x[:4], y[:4], tuple(torch.arange(many).split(1)))
    network = Network(mlp(inputs=6, hidden=(5,), classes=CLASSES), dtype=torch.float64)
    engine = VectorizedEngine(network, FedAvg(), Training(batch_size=4))
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    one_round(engine, Server(network.tree(), {}), task, 0, cohort=[3, 77, 5000, 9999])
    with Watch():
        one_round(engine, Server(network.tree(), {}), task, 1, cohort=[4, 76, 5001, 9998])
    assert engine.fallback is None and largest < 1000


def test_states_of_different_kinds_are_trained_sequentially_in_that_round_only() -> None:
    task = a_task((12,), (6, 7, 3, 6))
    network = Network(MODELS["mlp"][0](), dtype=torch.float64)
    engine = VectorizedEngine(network, Proximal(), Training(batch_size=4, lr=0.05))
    state = {2: {"fc1.weight": torch.ones(9, 12, dtype=torch.float64)}}
    server = Server(network.tree(), {})
    with pytest.warns(UserWarning, match="states of different kinds"):
        one_round(engine, server, task, 0, state)
    assert engine.fallback is not None
    one_round(engine, server, task, 1, state, cohort=[0, 1, 3])
    assert engine.fallback is None


class Attention(nn.Module):
    """Parameters laid over samples, products of samples with samples, and a layer's weight of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 2, 6))
        self.norm, self.parts = nn.LayerNorm(6), nn.Linear(6, 18)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))
        self.register_buffer("mask", torch.tensor([[0.0, -1.0], [0.0, 0.0]]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(self.norm(x.view(-1, 2, 6) + self.place)).chunk(3, -1)
        return self.out((torch.softmax(q @ k.mT + self.mask, -1) @ v).mean(1))


def test_a_users_own_network() -> None:
    assert_engines_agree(Attention, FedAvg(), [a_task((12,), (6, 7, 3))], 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_sequential_engine_on_a_gpu(name: str) -> None:
    model, shape = MODELS[name]
    assert_engines_agree(model, FedAvg(), [a_task(shape, (6, 7, 3, 6))], 3, device="cuda")
