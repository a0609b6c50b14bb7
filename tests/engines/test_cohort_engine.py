"""The vectorised engine equals the sequential one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cohorts import CLASSES, MODELS, Proximal, Reader, a_task, assert_engines_agree, one_round
from random_networks import random_network
from torch import Tensor, nn

from fot.engines.base import Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized import VectorizedEngine, steps
from fot.federation.experiment import resolve
from fot.methods import FOT, FedAvg
from fot.methods.base import Method, Server
from fot.models import mlp, multi_head
from fot.network import Network, Tree


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


def test_decay_may_leave_nothing_of_the_weights() -> None:
    """Factors would be divided by what is left."""
    model, shape = (lambda: mlp(inputs=90, hidden=(120, 100), classes=CLASSES)), (90,)
    training = Training(batch_size=3, lr=0.5, weight_decay=2.0)
    assert_engines_agree(model, FedAvg(), [a_task(shape, (6, 7, 3))], 2, training=training)


@pytest.fixture
def overwritten(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Tree]:
    """As on a GPU, where recordings are replayed into the same tensors, and share the memory they work in."""
    train, outputs = VectorizedEngine.local_cohort, dict[Any, Tree]()

    def replayed(self: VectorizedEngine, *rest: Any, **options: Any) -> Tree:
        found = train(self, *rest, **options)
        if not options.get("recorded", True):
            return found
        self._graphs["one"] = None  # type: ignore[assignment]
        for kept in outputs.values():
            for tensor in kept.values():
                tensor.zero_()
        kept = outputs.setdefault(tuple((n, t.shape, t.dtype) for n, t in found.items()), found)
        for n, tensor in found.items():
            kept[n].copy_(tensor)
        return kept

    monkeypatch.setattr(VectorizedEngine, "local_cohort", replayed)
    return outputs


@pytest.mark.parametrize("name", ["mlp", "alexnet"])
def test_what_a_round_gives_may_be_overwritten_by_the_next(overwritten: dict[Any, Tree], name: str) -> None:
    model, shape = MODELS[name]
    for method in (FedAvg(), FOT(threshold=0.8)):
        overwritten.clear()
        assert_engines_agree(model, method, [a_task(shape, (6, 7, 3, 9), t) for t in range(2)], 2, at_once=2)


def test_a_piece_that_is_not_finite_is_told_after_later_pieces(overwritten: dict[Any, Tree]) -> None:
    task = a_task((12,), (6, 6, 6))
    task.train_x[task.clients[0][0]] = float("nan")
    network = Network(MODELS["mlp"][0]())
    engine = VectorizedEngine(network, FedAvg(), Training(batch_size=4), at_once=1)
    engine.defers = True
    _, outcome = one_round(engine, Server(network.tree(), {}), task, 0, provisional=True)
    assert len(overwritten) == 1 and outcome.finite is not None and not outcome.finite


class Tied(nn.Module):
    """One weight used twice, and one used by hand: both must be left to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.out = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.twice(torch.tanh(self.twice(x)))) + self.out.weight.sum(1)


def test_weights_used_twice() -> None:
    assert_engines_agree(Tied, FedAvg(), [a_task((6,), (6, 7, 3))], 3)


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


@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.8)], ids=["fedavg", "fot"])
def test_sequences(method: Method) -> None:
    assert_engines_agree(Reader, method, [a_task((5, 6), (6, 7, 3, 9), t) for t in range(2)], 3)


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
