"""Whole runs under secure and private sums: the same results, nobody named, and aborts that void one sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fot.aggregation import Privacy, make_aggregation
from fot.aggregation.codec import Codec
from fot.aggregation.encoded import EncodedAggregation, EncodedSummation
from fot.aggregation.plain import PlainAggregation
from fot.aggregation.secure.aggregation import INPUT, UNMASK
from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.engines.sequential import SequentialEngine
from fot.engines.sharded import PartSummation, ShardedEngine, World
from fot.errors import UserError
from fot.federation.experiment import resolve
from fot.federation.launch import launch
from fot.federation.run import Run
from fot.methods import FOT, FedAvg, Method
from fot.network import Network
from fot.results.report import run_page

DIGITS = [
    "model.hidden=[12]", "training.rounds=2", "training.cohort=6", "benchmark.tasks=2", "benchmark.clients=9",
]  # fmt: skip


def task(index: int, broken: tuple[int, ...] = ()) -> Task:
    g = torch.Generator().manual_seed(index)
    x, y = torch.randn(70, 4, generator=g), torch.randint(3, (70,), generator=g)
    held = tuple(torch.arange(60).chunk(6))
    for client in broken:
        x[held[client][0], 1] = torch.inf
    return Task(index, f"task {index}", 3, x[:60], y[:60], x[60:], y[60:], held)


def stream(tasks: int = 2, broken: tuple[int, ...] = ()) -> TaskStream:
    return TaskStream("noise", 6, False, (4,), tasks, lambda index: task(index, broken))


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def watched(aggregation, method=None, engine="sequential", **options):
    """A run of two rounds a task, its summary, and its events by kind."""
    told: dict[str, list[dict]] = {}
    training = Training(rounds=2, cohort=options.pop("cohort", 6), batch_size=8, lr=0.1)
    run = Run(
        options.pop("stream", stream()), mlp(), method or FOT(threshold=0.9), training=training,
        aggregation=aggregation, engine=EngineOptions(kind=engine, device="cpu"),
        observer=lambda event, **fields: told.setdefault(event, []).append(fields),
    )  # fmt: skip
    return run, run(), told


def same(one: Run, other: Run) -> bool:
    pairs = [(one.state.server.params, other.state.server.params)]
    pairs.append((one.state.server.state, other.state.server.state))
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


def test_encoded_and_secure_runs_give_the_same_bytes(tmp_path):
    for kind in ("encoded", "secure"):
        launch(
            resolve("digits", sets=[*DIGITS, f"aggregation.kind={kind}"]), tmp_path / kind, lambda *_, **__: 0
        )
    for name in ("model.safetensors", "memory.safetensors"):
        written = (tmp_path / "secure" / name).read_bytes()
        assert len(written) > 1000 and written == (tmp_path / "encoded" / name).read_bytes()


def test_after_a_round_plain_and_encoded_differ_by_half_a_step_at_most():
    sets = [*DIGITS, "training.rounds=1", "benchmark.tasks=1", "engine.precision=float64"]
    plain, encoded = (
        Run.of(resolve("digits", method="fedavg", sets=[*sets, f"aggregation.kind={kind}"]))
        for kind in ("plain", "encoded")
    )
    plain(), encoded()
    for name, reference in plain.state.server.params.items():
        half = Codec().coding("update", name, tuple(reference.shape), clients=6).step / 2
        error = (encoded.state.server.params[name] - reference).abs().max().item()
        assert half / 100 < error <= half * (1 + 1e-6)


class Lossy(EncodedAggregation):
    """Encoded sums that some clients never reach."""

    def __init__(self, lost) -> None:
        super().__init__(Codec())
        self.lost = lost

    def open(self, cohort, *, kind, path, drawn_from=None):
        lost = self.lost(path)

        class LossySummation(EncodedSummation):
            def add(self, clients, arrays):
                kept = [row for row, client in enumerate(clients) if lost.get(client, UNMASK) >= UNMASK]
                if kept:
                    super().add([clients[r] for r in kept], {n: a[kept] for n, a in arrays.items()})

        return LossySummation(self.codec, cohort, kind)


def test_a_third_of_the_clients_may_drop_out_of_every_sum():
    def gone(path):
        stage = (path[0] + path[1]) % 4
        return {1 + path[1]: stage, 4: (stage + 1) % 4}

    secure, summary, told = watched(make_aggregation("secure", seed=0, dropouts=gone))
    reference, _, _ = watched(Lossy(gone))
    assert same(secure, reference)
    rounds = [*told["round_finished"], *told["extracted"]]
    left = [sum(at < UNMASK for at in gone((f["task"], f.get("round", 2))).values()) for f in rounds]
    assert [f["missing"] for f in rounds] == left and max(left) == 2
    assert [f["clients"] for f in rounds] == [6 - n for n in left] and not any(f["void"] for f in rounds)
    assert all(f["excluded"] == [] for f in rounds) and summary["excluded"] == sum(left)


@pytest.mark.parametrize("stage", [0, INPUT, UNMASK])
def test_an_aborted_extraction_is_skipped_and_the_run_goes_on(stage):
    extraction = (0, 2)

    def gone(path):
        return dict.fromkeys(range(4), stage) if path == extraction else {}

    run, summary, told = watched(make_aggregation("secure", seed=0, dropouts=gone))
    (extracted,) = told["extracted"]
    assert extracted["void"] and extracted["clients"] == 0 and extracted["missing"] == 6
    assert extracted["bytes_up"] > 50 and run.state.server.state == {}
    assert any("extraction of task 1 is void" in f["message"] for f in told["warning"])
    assert len(told["round_finished"]) == 4 and not any(f["void"] for f in told["round_finished"])
    assert summary["bytes_up"]["extraction"] == extracted["bytes_up"]


@pytest.mark.parametrize("stage", [0, INPUT, UNMASK])
def test_an_aborted_round_keeps_the_model_and_tells_its_cost(stage):
    aggregation = make_aggregation(
        "secure", seed=0, dropouts=lambda path: dict.fromkeys(range(4), stage) if path[0] == 0 else {}
    )
    one = stream(tasks=1)
    run, _, told = watched(aggregation, FedAvg(), stream=one)
    assert all(torch.equal(run.state.server.params[n], p) for n, p in run.network.tree().items())
    for fields in told["round_finished"]:
        assert fields["void"] and fields["loss"] is None and fields["clients"] == 0
        assert fields["missing"] == 6 and fields["bytes_up"] > 50
    assert any("task 1, round 2 is void" in f["message"] for f in told["warning"])


def test_a_cohort_below_the_minimum_voids_its_rounds():
    _, _, told = watched(make_aggregation("secure", seed=0, minimum=5), cohort=4, method=FedAvg())
    assert all(f["void"] and f["bytes_up"] == 0 for f in told["round_finished"])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_where_only_sums_are_seen_nobody_is_named(engine):
    run, summary, told = watched(make_aggregation("secure", seed=0), engine=engine, stream=stream(2, (4,)))
    for fields in (*told["round_finished"], *told["extracted"]):
        assert fields["excluded"] == [] and (fields["missing"], fields["clients"]) == (1, 5)
    assert summary["excluded"] == 5
    assert [f["message"] for f in told["warning"] if "client(s)" in f["message"]] == []
    reference, _, named = watched(make_aggregation("encoded", seed=0), engine=engine, stream=stream(2, (4,)))
    assert same(run, reference) and named["extracted"][0]["excluded"] == [4]


@pytest.mark.parametrize("kind", ["plain", "secure"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_in_private_sums_a_client_that_is_not_finite_does_not_show(kind, engine):
    privacy = Privacy(noise=0.01, clip=1e4, updates=True)
    aggregation = make_aggregation(kind, seed=0, privacy=privacy)
    run, summary, told = watched(aggregation, engine=engine, stream=stream(2, (4,)))
    for fields in (*told["round_finished"], *told["extracted"]):
        assert fields["excluded"] == [] and (fields["missing"], fields["clients"]) == (0, 6)
    assert summary["excluded"] == 0 and told.get("warning", []) == []
    assert all(t.isfinite().all() for t in run.state.server.params.values())
    assert summary["privacy"]["releases"] == 5


@pytest.mark.parametrize("kind", ["plain", "encoded"])
def test_ranks_add_zeros_for_clients_of_a_rank_that_had_nothing_to_send(kind):
    engine = ShardedEngine(SequentialEngine(Network(mlp()), FOT(), Training()), World())
    arrays = {"a": torch.randn(3, 2, generator=torch.Generator().manual_seed(0)), "n": torch.arange(3)}
    outcomes = []
    for excluded in ((1, 3), ()):
        privacy = Privacy(noise=0.01)
        summation = make_aggregation(kind, seed=0, privacy=privacy).open(
            range(5), kind="statistics", path=(0, 0)
        )
        part = PartSummation(summation)
        part.add([0, 2, 4], arrays)
        if not excluded:
            part.add([1, 3], {name: torch.zeros_like(array[:2]) for name, array in arrays.items()})
        outcomes.append(engine._whole(part, range(5), excluded, {}))
    one, other = outcomes
    assert one.excluded == () and one.sums.clients == other.sums.clients == (0, 1, 2, 3, 4)
    for name in arrays:
        torch.testing.assert_close(one.sums.arrays[name], other.sums.arrays[name])
        assert one.sums.arrays[name].dtype == arrays[name].dtype


def test_epsilon_is_that_of_the_whole_run():
    for updates, releases in ((False, 1), (True, 5)):
        privacy = Privacy(epsilon=2.0, clip=1e4, updates=updates)
        _, summary, _ = watched(make_aggregation("plain", seed=0, privacy=privacy))
        assert summary["privacy"]["releases"] == releases
        assert summary["privacy"]["epsilon"] == pytest.approx(2.0, abs=1e-6)


def test_the_report_says_what_of_the_run_is_private():
    for updates in (False, True):
        privacy = Privacy(epsilon=2.0, clip=1e4, updates=updates)
        _, summary, _ = watched(make_aggregation("plain", seed=0, privacy=privacy))
        summary["privacy"]["epsilon_released"] = 0.125
        shown = run_page(summary, [], "")
        assert ("as a whole is not private" in shown) == (not updates)
        assert "2 at delta" in shown and "0.125 against somebody who does not know the cohorts" in shown


class Drawn(PlainAggregation):
    """Plain sums that remember how their cohorts came about, and whom they were told to expect."""

    def __init__(self) -> None:
        self.opened, self.expected = [], []

    def open(self, cohort, *, kind, path, drawn_from=None):
        self.opened.append((kind, path, tuple(cohort), drawn_from))
        return super().open(cohort, kind=kind, path=path)

    def expect(self, cohort):
        self.expected.append(tuple(cohort))


@pytest.mark.parametrize(("participants", "last"), [("all", 6), ("cohort", None)])
def test_a_draw_is_claimed_for_rounds_whose_cohort_serves_one_sum(participants, last):
    drawn = Drawn()
    watched(drawn, FOT(threshold=0.9, participants=participants), cohort=4)
    assert [(kind, path, n) for kind, path, _, n in drawn.opened] == [
        ("update", (0, 0), 6), ("update", (0, 1), last), ("statistics", (0, 2), None),
        ("update", (1, 0), 6), ("update", (1, 1), 6),
    ]  # fmt: skip
    cohorts = [cohort for _, _, cohort, _ in drawn.opened]
    assert drawn.expected == [cohorts[1], cohorts[2], (), cohorts[4], ()]  # what comes, or nobody


class Talker(Method):
    sums_only = False


def test_a_method_that_needs_more_than_sums_is_refused_however_the_run_is_made():
    for privacy in (None, Privacy()):
        secure = make_aggregation("secure", seed=0, privacy=privacy)
        with pytest.raises(UserError, match="talker needs more than sums"):
            Run(stream(), mlp(), Talker(), aggregation=secure)
        Run(stream(), mlp(), Talker(), aggregation=make_aggregation("encoded", seed=0, privacy=privacy))


@pytest.mark.parametrize(
    "setting",
    [
        "aggregation.kind=homomorphic", "dp.epsilon=inf", "dp.noise=-1", "dp.noise=nan",
        "dp.scales={'*'=0.0}", "dp.update_clip=1e-300", "dp.population=50",
    ],
)  # fmt: skip
def test_settings_are_checked_when_they_are_read(setting):
    with pytest.raises(UserError, match=r"dp|aggregation\.kind"):
        resolve("digits", sets=[setting])


def test_a_clip_of_no_array_is_told():
    clips = {"*.weight": 4.0, "fc9*": 1.0}
    _, _, told = watched(make_aggregation("encoded", seed=0, clips=clips))
    (note,) = [f["message"] for f in told["warning"] if "aggregation.clips" in f["message"]]
    assert "'fc9*'" in note and "weight" not in note
