"""Runs side by side: each ends as it would have ended alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import fot.federation.lockstep
from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.engines.vectorized import VectorizedEngine
from fot.federation.checkpoint import Checkpoints
from fot.federation.experiment import Experiment, resolve
from fot.federation.launch import alike, groups, launch, launch_together
from fot.federation.lockstep import lockstep
from fot.federation.run import Run
from fot.methods import FOT, FedAvg, Method
from fot.models import alexnet, mlp, multi_head
from fot.results import RunFolder

EXACT = EngineOptions(precision="float64", device="cpu")


def a_stream(shape: tuple[int, ...], seed: int, sizes: tuple[int, ...] = (6, 7, 3, 9), augment=None):
    """Two tasks of three classes, a head each, other data for each seed."""

    def make(index: int) -> Task:
        draw = torch.Generator().manual_seed(100 * seed + index)
        x, y = (
            torch.randn(sum(sizes), *shape, generator=draw),
            torch.randint(0, 3, (sum(sizes),), generator=draw),
        )
        clients = torch.randperm(len(x), generator=draw).split(list(sizes))
        return Task(index, f"task {index}", 3, x, y, x[:9], y[:9], clients, augment)

    return TaskStream("made", len(sizes), True, shape, 2, make)


def a_run(model, method: Method, seed: int, stream=None, **options) -> Run:
    torch.manual_seed(seed)
    made = model()
    training = Training(rounds=2, cohort=3, batch_size=4, lr=0.05, weight_decay=0.02)
    return Run(stream, made, method, **{"training": training, "engine": EXACT, "seed": seed, **options})


def assert_same(runs: list[Run], alone: list[Run]) -> None:
    for run, other in zip(runs, alone, strict=True):
        for tree, wanted in (
            (run.state.server.params, other.state.server.params),
            (run.state.server.state, other.state.server.state),
        ):
            assert tree.keys() == wanted.keys()
            for name in tree:
                torch.testing.assert_close(tree[name], wanted[name], rtol=1e-10, atol=1e-10, msg=name)


def counted(monkeypatch) -> list[int]:
    """How many runs each call of ``_train`` trained."""
    seen: list[int] = []
    train = VectorizedEngine._train

    def note(self, rounds):
        seen.append(len(rounds))
        return train(self, rounds)

    monkeypatch.setattr(VectorizedEngine, "_train", note)
    return seen


def flipped(x: Tensor, keys: Tensor) -> Tensor:
    return x * (1 - 2 * (keys % 2)).to(x.dtype).reshape(-1, *[1] * (x.dim() - 1))


BODIES = {
    "dropout": (lambda: mlp(inputs=12, hidden=(9, 8), dropout=(0.2, 0.5), multi_head=True), (12,)),
    "wide": (lambda: mlp(inputs=60, hidden=(90, 80), multi_head=True), (60,)),  # factored updates
    "alexnet": (lambda: alexnet(channels=(4, 5, 6), hidden=(60, 70)), (3, 32, 32)),
    "running statistics": (
        lambda: multi_head(
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), (3, 5, 5)
        ),
        (3, 5, 5),
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_each_run_ends_as_if_alone(name, monkeypatch):
    """Seeds, methods and thresholds side by side, each of its own data; unequal clients, decay, flips."""
    model, shape = BODIES[name]

    def runs() -> list[Run]:
        methods = [FedAvg(), FOT(threshold=0.8), FOT(threshold=0.5)]
        return [
            a_run(model, method, seed, a_stream(shape, seed, augment=flipped if seed else None))
            for seed, method in enumerate(methods)
        ]

    side_by_side, alone = runs(), runs()
    for run in alone:
        run()
    seen = counted(monkeypatch)
    monkeypatch.setattr(VectorizedEngine, "_most", lambda self, params: 6)  # two pieces a round
    lockstep(side_by_side)
    assert seen == [3, 3, 3, 3]
    assert_same(side_by_side, alone)


def test_runs_that_do_not_fit_into_memory_train_in_pieces(monkeypatch):
    model, shape = BODIES["dropout"]
    train, seen = VectorizedEngine.local_cohort, []

    def local_cohort(self, rounds, piece, **options):
        if options.get("recorded", True):
            seen.append(tuple(map(len, piece)))
            if sum(map(len, piece)) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, rounds, piece, **options)

    def runs() -> list[Run]:
        return [a_run(model, FOT(threshold=0.8), seed, a_stream(shape, seed)) for seed in range(2)]

    side_by_side, alone = runs(), runs()
    for run in alone:
        run()
    told = []
    side_by_side[1].tell = lambda event, **fields: told.append(fields.get("message", event))
    monkeypatch.setattr(VectorizedEngine, "local_cohort", local_cohort)
    lockstep(side_by_side)
    assert seen[:3] == [(3, 3), (2, 2), (1, 1)] and (3, 3) not in seen[1:]
    assert any("6 clients at once do not fit into the GPU's memory" in message for message in told)
    assert_same(side_by_side, alone)


def test_frozen_weights_may_differ_between_runs(monkeypatch):
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fixed, self.own = nn.Linear(12, 9), nn.Linear(9, 3)
            self.fixed.requires_grad_(False)
            self.register_buffer("scale", torch.full((9,), 2.0))  # alike in all runs

        def forward(self, x: Tensor) -> Tensor:
            return self.own(torch.tanh(self.fixed(x)) * self.scale)

    def stream(seed: int):
        made = a_stream((12,), seed)
        return TaskStream(made.name, made.num_clients, False, (12,), 2, made.make)

    side_by_side, alone = ([a_run(Half, FedAvg(), s, stream(s)) for s in range(2)] for _ in range(2))
    seen = counted(monkeypatch)
    lockstep(side_by_side)
    assert seen == [2, 2, 2, 2]
    for run in alone:
        run()
    assert_same(side_by_side, alone)


@pytest.mark.parametrize("kind", ["plain", "encoded"])
def test_a_client_that_is_not_finite_is_left_out_of_its_own_run_only(kind):
    def runs() -> list[Run]:
        made = []
        for seed in range(2):
            stream = a_stream((60,), seed)

            def make(index: int, stream=stream, seed=seed) -> Task:
                task = stream.make(index)
                if seed == 1:
                    task.train_x[task.clients[2]] = torch.nan
                return task

            stream = TaskStream(stream.name, 4, True, (60,), 2, make)
            aggregation = make_aggregation(kind, seed=seed)
            made.append(a_run(BODIES["wide"][0], FedAvg(), seed, stream, aggregation=aggregation))
        return made

    side_by_side, alone = runs(), runs()
    told: list[list[int]] = []
    side_by_side[1].tell = lambda event, **f: (
        told.append(f["excluded"]) if event == "round_finished" else None
    )
    lockstep(side_by_side)
    for run in alone:
        run()
    assert side_by_side[0].state.excluded == 0
    assert side_by_side[1].state.excluded == alone[1].state.excluded > 0
    assert {client for clients in told for client in clients} == {2}
    assert_same(side_by_side, alone)


def test_cohorts_of_other_sizes_train_apart(monkeypatch):
    """Where one run's task has fewer holders, its cohort is smaller: nothing is stacked, all is the same."""

    def runs() -> list[Run]:
        streams = [a_stream((12,), 0), a_stream((12,), 1, (9, 16, 0, 0))]
        return [a_run(BODIES["dropout"][0], FedAvg(), s, stream) for s, stream in enumerate(streams)]

    side_by_side, alone = runs(), runs()
    seen = counted(monkeypatch)
    lockstep(side_by_side)
    assert set(seen) == {1}
    for run in alone:
        run()
    assert_same(side_by_side, alone)


def test_a_run_that_is_behind_goes_first_and_meets_the_others(monkeypatch):
    def a_digits_run(seed: int) -> Run:
        sets = ["benchmark.tasks=2", "training.rounds=3", "model.hidden=[8]"]
        return Run.of(resolve("digits", method="fedavg", seed=seed, sets=sets))

    started, ahead = a_digits_run(0), a_digits_run(0)
    walk = started.walk()
    walk.send(started.engine.train(next(walk)))
    ahead.state = started.state  # one round is done
    seen = counted(monkeypatch)
    lockstep([ahead, a_digits_run(1)])
    assert seen == [1, 2, 2, 2, 2, 2]


def test_what_is_alike():
    def of(**more) -> Experiment:
        return resolve("digits", **{"method": "fot", "seed": 0, **more})

    base = alike(of())
    assert base is not None
    for same in ({"seed": 3}, {"method": "fedavg"}, {"sets": ["method.threshold=0.5"]}):
        assert alike(of(**same)) == base
    for sets in (["training.lr=0.3"], ["model.hidden=[7]"], ["benchmark.tasks=2"], ["evaluation.every=1"]):
        assert alike(of(sets=sets)) != base
    assert alike(of(partition="shards")) != base
    assert alike(of(sets=["aggregation.kind=secure"])) is None
    assert alike(of(engine="sequential")) is None
    assert groups([of(engine="sequential"), of(engine="sequential", seed=1)]) == [[0], [1]]


@dataclass(frozen=True)
class Pulled(Method):
    """A method whose clients train in a way of their own."""

    strength: float = 0.1

    def loss(self, network, params, batch, client):
        pull = sum(params[name].square().sum() for name in network.trained(batch.task))
        return super().loss(network, params, batch, client) + self.strength * pull


def test_methods_of_their_own_training_are_alike_only_with_equal_options():
    name = f"{__name__}:Pulled"
    strong, weak, other = (
        resolve("digits", method=name, seed=s, sets=[f"method.strength={v}"])
        for s, v in ((0, 0.1), (1, 0.1), (0, 0.2))
    )
    assert alike(strong) == alike(weak) != alike(other)


SMALL = ["benchmark.tasks=3", "training.rounds=4", "model.hidden=[20]", "checkpoint.rounds=1"]


def the_jobs(root: Path) -> list[tuple[Experiment, Path, object]]:
    made = [resolve("digits", method=m, seed=s, sets=SMALL) for m in ("fedavg", "fot") for s in range(2)]
    return [(e, root / f"{n}", lambda event, **fields: None) for n, e in enumerate(made)]


def left_behind(path: Path) -> tuple[object, ...]:
    folder = RunFolder.open(path)
    summary = folder.read_summary()
    del summary["seconds"]
    events = [{k: v for k, v in e.items() if k not in ("time", "seconds")} for e in folder.read_events()]
    return summary, events, folder.model.read_bytes(), folder.memory.exists() and folder.memory.read_bytes()


class Killed(BaseException):
    """Nothing catches this: as good as a kill, within one process."""


@pytest.mark.parametrize("moment", [1, 6, 13, 19, 30, 40])
def test_runs_side_by_side_go_on_from_a_common_checkpoint(tmp_path, monkeypatch, moment):
    """However far each had been saved when they were killed, they end byte for byte as undisturbed."""
    launch_together(the_jobs(tmp_path / "undisturbed"))
    save, saved = Checkpoints.save, []

    def killed_at(self, *rest):
        saved.append(self)
        if len(saved) == moment:
            raise Killed
        save(self, *rest)

    monkeypatch.setattr(Checkpoints, "save", killed_at)
    with pytest.raises(Killed):
        launch_together(the_jobs(tmp_path / "killed"))
    monkeypatch.setattr(Checkpoints, "save", save)
    launch_together(the_jobs(tmp_path / "killed"))
    for number in range(4):
        assert left_behind(tmp_path / "killed" / f"{number}") == left_behind(
            tmp_path / "undisturbed" / f"{number}"
        )


def test_where_the_clock_decides_all_runs_are_saved_or_none_is(tmp_path, monkeypatch):
    """Asked again after a first run was saved, the clock would say that it is not time."""
    asked, saved, save = set(), [], Checkpoints.save

    def due(self, rounds):
        first = rounds not in asked
        asked.add(rounds)
        return first

    def noted(self, state, *rest):
        saved.append(state.rounds)
        save(self, state, *rest)

    monkeypatch.setattr(Checkpoints, "due", due)
    monkeypatch.setattr(Checkpoints, "save", noted)
    launch_together(the_jobs(tmp_path))
    assert saved == [r for r in range(1, 13) for _ in range(4)]  # three tasks of four rounds, four runs


def test_finished_runs_are_read_and_the_others_run(tmp_path):
    jobs = the_jobs(tmp_path)
    first = launch(*jobs[0])
    summaries = launch_together(jobs, [{"sweep": {"n": n}} for n in range(4)])
    assert summaries[0] == first and "sweep" not in first
    assert [s["method"] for s in summaries] == ["fedavg", "fedavg", "fot", "fot"]
    assert json.loads((jobs[3][1] / "summary.json").read_text())["sweep"] == {"n": 3}
    assert all((path / "report.html").exists() for _, path, _ in jobs)


def test_seconds_are_shared_out(monkeypatch):
    """Runs that train at once for six seconds have trained for two each."""
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(fot.federation.lockstep.time, "perf_counter", lambda: next(clock, 16.0))
    runs = [
        SimpleNamespace(device=torch.device("cpu"), state=SimpleNamespace(seconds={"train": 1.0}))
        for _ in range(3)
    ]
    with fot.federation.lockstep._shared_clock(runs):
        pass
    assert [run.state.seconds["train"] for run in runs] == [3.0, 3.0, 3.0]
