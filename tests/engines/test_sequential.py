"""The reference engine against hand-written loops, and against clients that break."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task, TaskStream
from fot.dropout import keyed_dropout
from fot.engines.base import EngineOptions, Round, RoundKeys, Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.errors import UserError
from fot.federation.run import Run
from fot.methods import FOT, FedAvg, Method, Server
from fot.models import MultiHead
from fot.network import Network
from fot.randomness import fold, key, permutation

CPU = EngineOptions(kind="sequential", device="cpu")
KEYS = RoundKeys(key(0, "order"), key(0, "dropout"), key(0, "augment"))


def task(index: int = 0) -> Task:
    g = torch.Generator().manual_seed(index)
    x, y = torch.randn(50, 4, generator=g), torch.randint(3, (50,), generator=g)
    held = (*torch.arange(40).split([7, 16, 17]), torch.empty(0, dtype=torch.int64))
    return Task(index, f"task {index}", 3, x, y, x[40:], y[40:], held)


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def engine(method: Method | None = None, **training) -> SequentialEngine:
    return SequentialEngine(Network(model(), dtype=torch.float64), method or FedAvg(), Training(**training))


def train(engine: SequentialEngine, task: Task, cohort: list[int], **options):
    summation = make_aggregation("plain", seed=0).open(cohort, kind="update", path=(0, 0))
    server = Server(engine.network.tree(), {})
    return engine.train(Round(server, task, cohort, KEYS, {}, summation, **options)), server


def by_hand(task: Task, client: int, training: Training, augment=None) -> tuple[nn.Module, float]:
    """The textbook's loop: torch's modules, torch's SGD, the same order and masks."""
    net = model().double().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=training.lr, weight_decay=training.weight_decay)
    held, losses = task.clients[client], []
    for epoch in range(training.epochs):
        order = held[permutation(fold(fold(KEYS.order, client), epoch), len(held))]
        for start in range(0, len(order), training.batch_size):
            rows = order[start : start + training.batch_size]
            step = len(losses)
            x = task.train_x[rows].double()
            if augment:
                keys = [fold(fold(fold(KEYS.augment, client), step), b) for b in range(len(rows))]
                x = augment(x, torch.tensor(keys))
            optimizer.zero_grad()
            with keyed_dropout(fold(fold(KEYS.dropout, client), step)):
                loss = nn.functional.cross_entropy(net(x), task.train_y[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return net, sum(losses) / len(losses)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_round_is_torchs_sgd_on_every_client(epochs, weight_decay):
    """Short last batches included: 7, 16 and 17 samples in batches of 8."""
    t, hand = task(), Training(epochs=epochs, batch_size=8, lr=0.3, weight_decay=weight_decay)
    e = engine(epochs=epochs, batch_size=8, lr=0.3, weight_decay=weight_decay)
    outcome, server = train(e, t, [0, 1, 2], keep_local=True)
    nets = [by_hand(t, client, hand) for client in range(3)]
    for name in e.network.trained(0):
        ends = torch.stack([dict(net.named_parameters())[name].detach() for net, _ in nets])
        expected = (ends - server.params[name]).sum(0)
        torch.testing.assert_close(outcome.sums.arrays[name], expected, rtol=0, atol=1e-12)
        assert expected.abs().max() > 1e-3
        for client in range(3):
            torch.testing.assert_close(outcome.local_params[client][name], ends[client], rtol=0, atol=1e-12)
    assert float(outcome.sums.arrays[LOSS]) == pytest.approx(sum(loss for _, loss in nets), abs=1e-12)
    assert outcome.sums.clients == (0, 1, 2) and outcome.excluded == ()
    assert all(torch.equal(server.params[n], tensor) for n, tensor in e.network.tree().items())


def test_samples_are_augmented_by_their_own_keys():
    def augment(x, keys):
        assert len(x) == len(keys)
        return x * (1 + (keys % 7).double().unsqueeze(1) / 10)

    t = replace(task(), augment=augment)
    outcome, server = train(engine(batch_size=8, lr=0.3, epochs=2), t, [1])
    net, _ = by_hand(t, 1, Training(batch_size=8, lr=0.3, epochs=2), augment)
    for name, parameter in net.named_parameters():
        expected = parameter.detach() - server.params[name]
        torch.testing.assert_close(outcome.sums.arrays[name], expected, rtol=0, atol=1e-12)


def test_what_a_module_draws_by_itself_is_repeatable():
    """Noise that torch draws comes from the client's key; whoever else draws is not disturbed."""

    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(3) + torch.rand(len(x), 3)

    sums = []
    for seed in (1, 2):
        torch.manual_seed(0)
        net = Network(Noisy(4, 3), dtype=torch.float64)
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        outcome, _ = train(SequentialEngine(net, FedAvg(), Training(lr=0.1)), task(), [0, 1])
        assert torch.equal(torch.random.get_rng_state(), before)
        alone, _ = train(SequentialEngine(net, FedAvg(), Training(lr=0.1)), task(), [1])
        sums.append((outcome.sums.arrays["weight"], alone.sums.arrays["weight"]))
    assert torch.equal(sums[0][0], sums[1][0]) and torch.equal(sums[0][1], sums[1][1])


def test_each_task_trains_on_its_own_data():
    e = engine(batch_size=8)
    one, _ = train(e, task(0), [0])
    two, _ = train(e, task(1), [0])
    alone, _ = train(engine(batch_size=8), task(1), [0])
    assert torch.equal(two.sums.arrays["0.weight"], alone.sums.arrays["0.weight"])
    assert not torch.equal(one.sums.arrays["0.weight"], two.sums.arrays["0.weight"])


def test_local_models_are_kept_only_where_they_are_asked_for():
    outcome, _ = train(engine(), task(), [0, 1])
    assert outcome.local_params == {}


class Doubled(FedAvg):
    """Steps along twice the gradient, and sees its client's state."""

    def precondition(self, network, gradients, client):
        return {name: 2 * gradient for name, gradient in gradients.items()}


def test_a_method_may_step_along_something_else():
    one, _ = train(engine(Doubled(), lr=0.1, batch_size=8), task(), [2])
    two, _ = train(engine(FedAvg(), lr=0.2, batch_size=8), task(), [2])
    for name, total in one.sums.arrays.items():
        torch.testing.assert_close(total, two.sums.arrays[name])


def damaged(clients: list[int]) -> Task:
    t = task()
    x = t.train_x.clone()
    for client in clients:
        x[t.clients[client][0], 1] = torch.inf if client % 2 else torch.nan
    return replace(t, train_x=x)


def test_a_client_that_is_not_finite_is_left_out():
    outcome, _ = train(engine(batch_size=8), damaged([1]), [0, 1, 2], keep_local=True)
    healthy, _ = train(engine(batch_size=8), task(), [0, 2])
    assert outcome.excluded == (1,) and outcome.sums.clients == (0, 2)
    assert sorted(outcome.local_params) == [0, 2]
    for name, total in outcome.sums.arrays.items():
        assert torch.equal(total, healthy.sums.arrays[name])


def test_nobody_is_left():
    outcome, _ = train(engine(), damaged([0, 1, 2]), [0, 1, 2])
    assert outcome.sums is None and outcome.excluded == (0, 1, 2)


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
def test_a_client_with_damaged_data_is_left_out_of_extraction_too(kind):
    told: list[tuple[str, dict]] = []
    stream = TaskStream("broken", 4, False, (4,), 2, lambda i: replace(damaged([1]), index=i))
    run = Run(
        stream, model(), FOT(threshold=0.9), training=Training(rounds=2, batch_size=8),
        engine=EngineOptions(kind=kind, device="cpu"),
        observer=lambda event, **fields: told.append((event, fields)),
    )  # fmt: skip
    summary = run()
    (extracted,) = [fields for event, fields in told if event == "extracted"]
    assert extracted["excluded"] == [1] and extracted["clients"] == 2
    assert all(f["excluded"] == [1] and f["clients"] == 2 for e, f in told if e == "round_finished")
    assert summary["excluded"] == 4 + 1  # a round each of two tasks of two rounds, and the extraction
    assert 0 < summary["subspace"]["0"][0] <= 100
    warnings = [fields["message"] for event, fields in told if event == "warning"]
    assert [w for w in warnings if w.startswith("task 1: updates of client(s) 1 were not finite")]
    assert [w for w in warnings if w.startswith("task 1: statistics of client(s) 1 were not finite")]


def test_no_client_can_be_extracted_from():
    """Nothing is learnt of that task, the run goes on, and says so."""
    told: list[tuple[str, dict]] = []
    broken = replace(damaged([0, 1, 2]), index=0)
    stream = TaskStream("broken", 4, False, (4,), 2, lambda i: broken if i == 0 else task(1))
    run = Run(
        stream, model(), FOT(), training=Training(rounds=1), engine=EngineOptions(device="cpu"),
        observer=lambda event, **fields: told.append((event, fields)),
    )  # fmt: skip
    run()
    assert run.state.server.state == {}
    (extracted,) = [fields for event, fields in told if event == "extracted"]
    assert extracted["excluded"] == [0, 1, 2] and extracted["clients"] == 0


@pytest.mark.parametrize(("broken", "min_clients"), [([0, 1, 2], 1), ([1], 3)])
def test_a_void_round_leaves_the_model_as_it_was(broken, min_clients):
    told: list[dict] = []

    def observe(event, **fields):
        if event == "round_finished":
            told.append(fields)

    t = damaged(broken)
    stream = TaskStream("broken", 4, False, (4,), 1, lambda _: t)
    training = Training(rounds=2, cohort=3, min_clients=min_clients, batch_size=8)
    run = Run(
        stream, model(), FedAvg(), training=training, observer=observe, engine=EngineOptions(device="cpu")
    )
    summary = run()
    assert all(torch.equal(run.state.server.params[n], p) for n, p in run.network.tree().items())
    assert [fields["void"] for fields in told] == [True, True] and told[0]["loss"] is None
    assert [fields["excluded"] for fields in told] == [broken, broken]
    assert summary["rounds"] == 2 and summary["excluded"] == 2 * len(broken)


def test_enough_clients_are_enough():
    t = damaged([1])
    stream = TaskStream("broken", 4, False, (4,), 1, lambda _: t)
    training = Training(rounds=1, cohort=3, min_clients=2, lr=0.1)
    run = Run(stream, model(), FedAvg(), training=training, engine=EngineOptions(device="cpu"))
    run()
    assert not torch.equal(run.state.server.params["0.weight"], run.network.tree()["0.weight"])


def test_clients_without_data_are_never_asked():
    told: list[int] = []

    class Spy(SequentialEngine):
        def local_training(self, round, client):
            told.append(client)
            return super().local_training(round, client)

    stream = TaskStream("own", 4, False, (4,), 2, task)
    training = Training(rounds=3, cohort=4)
    run = Run(
        stream, model(), FOT(), training=training, engine=EngineOptions(kind="sequential", device="cpu")
    )
    run.engine = Spy(run.network, run.method, training)
    run()
    assert told == [0, 1, 2] * 6


def test_nobody_holds_data():
    empty = replace(task(), clients=(torch.empty(0, dtype=torch.int64),))
    stream = TaskStream("own", 1, False, (4,), 1, lambda _: empty)
    with pytest.raises(UserError, match=r"task 1 \(task 0\): no client holds any of its data"):
        Run(stream, model(), FedAvg(), engine=EngineOptions(device="cpu"))()


def test_the_heads_of_other_tasks_stay_and_are_not_sent():
    torch.manual_seed(0)
    network = Network(MultiHead(nn.Linear(4, 5), 5), dtype=torch.float64)
    for index in range(2):
        network.add_task(3, 0, index)
    e = SequentialEngine(network, FedAvg(), Training(weight_decay=0.1))
    outcome, server = train(e, task(1), [0, 1], keep_local=True)
    assert set(outcome.sums.arrays) == {"body.weight", "body.bias", "heads.1.weight", LOSS}
    assert torch.equal(outcome.local_params[0]["heads.0.weight"], server.params["heads.0.weight"])


def test_evaluation_counts_right_answers():
    class Copy(nn.Module):
        def forward(self, x):
            return x

    e = SequentialEngine(Network(Copy()), FedAvg(), Training())
    y = torch.arange(2500) % 3
    x = nn.functional.one_hot(y, 3).float()
    wrong = torch.arange(0, 2500, 4)
    x[wrong] = x[wrong].roll(1, dims=1)
    assert e.evaluate({}, x, y, 0) == 100 * (2500 - len(wrong)) / 2500
    assert e.evaluate({}, x[:0], y[:0], 0) == 0


def test_evaluation_is_in_eval_mode():
    e = engine()
    t = task()
    assert len({e.evaluate(e.network.tree(), t.train_x, t.train_y, 0) for _ in range(5)}) == 1


def test_whole_number_inputs_stay_whole():
    """Tokens are not turned into floats."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    x, y = torch.randint(10, (12, 2)), torch.randint(3, (12,))
    t = Task(0, "words", 3, x, y, x, y, (torch.arange(12),))
    e = SequentialEngine(Network(net, dtype=torch.float64), FedAvg(), Training())
    outcome, _ = train(e, t, [0])
    assert outcome.sums.arrays["0.weight"].abs().max() > 0
    assert 0 <= e.evaluate(e.network.tree(), x, y, 0) <= 100


def test_rounds_of_a_task():
    assert [Training(rounds=7).rounds_of(t) for t in (0, 5)] == [7, 7]
    assert [Training(rounds=(4, 2, 3)).rounds_of(t) for t in range(5)] == [4, 2, 3, 3, 3]


def test_impossible_training_is_refused():
    with pytest.raises(UserError, match=r"training\.rounds: the list is empty"):
        Training(rounds=())
    with pytest.raises(UserError, match=r"training\.min_clients: 4 is more than the cohort of 3"):
        Training(cohort=3, min_clients=4)
    Training(cohort=3, min_clients=3)


def test_the_device_must_be_there():
    assert EngineOptions(device="cpu").resolved_device() == torch.device("cpu")
    for name in ("cuda:77", "nonsense"):
        with pytest.raises(UserError, match=r"engine\.device"):
            EngineOptions(device=name).resolved_device()
