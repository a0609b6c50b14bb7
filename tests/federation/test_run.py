"""Whole runs: what is measured, that it repeats to the byte, and the headline."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from fot.benchmarks.catalogue import build
from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.errors import UserError
from fot.federation.experiment import Evaluation, resolve
from fot.federation.launch import launch
from fot.federation.run import Run
from fot.methods import FOT, FedAvg, Method, Server
from fot.models import MultiHead
from fot.randomness import key, permutation

SMALL = [
    "model.hidden=[12]",
    "training.rounds=2",
    "training.cohort=3",
    "benchmark.tasks=3",
    "benchmark.clients=6",
]
CPU = EngineOptions(kind="sequential", device="cpu")


def make(index: int) -> Task:
    g = torch.Generator().manual_seed(index)
    x, y = torch.randn(40, 4, generator=g), torch.randint(3, (40,), generator=g)
    return Task(index, f"task {index}", 3, x[:30], y[:30], x[30:], y[30:], tuple(torch.arange(30).chunk(3)))


def stream(tasks: int = 3, multi_head: bool = False) -> TaskStream:
    return TaskStream("noise", 3, multi_head, (4,), tasks, make)


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def watched(*args, **options) -> tuple[Run, dict, list[tuple[str, dict]]]:
    events: list[tuple[str, dict]] = []
    options = {"training": Training(rounds=2, cohort=2, batch_size=8, lr=0.1), "engine": CPU} | options
    run = Run(*args, observer=lambda event, **fields: events.append((event, fields)), **options)
    return run, run(), events


def test_events_come_in_order_and_nothing_is_extracted_after_the_last_task():
    evaluation = Evaluation(every=1)
    _, summary, events = watched(stream(), mlp(), FOT(threshold=0.5), evaluation=evaluation)
    task = ["task_started", "round_finished", "evaluated", "round_finished", "extracted", "evaluated"]
    last = ["task_started", "round_finished", "evaluated", "round_finished", "evaluated"]
    names = [event for event, fields in events if event != "warning"]
    assert names == ["run_started", *task, *task, *last, "run_finished"]
    assert [f["round"] for e, f in events if e == "evaluated"] == [0, None] * 3
    assert [list(f["accuracies"]) for e, f in events if e == "evaluated" and f["round"] is None] == [
        ["0"], ["0", "1"], ["0", "1", "2"],
    ]  # fmt: skip
    started, finished = events[0][1], events[-1][1]
    assert started["tasks"] == 3 and started["clients"] == 3 and started["parameters"] == 25 + 18
    assert (
        started["engine"] == "sequential" and started["method"] == "fot" and started["benchmark"] == "noise"
    )
    assert finished == {"acc": summary["acc"], "fgt": summary["fgt"]}
    extracted = [f for e, f in events if e == "extracted"]
    assert [f["task"] for f in extracted] == [0, 1] and set(extracted[0]["layers"]) == {"0", "2"}
    assert set(extracted[0]["layers"]["0"]) == {"rank", "dimension", "added", "covered"}
    usage = [100 * f["layers"]["0"]["rank"] / 4 for f in extracted]
    assert summary["subspace"]["0"] == [*usage, usage[-1]] and usage[0] > 0


def test_no_evaluation_on_the_way_unless_asked():
    training = Training(rounds=4, cohort=2, batch_size=8)
    every = {0: [None], 2: [1, None], 3: [2, None], 4: [None]}
    for n, rounds in every.items():
        _, _, events = watched(stream(1), mlp(), FedAvg(), training=training, evaluation=Evaluation(every=n))
        assert [f["round"] for e, f in events if e == "evaluated"] == rounds


def test_the_accuracy_matrix():
    run, summary, events = watched(stream(), mlp(), FedAvg())
    matrix = summary["accuracy"]
    assert [[value is None for value in row] for row in matrix] == [
        [False, False, False], [True, False, False], [True, True, False],
    ]  # fmt: skip
    ends = [f["accuracies"] for e, f in events if e == "evaluated"]
    assert all(matrix[i][t] == ends[t][str(i)] for t in range(3) for i in range(t + 1))
    for i in range(3):  # the last column is the final model's
        task = make(i)
        right = run.network(run.state.server.params, task.test_x, i).argmax(1) == task.test_y
        assert matrix[i][2] == pytest.approx(100 * right.double().mean())
    assert summary["tasks"] == ["task 0", "task 1", "task 2"] and summary["rounds"] == 6
    assert summary["acc"] == pytest.approx(sum(row[2] for row in matrix) / 3)


def test_zero_shot_and_initial():
    model = mlp()
    _, summary, _ = watched(stream(), model, FedAvg())

    def accuracy(task: Task) -> float:
        return 100 * float((model(task.test_x).argmax(1) == task.test_y).double().mean())

    assert summary["initial"] == pytest.approx([accuracy(make(i)) for i in range(3)])
    assert summary["zero_shot"][0] == summary["initial"][0] and len(summary["zero_shot"]) == 3
    after_one, _, _ = watched(stream(1), model, FedAvg())
    two = make(1)
    seen = after_one.network(after_one.state.server.params, two.test_x, 1).argmax(1) == two.test_y
    assert summary["zero_shot"][1] == pytest.approx(100 * float(seen.double().mean()))
    gains = [z - i for z, i in zip(summary["zero_shot"], summary["initial"], strict=True)]
    assert summary["fwt"] == pytest.approx(sum(gains[1:]) / 2)


def test_with_a_head_a_task_there_is_no_zero_shot():
    run, summary, _ = watched(stream(multi_head=True), MultiHead(nn.Linear(4, 5), 5), FedAvg())
    assert summary["zero_shot"] is summary["initial"] is summary["fwt"] is None
    assert {f"heads.{t}.weight" for t in range(3)} < set(run.state.server.params)
    assert summary["parameters"] == 25 + 3 * 15


def test_a_stream_of_heads_needs_a_model_with_heads():
    with pytest.raises(UserError, match=r"set model\.multi_head"):
        Run(stream(multi_head=True), mlp(), FedAvg())


class Endless:
    """A stream without a length."""

    name, num_clients, multi_head, input_shape = "open", 3, False, (4,)

    def __iter__(self):
        return (make(index) for index in range(3))


def test_a_stream_without_a_length_gives_the_same_run():
    _, open_ended, events = watched(Endless(), mlp(), FOT(threshold=0.5))
    _, known, _ = watched(stream(), mlp(), FOT(threshold=0.5))
    assert open_ended["accuracy"] == known["accuracy"]
    assert events[0][1]["tasks"] is None
    assert [f["task"] for e, f in events if e == "extracted"] == [0, 1]


def test_a_stream_with_a_length_is_not_asked_before_its_time():
    asked: list[int] = []

    def lazily(index: int) -> Task:
        asked.append(index)
        return make(index)

    run = Run(TaskStream("noise", 3, False, (4,), 3, lazily), mlp(), FedAvg(), engine=CPU)
    asked.clear()
    seen: list[list[int]] = []

    def observe(event, **_):
        if event == "task_started":
            seen.append(list(asked))

    run.tell = observe
    run()
    assert seen == [[0], [0, 1], [0, 1, 2]]


def test_the_cohort_is_drawn_anew_each_round_from_its_key():
    seen: list[list[int]] = []

    class Spy(Method):
        pass

    task = make(0)
    task = Task(
        0, "t", 3, task.train_x, task.train_y, task.test_x, task.test_y, tuple(torch.arange(30).chunk(10))
    )
    run = Run(
        TaskStream("noise", 10, False, (4,), 1, lambda _: task), mlp(), Spy(), seed=5,
        training=Training(rounds=6, cohort=4), engine=CPU,
    )  # fmt: skip
    train = run.engine.train

    def spy(round):
        seen.append(list(round.cohort))
        return train(round)

    run.engine.train = spy
    run()
    assert seen == [sorted(permutation(key(5, "cohort", 0, r), 10)[:4].tolist()) for r in range(6)]
    assert len({tuple(cohort) for cohort in seen}) > 1


def test_bytes_by_hand():
    """4-5-3 with biases in float32: 43 parameters; sketches of 4 x 8 and 5 x 10 with s = 2d."""
    _, summary, events = watched(stream(2), mlp(), FOT(threshold=0.5, sketch="2d"))
    rounds = [f for e, f in events if e == "round_finished"]
    assert {f["bytes_down"] for f in rounds} == {43 * 4} and {f["bytes_up"] for f in rounds} == {43 * 4 + 4}
    assert summary["bytes_up"]["training"] == 4 * (43 * 4 + 4)  # four rounds; the loss is sent too
    assert summary["bytes_down"]["training"] == 4 * 43 * 4
    sent = 4 * (4 * 8 + 5 * 10) + 8 * (2 * 3 + 1)  # sketches; three float64 energies a layer, the count
    assert summary["bytes_up"]["extraction"] == sent
    assert summary["bytes_down"]["extraction"] == 43 * 4  # the model; there is no basis yet
    _, summary, events = watched(stream(3), mlp(), FOT(threshold=0.5, sketch="2d"))
    first, second = (f for e, f in events if e == "extracted")
    ranks = [first["layers"][name]["rank"] for name in ("0", "2")]
    assert second["bytes_down"] == 43 * 4 + 4 * (4 * ranks[0] + 5 * ranks[1])


@pytest.mark.filterwarnings("error")
def test_pythons_warnings_reach_the_observer():
    class Warns(FedAvg):
        def aggregate(self, network, server, mean_update):
            warnings.warn("look out", stacklevel=1)
            return super().aggregate(network, server, mean_update)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, _, events = watched(stream(1), mlp(), Warns())
    assert ("warning", {"message": "look out"}) in events


def test_notes_of_the_data_are_told():
    noted = replace(make(0), notes=("an image was left out",))
    _, _, events = watched(TaskStream("noise", 3, False, (4,), 1, lambda _: noted), mlp(), FedAvg())
    assert [f["message"] for e, f in events if e == "warning"] == ["an image was left out"]


def test_the_users_model_is_left_alone():
    model = mlp()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    watched(stream(1), model, FedAvg())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training


class ServerSide(Method):
    """Counts on the server what the clients' statistics add up to."""

    def end_of_task(self, network, params, data, client, broadcast):
        return {}, {"count": torch.tensor(float(len(data.x)))}

    def consolidate(self, network, server, sums, task, key):
        return Server(server.params, {"count": sums["count"]}), {"told": task}


def test_a_method_of_ones_own_has_its_sums():
    run, _, events = watched(stream(2), mlp(), ServerSide())
    assert run.state.server.state["count"] == 30
    assert [f["told"] for e, f in events if e == "extracted"] == [0]


def files(path, **options) -> dict[str, bytes]:
    sets = [*SMALL, *options.pop("sets", [])]
    launch(resolve("digits", sets=sets, **options), path, lambda event, **fields: None)
    return {name: (path / f"{name}.safetensors").read_bytes() for name in ("model", "memory")}


@pytest.mark.parametrize("engine", ["vectorized", "sequential"])
def test_the_same_seed_gives_the_same_bytes(tmp_path, engine):
    torch.manual_seed(1)
    one = files(tmp_path / "a", engine=engine, sets=["model.dropout=[0.2]"])
    torch.manual_seed(2)
    two = files(tmp_path / "b", engine=engine, sets=["model.dropout=[0.2]"])
    other = files(tmp_path / "c", engine=engine, sets=["model.dropout=[0.2]"], seed=1)
    for name in ("model", "memory"):
        assert one[name] == two[name] and one[name] != other[name]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert summary["engine"] == engine and len(summary["accuracy"]) == 3
    assert (tmp_path / "a" / "report.html").stat().st_size > 1000


@pytest.mark.parametrize("recipe", ["digits", "digits-split"])
def test_both_engines_agree(recipe):
    sets = [*SMALL, "engine.precision=float64", "model.dropout=[0.2]", "training.weight_decay=0.01"]
    runs = [Run.of(resolve(recipe, sets=sets, engine=engine)) for engine in ("sequential", "vectorized")]
    summaries = [run() for run in runs]
    a, b = (run.state.server for run in runs)
    for name, tensor in a.params.items():
        torch.testing.assert_close(tensor, b.params[name], rtol=0, atol=1e-10)
    for name, O in a.state.items():
        torch.testing.assert_close(O @ O.mT, b.state[name] @ b.state[name].mT, rtol=0, atol=1e-8)
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]


def test_the_headline():
    """FOT learns three tasks and forgets next to nothing, where averaging forgets a good part of them."""
    sets = ["training.rounds=6", "benchmark.tasks=3", "evaluation.every=0"]
    fot, fedavg = (Run.of(resolve("digits", method=name, sets=sets))() for name in ("fot", "fedavg"))
    assert fot["acc"] > 75 and fot["acc"] > fedavg["acc"] + 8
    assert fot["fgt"] < 4 and fedavg["fgt"] > fot["fgt"] + 15


def test_precision_and_names():
    options = EngineOptions(precision="bfloat16", device="cpu")
    model = nn.Sequential(nn.Linear(64, 10))
    run = Run(build("digits", tasks=1), model, FedAvg(), engine=options, names={"benchmark": "mine"})
    assert run.network.autocast and run.network.dtype is torch.float32
    summary = run()
    assert summary["benchmark"] == "mine" and summary["partition"] == "own" and summary["acc"] > 15
    double = Run(
        build("digits", tasks=1), mlp(), FedAvg(), engine=EngineOptions(precision="float64", device="cpu")
    )
    assert double.network.dtype is torch.float64 and not double.network.autocast


@pytest.mark.parametrize("kind", ["sequential", "vectorized"])
@pytest.mark.parametrize("precision", ["tf32", "float32"])
def test_tf32_is_for_what_clients_train_and_not_for_the_server(kind, precision):
    """The flags that a GPU's products go by; a CPU heeds none of them."""
    seen: dict[str, set[bool]] = {}

    def note(where: str) -> None:
        flags = {torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32}
        seen.setdefault(where, set()).update(flags)

    class Noting(nn.Module):
        def forward(self, x):
            if x.dtype is torch.float32:  # not the engine's trial in float64
                note("training" if self.training else "test")
            return x

    @dataclass(frozen=True)
    class NotingFOT(FOT):
        def aggregate(self, network, server, mean_update):
            note("server")
            return super().aggregate(network, server, mean_update)

        def end_of_task(self, *args):
            note("sketch")
            return super().end_of_task(*args)

        def pooled_statistics(self, *args):
            return None

    options = EngineOptions(kind=kind, device="cpu", precision=precision)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        Run(
            build("digits", tasks=2), nn.Sequential(Noting(), nn.Linear(64, 10)), NotingFOT(), engine=options
        )()
        assert seen.pop("training") == {precision == "tf32"}
        assert seen.pop("server") == seen.pop("sketch") == {False}
        assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == (False, False)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_tf32_is_the_default():
    assert EngineOptions().precision == "tf32"
    assert Run(build("digits", tasks=1), mlp(), FedAvg()).network.tf32
