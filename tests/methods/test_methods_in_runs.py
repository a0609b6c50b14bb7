"""Methods in whole runs: who takes part, what clients keep, what is protected as it comes."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Extraction, Training
from fot.engines.sequential import SequentialEngine
from fot.errors import UserError
from fot.federation.run import Run
from fot.methods import FOT, METHODS, ClientData, Method, Server
from fot.models import MultiHead
from fot.network import Network, Tree

CPU = EngineOptions(kind="sequential", device="cpu", precision="float64")


def stream(clients: int = 6, tasks: int = 2) -> TaskStream:
    def make(index: int) -> Task:
        g = torch.Generator().manual_seed(index)
        x, y = torch.randn(60, 6, generator=g), torch.randint(3, (60,), generator=g)
        return Task(index, f"{index}", 3, x, y, x, y, tuple(torch.arange(60).chunk(clients)))

    return TaskStream("noise", clients, True, (6,), tasks, make)


class Watched(FOT):
    """Notes who takes part at the end of a task, and with which model."""

    seen: ClassVar[dict[int, Tree]] = {}

    def end_of_task(self, network, params, data, client, broadcast):
        self.seen[data.client] = params
        return super().end_of_task(network, params, data, client, broadcast)

    def consolidate(self, network, server, sums, task, key):
        self.seen[-1] = server.params
        return super().consolidate(network, server, sums, task, key)


@pytest.mark.parametrize("participants", ["all", "cohort"])
@pytest.mark.parametrize("model", ["global", "local"])
def test_who_takes_part_and_with_which_model(participants, model):
    events: list[tuple[str, dict]] = []
    Watched.seen.clear()
    method = Watched(threshold=0.9, participants=participants, model=model)
    torch.manual_seed(0)
    run = Run(
        stream(), MultiHead(nn.Linear(6, 4), 4), method,
        training=Training(rounds=2, cohort=3, batch_size=5, lr=0.1), engine=CPU,
        observer=lambda event, **fields: events.append((event, fields)),
    )  # fmt: skip
    run()
    models = dict(Watched.seen)
    server = models.pop(-1)
    people = list(models)
    assert len(people) == (6 if participants == "all" else 3)
    trained = [client for client in people if models[client] is not server]
    assert len(trained) == (3 if model == "local" else 0)
    for client in trained:
        assert (models[client]["body.weight"] - server["body.weight"]).abs().max() > 1e-6
    if trained:  # the last round's cohort, each with its own: their mean is the server's model
        mean = torch.stack([models[client]["body.weight"] for client in trained]).mean(0)
        torch.testing.assert_close(mean, server["body.weight"])
    extracted = [fields for event, fields in events if event == "extracted"]
    assert len(extracted) == 1 and extracted[0]["clients"] == len(people)
    weights = 8 * (6 * 4 + 4 + 3 * 4)
    assert extracted[0]["bytes_down"] == (weights if model == "global" else 0)


class Talker(Method):
    sums_only = False


def test_a_method_that_needs_more_than_sums_is_refused_by_name(monkeypatch):
    from fot.federation.experiment import resolve

    monkeypatch.setitem(METHODS, "talker", Talker)
    with pytest.raises(UserError, match=r"talker needs more than sums"):
        Run.of(resolve("digits", method="talker", sets=["aggregation.kind=secure"]))
    for kind in ("plain", "encoded"):
        Run.of(resolve("digits", method="talker", sets=[f"aggregation.kind={kind}"]))
    Run.of(resolve("digits", method="fot", sets=["aggregation.kind=secure"]))


class Keeper(Method):
    """Keeps its samples' mean on the client and sends nothing: as EWC or a memory of samples would."""

    def end_of_task(self, network, params, data, client, broadcast):
        return {"mean": data.x.mean(0)}, {}


def test_clients_may_keep_and_send_nothing():
    events: list[str] = []
    run = Run(
        stream(), MultiHead(nn.Linear(6, 4), 4), Keeper(),
        training=Training(rounds=1), engine=CPU, observer=lambda event, **_: events.append(event),
    )  # fmt: skip
    summary = run()
    assert sorted(run.state.clients) == [0, 1, 2, 3, 4, 5] and "warning" not in events
    assert summary["bytes_up"]["extraction"] == 0
    torch.testing.assert_close(run.state.clients[1]["mean"], stream()[0].train_x[10:20].double().mean(0))


def test_heads_that_are_named_are_protected_as_they_come():
    run = Run(
        stream(tasks=3), MultiHead(nn.Linear(6, 4), 4), FOT(protect=("body", "heads.*"), threshold=0.9),
        training=Training(rounds=1, cohort=2, lr=0.1), engine=CPU,
    )  # fmt: skip
    run()
    ranks = {name: basis.shape[-1] for name, basis in run.state.server.state.items()}
    assert set(ranks) == {"body", "heads.0", "heads.1"} and min(ranks.values()) > 0


def test_a_bias_that_is_not_trained_is_not_missed():
    """With biases protected, a frozen one is in no update, and its layer is projected all the same."""
    model = MultiHead(nn.Linear(6, 4), 4)
    model.body.bias.requires_grad_(False)
    method = FOT(bias=True, threshold=1.0)
    run = Run(stream(), model, method, training=Training(rounds=1, lr=0.1), engine=CPU)
    run()
    assert method.dimensions(run.network) == {"body": 6}
    assert torch.equal(run.state.server.params["body.bias"], model.body.bias.double())


def test_plain_sums_of_sketches():
    """Two clients' sketches through the engine and a summation are the sums of the two."""
    method = FOT()
    net = Network(
        MultiHead(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), 4), dtype=torch.float64
    )
    net.add_task(3, 0, 0)
    task = stream(clients=2)[0]
    server = Server(net.tree(), {})
    engine = SequentialEngine(net, method, Training())
    summation = make_aggregation("plain", seed=0).open([0, 1], kind="statistics", path=(0, 0))
    outcome = engine.extract(Extraction(server, task, [0, 1], 99, {}, summation))
    assert outcome.sums is not None and outcome.sums.clients == (0, 1)
    x = task.train_x.double()
    parts = [
        method.end_of_task(net, net.tree(), ClientData(x[held], task.train_y[held], 0, 99, c, c), {}, {})[1]
        for c, held in enumerate(task.clients)
    ]
    for name, total in outcome.sums.arrays.items():
        torch.testing.assert_close(total, parts[0][name] + parts[1][name])
