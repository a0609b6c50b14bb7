"""A round is settled while the next one trains, as on a GPU; nobody can tell from what a run comes to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.engines.vectorized import VectorizedEngine
from fot.federation.experiment import Evaluation
from fot.federation.lockstep import lockstep
from fot.federation.run import Run
from fot.methods import FOT, FedAvg
from fot.methods.base import Method

ROUNDS = 6


def a_run(
    method: Method, *, spoilt: tuple[int, ...] = (), seed: int = 0, defers: bool = True, log: Any = None,
    kind: str = "plain", device: str = "cpu", at_once: int | None = None, **training: int,
) -> Run:  # fmt: skip
    """Two tasks on five clients, of whom some hold what is not a number."""

    def make(index: int) -> Task:
        g = torch.Generator().manual_seed(10 * seed + index)
        x, y = torch.randn(50, 4, generator=g), torch.randint(3, (50,), generator=g)
        held = tuple(torch.arange(40).chunk(5))
        for client in spoilt:
            x[held[client][0], 1] = torch.nan
        return Task(index, f"task {index}", 3, x[:40], y[:40], x[40:], y[40:], held)

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    run = Run(
        TaskStream("noise", 5, False, (4,), 2, make), model, method, seed=seed,
        training=Training(**{"rounds": ROUNDS, "cohort": 2, "batch_size": 8, "lr": 0.1, **training}),
        aggregation=make_aggregation(kind, seed=seed), engine=EngineOptions(device=device),
        evaluation=Evaluation(every=2),
    )  # fmt: skip
    assert isinstance(run.engine, VectorizedEngine)
    run.engine.defers, run.engine.at_once = defers, at_once
    run.tell = lambda event, **fields: run.log.append((event, fields))
    run.save = lambda task_ended: run.saved.append(copy.deepcopy(run.state))
    run.log, run.saved = [] if log is None else log, []  # type: ignore[attr-defined]
    return run


def what_is_left(run: Run, summary: dict[str, Any]) -> Any:
    """All but the seconds: numbers to the last bit."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {name: plain(v) for name, v in value.items() if name != "seconds"}
        return plain(vars(value)) if hasattr(value, "__dict__") else value

    return plain(summary), plain(run.state), [(e, plain(f)) for e, f in run.log], [*map(plain, run.saved)]  # type: ignore[attr-defined]


def trainings(monkeypatch: pytest.MonkeyPatch, log: list[Any]) -> None:
    train = VectorizedEngine._train

    def noted(self: VectorizedEngine, rounds: Any) -> Any:
        log.append(("trained", {"provisional": rounds[0].provisional, "runs": len(rounds)}))
        return train(self, rounds)

    monkeypatch.setattr(VectorizedEngine, "_train", noted)


def order(log: list[Any]) -> str:
    """T for a round that is trained, t where this is known to hold, s for one that is settled, e, x."""
    letters = {"round_finished": "s", "evaluated": "e", "extracted": "x"}
    return "".join("tT"[f["provisional"]] if e == "trained" else letters.get(e, "") for e, f in log)


def test_a_round_is_settled_while_the_next_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    trainings(monkeypatch, log)
    run = a_run(FOT(threshold=0.5), log=log)
    run()
    task = "TTs" + "Tse" + "Ts" + "Tse" + "Ts" + "s"
    assert order(log) == task + "x" + "e" + task + "e"


@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.5), FOT(threshold=0.5, model="local")])
@pytest.mark.parametrize("spoilt", [(), (1,), (0, 2, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("at_once", [None, 1])
def test_a_run_comes_to_the_same(
    method: Method, spoilt: tuple[int, ...], least: int, at_once: int | None
) -> None:
    """Also where a client's numbers are none and rounds are trained anew, and where they are void."""
    left = []
    for defers in (True, False):
        run = a_run(method, spoilt=spoilt, defers=defers, at_once=at_once, min_clients=least)
        left.append(what_is_left(run, run()))
    assert left[0] == left[1]
    told = [f for e, f in left[0][2] if e == "round_finished"]
    assert len(told) == 2 * ROUNDS
    assert any(f["excluded"] for f in told) == bool(spoilt)
    assert all(set(f["excluded"]) <= set(spoilt) for f in told)
    assert any(f["void"] for f in told) == (len(spoilt) > 1 or (bool(spoilt) and least == 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("spoilt", [(), (1,)])
def test_a_run_comes_to_the_same_on_a_gpu(spoilt: tuple[int, ...]) -> None:
    left = []
    for defers in (True, False):
        run = a_run(FOT(threshold=0.5), spoilt=spoilt, defers=defers, device="cuda")
        left.append(what_is_left(run, run()))
    assert left[0] == left[1]


def test_after_a_round_that_fails_each_is_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the task ends: what trains ahead of such a round trains for nothing."""
    log: list[Any] = []
    trainings(monkeypatch, log)
    run = a_run(FedAvg(), spoilt=(0, 1, 2, 3, 4), log=log)
    run()
    task = "TT" + "ts" + "tse" + "ts" + "tse" + "ts" + "ts"
    assert order(log) == 2 * (task + "e")


def test_a_run_that_fails_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []
    trainings(monkeypatch, log)
    runs = [a_run(FedAvg(), seed=seed, spoilt=(1,) if seed == 1 else ()) for seed in range(3)]
    summaries = lockstep(runs)
    assert {f["runs"] for _, f in log} == {1, 3}
    for seed, (run, summary) in enumerate(zip(runs, summaries, strict=True)):
        alone = a_run(FedAvg(), seed=seed, spoilt=(1,) if seed == 1 else ())
        wanted = alone()
        for name, tensor in alone.state.server.params.items():
            torch.testing.assert_close(run.state.server.params[name], tensor, rtol=1e-5, atol=1e-6)
        assert summary["excluded"] == wanted["excluded"] == run.state.excluded
        assert (summary["excluded"] > 0) == (seed == 1)


@pytest.mark.parametrize("kind", ["encoded", "secure"])
def test_sums_of_another_kind_are_known_at_once(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A protocol goes round by round, and a checkpoint holds no release of a round that it does not hold."""
    log: list[Any] = []
    trainings(monkeypatch, log)
    run = a_run(FedAvg(), log=log, kind=kind, cohort=4)
    run()
    task = "Ts" + "Tse" + "Ts" + "Tse" + "Ts" + "Ts"
    assert order(log) == 2 * (task + "e")
