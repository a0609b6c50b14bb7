"""What a CUDA graph would refuse of a round is found here, without a GPU.

A graph records what is launched, so a round must not wait for the device (to read a number, or to learn a
shape from values) nor copy between host and device. Under ``StandIn`` tensors "on cuda" have shapes but no
values (they are torch's meta tensors, which pass for CUDA ones), and every operation is looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cohorts import Proximal, Reader
from cuda_stand_in import CUDA, Refused, StandIn, stand_in
from torch import Tensor, nn

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task, TaskStream
from fot.benchmarks.transforms import CropAndFlip
from fot.engines.base import EngineOptions, Round, RoundKeys, Training
from fot.engines.sequential import LOSS
from fot.engines.vectorized import VectorizedEngine, engine
from fot.engines.vectorized.graph import GraphedRound
from fot.federation import flight
from fot.federation.run import Run
from fot.methods import FOT, FedAvg
from fot.methods.base import Batch, Method, Server
from fot.models import alexnet, mlp, multi_head, resnet18, resnet18_norm
from fot.network import Network, Tree

CLASSES = 4


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in(monkeypatch) as mode:
        yield mode


def one_round(
    model: nn.Module,
    method: Method,
    shape: Sequence[int],
    sizes: Sequence[int],
    *,
    training: Training | None = None,
    augment: Any = None,
    state: Tree | None = None,
    runs: int = 1,
    totals: bool = False,
) -> Tree:
    """What the clients send after a round on the device that is not there, of one run or of several."""
    network = Network(model)  # its own parameters have values; they are not what a round trains
    network.add_task(CLASSES, 0, 0)
    network.device = CUDA
    total = sum(sizes)
    x, y = torch.empty(total, *shape), torch.empty(total, dtype=torch.int64)
    clients = tuple(torch.arange(total).split(list(sizes)))
    made = VectorizedEngine(network, method, training or Training(batch_size=4, lr=0.05, weight_decay=0.02))
    server = Server({name: t.to(CUDA) for name, t in network.tree().items()}, {})
    states = {c: {n: t[c].to(CUDA) for n, t in (state or {}).items()} for c in range(len(sizes))}
    unused = make_aggregation("plain", seed=0).open(range(len(sizes)), kind="update", path=(0, 0))
    rounds = [
        Round(
            server, Task(0, "fake", CLASSES, x, y, x[:1], y[:1], clients, augment), range(len(sizes)),
            RoundKeys(1, 2, 3), states, unused,
        )
        for _ in range(runs)
    ]  # fmt: skip
    return made.local_cohort(rounds, ([*range(len(sizes))],) * runs, totals=totals)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(inputs=12, hidden=(9, 8), classes=CLASSES, dropout=(0.2, 0.5)), (12,)),
    "wide mlp": (lambda: mlp(inputs=300, hidden=(400, 8), multi_head=True), (300,)),
    "alexnet": (lambda: alexnet(channels=(4, 5, 6), hidden=(60, 70)), (3, 32, 32)),
    "resnet18": (lambda: resnet18(filters=2, size=16), (3, 16, 16)),
    "resnet18_norm": (lambda: resnet18_norm(filters=4, size=32), (3, 32, 32)),
    "sequences": (lambda: multi_head(nn.Sequential(Reader(), nn.ReLU()), (5, 6)), (5, 6)),
    "running statistics": (
        lambda: multi_head(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()), (3, 5, 5)),
        (3, 5, 5),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize(("method", "runs"), [(FedAvg(), 1), (FOT(threshold=0.8), 2)], ids=["fedavg", "fot"])
def test_a_round_can_be_recorded(device: StandIn, name: str, method: Method, runs: int, totals: bool) -> None:
    """A full step and a short one, in which one client has no samples and another fewer; weight decay."""
    make, shape = MODELS[name]
    training = Training(batch_size=4, epochs=2 if "mlp" in name else 1, lr=0.05, weight_decay=0.02)
    sent = one_round(make(), method, shape, (4, 7, 6), training=training, runs=runs, totals=totals)
    assert all(tensor.is_cuda for tensor in sent.values()) and sent.pop(LOSS).shape == (3 * runs,)
    assert not totals or sent.pop(engine.FINITE).shape == (runs,)
    assert {len(tensor) for tensor in sent.values()} == {runs if totals else 3 * runs}
    assert len(device.launches) > 50


def test_augmentation_can_be_recorded(device: StandIn) -> None:
    make, shape = MODELS["alexnet"]
    one_round(make(), FedAvg(), shape, (6, 7, 3), augment=CropAndFlip(2, (0.0, 0.1, 0.2)))


def test_a_method_of_its_own_can_be_recorded(device: StandIn) -> None:
    make, shape = MODELS["mlp"]
    one_round(make(), Proximal(), shape, (6, 7, 3), state={"fc1.weight": torch.ones(3, 9, 12)})


@dataclass(frozen=True)
class Spoilt(Method):
    """A loss that does what a recording cannot hold."""

    how: Callable[[Tensor], Any] = float

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        loss = super().loss(network, params, batch, client)
        self.how(batch.weight)
        return loss


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (lambda w: float(w.sum()), "wait"),
        (lambda w: w.tolist(), "copies"),
        (lambda w: bool((w > 0).all()), "wait"),
        (lambda w: w[w > 0], "wait"),
        (lambda w: w.nonzero(), "wait"),
        (lambda w: torch.equal(w, w), "wait"),
        (lambda w: w.cpu(), "copies"),
        (lambda w: w * torch.tensor([2.0], device=w.device), "copies"),
        (lambda w: w.add_(torch.tensor(2.0, device=w.device)), "copies"),
        (lambda w: w * torch.ones(len(w)), "copies"),
        (lambda w: w[torch.arange(2)], "copies"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    device: StandIn, how: Callable[[Tensor], Any], reason: str
) -> None:
    """The tests above could fail."""
    make, shape = MODELS["mlp"]

    def only_when_recorded(weight: Tensor) -> Any:
        return how(weight) if device.recording else None

    with pytest.raises(Refused, match=reason):
        one_round(make(), Spoilt(only_when_recorded), shape, (6, 7, 3))


def test_numbers_may_go_with_a_launch(device: StandIn) -> None:
    make, shape = MODELS["mlp"]
    one_round(make(), Spoilt(lambda w: (w * 2 + torch.tensor(3.0)).clamp(max=1).fill_(0.5)), shape, (6, 7, 3))


@pytest.mark.parametrize(
    ("method", "second", "augment", "recordings"),
    [
        (FedAvg(), [4, 7, 6], None, 1),
        (FedAvg(), [7, 4, 6], None, 1),
        (FedAvg(), [5, 6, 6], None, 2),  # other bounds: other steps
        (FedAvg(), [4, 7, 7], None, 2),
        (FedAvg(), [4, 7, 6], lambda x, keys: -x, 2),
        (Proximal(), [4, 7, 6], None, 2),  # its loss may do something else on another task
    ],
)
def test_a_recording_serves_the_next_task_where_that_is_alike(
    device: StandIn, monkeypatch: pytest.MonkeyPatch, method: Method, second: list[int], augment: Any,
    recordings: int,
) -> None:  # fmt: skip
    recording, made = engine.GraphedRound, []
    monkeypatch.setattr(engine, "GraphedRound", lambda *rest: made.append(rest) or recording(*rest))
    make, shape = MODELS["mlp"]
    network = Network(make())
    network.device = CUDA
    server = Server({name: t.to(CUDA) for name, t in network.tree().items()}, {})
    trained = VectorizedEngine(network, method, Training(batch_size=4))
    unused = make_aggregation("plain", seed=0).open(range(3), kind="update", path=(0, 0))
    for index, (sizes, own) in enumerate([([4, 7, 6], None), (second, augment)]):
        x, y = torch.empty(sum(sizes), *shape), torch.empty(sum(sizes), dtype=torch.int64)
        task = Task(index, "fake", CLASSES, x, y, x[:1], y[:1], torch.arange(len(x)).split(sizes), own)
        for number in range(2):
            one = Round(server, task, range(3), RoundKeys(number, 2, 3), {}, unused)
            trained.local_cohort([one], ([0, 1, 2],), totals=True)
    assert len(made) == recordings


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("method", [FedAvg(), FOT(threshold=0.8), FOT(threshold=0.8, mu=0.5)])
def test_between_rounds_the_host_waits_for_nothing(
    device: StandIn, monkeypatch: pytest.MonkeyPatch, method: Method, runs: int
) -> None:
    """From a round's opening to its flight, which is read when the next one is on its way."""
    make, shape = MODELS["mlp"]
    events: list[str] = []
    event = SimpleNamespace(record=lambda: events.append("record"), synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(engine, "check_folding", lambda *rest: None)
    read: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(flight, "Reading", lambda *numbers: read.append(numbers))
    x, y = torch.empty(20, *shape), torch.empty(20, dtype=torch.int64)
    task = Task(0, "fake", CLASSES, x, y, x[:1], y[:1], torch.arange(20).split(5))
    made = []
    for seed in range(runs):
        options = {
            "training": Training(rounds=9, cohort=3, batch_size=4),
            "engine": EngineOptions(device="cpu"),
        }
        run = Run(
            TaskStream("fake", 4, False, shape, 1, lambda i: task), make(), method, seed=seed, **options
        )
        params = {name: tensor.to(CUDA) for name, tensor in run.network.tree().items()}
        bases = {n: torch.empty(1, d, 3, device=CUDA) for n, d in method.dimensions(run.network).items()}
        run.device = run.network.device = run.engine.device = CUDA
        run.engine.defers, run._drawn, run.state.server = True, ((-1, -1), []), Server(params, bases)
        made.append(run)
    servers = [run.state.server for run in made]
    for number in range(3):
        device.recording = device.between = number > 0  # the first round places the data, and is recorded
        walks = [
            run._train(task, number, server, range(4), True, True)
            for run, server in zip(made, servers, strict=True)
        ]
        outcomes = made[0].engine.train_together([next(walk) for walk in walks])
        assert outcomes is not None and all(outcome.finite.is_cuda for outcome in outcomes)
        for place, (walk, outcome) in enumerate(zip(walks, outcomes, strict=True)):
            with pytest.raises(StopIteration) as end:
                walk.send(outcome)
            servers[place] = end.value.value.server
    assert events == ["record", "record", "wait", "record", "wait"]
    assert len(read) == 3 * runs and all(number.is_cuda for numbers in read for number in numbers)


class Broken:
    """A recording whose body fails, and then its end: torch leaves the recording's stream in place."""

    def __init__(self, graph: object, **options: object) -> None:
        pass

    def __enter__(self) -> None:
        torch.cuda.set_stream("the recording's")  # type: ignore[arg-type]

    def __exit__(self, *error: object) -> None:
        raise RuntimeError("the recording was invalidated")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A GPU on which every recording fails: its stream at the beginning, and the one that is current."""
    home = SimpleNamespace(wait_stream=lambda other: None)
    found: list[Any] = [home, home]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found[1])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: found.__setitem__(1, stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    return found


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so(streams: list[object]) -> None:
    def waits(given: Tree) -> Tree:
        if streams[1] is not streams[0]:
            raise RuntimeError("not permitted when stream is capturing\nand more")
        return {"y": given["x"] + 1}

    with pytest.warns(UserWarning, match=r"not recorded.*: not permitted when stream is capturing$"):
        graphed = GraphedRound(waits, {"x": torch.zeros(2)})
    assert streams[1] is streams[0] and graphed({"x": torch.ones(2)})["y"].tolist() == [2, 2]


def test_what_is_recorded_is_not_spoilt_by_what_is_freed(
    monkeypatch: pytest.MonkeyPatch, streams: list[Any]
) -> None:
    """An older recording is a part of a cycle; a GPU refuses to give it back while it records."""
    freed: list[bool] = []

    class Recording(Broken):
        def __exit__(self, *error: object) -> None:
            torch.cuda.set_stream(streams[0])

    class Old:
        own: Old

        def __del__(self) -> None:
            freed.append(streams[1] is streams[0])

    def forgets(given: Tree) -> Tree:
        old = Old()
        old.own = old
        del old
        kept = [[] for _ in range(2 * gc.get_threshold()[0])]  # enough for the collector to start
        return {"y": given["x"] + len(kept)}

    monkeypatch.setattr(torch.cuda, "graph", Recording)
    graphed = GraphedRound(forgets, {"x": torch.zeros(2)})
    assert gc.isenabled() and graphed.graph is not None
    gc.collect()
    assert freed == [True, True]


def test_memory_that_ends_within_a_recording_is_no_reason_to_do_without(streams: list[object]) -> None:
    def large(given: Tree) -> Tree:
        if streams[1] is not streams[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return given

    with pytest.raises(torch.OutOfMemoryError):
        GraphedRound(large, {"x": torch.zeros(2)})
    assert streams[1] is streams[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_recording_on_a_gpu() -> None:
    """Replays follow their inputs; what waits for the device runs as it is, and nothing else is spoilt."""
    given = {"x": torch.arange(4.0, device="cuda"), "n": torch.tensor([2], device="cuda")}
    good = GraphedRound(lambda t: {"y": t["x"] * t["n"]}, given)
    assert good({"x": given["x"] + 1, "n": given["n"] + 1})["y"].tolist() == [3, 6, 9, 12]
    with pytest.warns(UserWarning, match="not recorded"):
        bad = GraphedRound(lambda t: {"y": t["x"] * float(t["x"].sum())}, given)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert bad(given)["y"].tolist() == [0, 6, 12, 18]
    again = GraphedRound(lambda t: {"y": t["x"] + t["n"]}, given)
    assert again.graph is not None and again(given)["y"].tolist() == [2, 3, 4, 5]
    assert good(given)["y"].tolist() == [0, 2, 4, 6]
