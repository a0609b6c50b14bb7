"""Cohorts that cannot train at once, or not all of them: no rule, no memory, numbers that are not finite."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cohorts import CLASSES, MODELS, Proximal, a_task, one_round, rounds
from torch import Tensor, nn

from fot.benchmarks.stream import Task
from fot.engines.base import Training
from fot.engines.sequential import SequentialEngine
from fot.engines.vectorized import VectorizedEngine, steps
from fot.errors import UserError
from fot.methods import FedAvg
from fot.methods.base import Batch, Method, Server
from fot.models import mlp
from fot.network import Network, Tree


def short_of_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """As on a GPU that has memory for so many clients."""
    train = VectorizedEngine.local_cohort

    def local_cohort(self: VectorizedEngine, rounds: Any, piece: Any, **options: Any) -> Tree:
        if options.get("recorded", True) and sum(map(len, piece)) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, rounds, piece, **options)

    monkeypatch.setattr(VectorizedEngine, "local_cohort", local_cohort)


@pytest.mark.parametrize(("room", "left"), [(4, 3), (1, 1)])
@pytest.mark.parametrize("diverging", [False, True])
def test_what_does_not_fit_into_memory_is_trained_in_pieces(
    monkeypatch: pytest.MonkeyPatch, room: int, left: int, diverging: bool
) -> None:
    task = a_task((12,), (6, 7, 3, 6, 8))
    if diverging:
        task.train_x[task.clients[1][0]] = float("nan")
    outcomes = []
    for kind in (SequentialEngine, VectorizedEngine):
        torch.manual_seed(0)
        network = Network(MODELS["mlp"][0](), dtype=torch.float64)
        engine = kind(network, FedAvg(), Training(batch_size=4, lr=0.05))
        if kind is VectorizedEngine:
            short_of_memory(monkeypatch, room)
            with pytest.warns(UserWarning, match=f"5 clients at once do not fit .* {3} train at once"):
                outcomes.append(one_round(engine, Server(network.tree(), {}), task, 0, keep_local=diverging))
            assert engine.at_once == left and engine.fallback is None
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # what was found out once is kept
                one_round(engine, Server(network.tree(), {}), task, 1)
        else:
            outcomes.append(one_round(engine, Server(network.tree(), {}), task, 0, keep_local=diverging))
    (one, alone), (other, folded) = outcomes
    assert folded.excluded == alone.excluded == ((1,) if diverging else ())
    assert set(folded.local_params) == set(alone.local_params)
    for name in one.params:
        torch.testing.assert_close(other.params[name], one.params[name], rtol=1e-10, atol=1e-10)


def test_a_client_that_does_not_fit_into_memory_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    task = a_task((12,), (6, 7, 3))
    network = Network(MODELS["mlp"][0](), dtype=torch.float64)
    engine = VectorizedEngine(network, FedAvg(), Training(batch_size=4, lr=0.05))
    short_of_memory(monkeypatch, 0)
    with pytest.warns(UserWarning), pytest.raises(UserError, match=r"lower training\.batch_size"):
        one_round(engine, Server(network.tree(), {}), task, 0)


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


def test_sums_that_differ_from_those_of_the_clients_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = steps._Dense.total
    monkeypatch.setattr(steps._Dense, "total", lambda self: right(self) * (1 + 1e-6))
    network = Network(MODELS["mlp"][0](), dtype=torch.float64)
    engine = VectorizedEngine(network, FedAvg(), Training(batch_size=4, lr=0.05))
    with pytest.warns(UserWarning, match="differ from clients trained alone"):
        one_round(engine, Server(network.tree(), {}), a_task((12,), (6, 7, 3)), 0)


class MixingLater(Method):
    """A loss that sees each sample beside the others of its batch from the second task on."""

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        logits = network(params, batch.x, batch.task, training=True)
        return batch.cross_entropy(logits - logits.mean(0) if batch.task else logits)


def test_whether_a_cohort_can_be_folded_is_found_out_for_each_task() -> None:
    network = Network(MODELS["mlp"][0](), dtype=torch.float64)
    engine = VectorizedEngine(network, MixingLater(), Training(batch_size=4, lr=0.05))
    server = Server(network.tree(), {})
    one_round(engine, server, a_task((12,), (6, 7, 3)), 0)
    assert engine.fallback is None
    with pytest.warns(UserWarning, match="differ from clients trained alone"):
        one_round(engine, server, a_task((12,), (6, 7, 3), 1), 0)
    one_round(engine, server, a_task((12,), (6, 7, 3)), 1)
    assert engine.fallback is None


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
