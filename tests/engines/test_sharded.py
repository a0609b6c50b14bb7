"""A run does not depend on the number of ranks: 1, 2 and 3 of them on CPU, against the run without any."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fot.aggregation import Privacy, make_aggregation
from fot.benchmarks.catalogue import build
from fot.benchmarks.stream import TaskStream
from fot.engines.base import EngineOptions, Training
from fot.engines.sharded import PartSummation, ShardedEngine, World, world
from fot.errors import UserError
from fot.federation.experiment import resolve
from fot.federation.launch import launch
from fot.federation.run import Run
from fot.methods import FOT, FedAvg
from fot.methods.base import Server
from fot.network import Tree
from fot.results import RunFolder

SEED = 3


class Uneven(FedAvg):
    """A method whose clients keep a state, made at the end of a task, that steers their later steps."""

    def end_of_task(self, network, params, data, client, broadcast):
        return {"scale": 1 / (1 + data.x.abs().mean() * (1 + data.client))}, {}

    def precondition(self, network, gradients, client):
        return {name: g * client["scale"] if client else g for name, g in gradients.items()}


def poisoned(stream: TaskStream, clients: set[int]) -> TaskStream:
    """The samples of some clients are not numbers."""

    def make(index: int) -> Any:
        task = list(stream)[index]
        x = task.train_x.clone()
        for client in clients:
            x[task.clients[client]] = float("nan")
        return replace(task, train_x=x)

    return TaskStream(
        stream.name, stream.num_clients, stream.multi_head, stream.input_shape, len(stream), make
    )


def case(
    method: Any,
    kind: str = "sequential",
    *,
    cohort: int = 7,
    bad: set[int] | None = None,
    aggregation: str = "plain",
    privacy: Privacy | None = None,
    rounds: tuple[int, ...] = (3, 2),
    **coding: Any,
) -> Run:
    """Two tasks, five rounds, nine clients with unlike data, in float64."""
    stream = build("digits", seed=SEED, partition="shards", tasks=2, clients=9)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))
    return Run(
        poisoned(stream, bad) if bad else stream,
        model,
        method,
        training=Training(rounds=rounds, cohort=cohort, batch_size=32, lr=0.1),
        aggregation=make_aggregation(aggregation, seed=SEED, privacy=privacy, **coding),
        engine=EngineOptions(kind=kind, device="cpu", precision="float64"),
        seed=SEED,
    )


LOCAL = FOT(threshold=0.8, model="local", shared_sketch_seed=2)
NOISE = Privacy(epsilon=50.0, clip=5.0, updates=True)
CASES: dict[str, Callable[[], Run]] = {
    "fedavg sequential": lambda: case(FedAvg()),
    "fedavg vectorized": lambda: case(FedAvg(), "vectorized"),
    "fot sequential": lambda: case(FOT(threshold=0.8)),
    "fot vectorized": lambda: case(FOT(threshold=0.8), "vectorized"),
    "local models": lambda: case(LOCAL),
    "local models at once": lambda: case(replace(LOCAL, participants="cohort"), "vectorized"),
    "a rank without clients": lambda: case(replace(LOCAL, participants="cohort"), "vectorized", cohort=2),
    "a client not finite": lambda: case(FOT(threshold=0.8), "vectorized", cohort=9, bad={4}),
    "no client finite": lambda: case(FOT(threshold=0.8), bad=set(range(9)), rounds=(1, 1)),
    "states": lambda: case(Uneven()),
    "encoded": lambda: case(FOT(threshold=0.8), aggregation="encoded", cohort=2, update_clip=0.02),
    "private": lambda: case(FOT(threshold=0.8), privacy=NOISE, cohort=2),
    "private encoded": lambda: case(
        FOT(threshold=0.8), aggregation="encoded", privacy=NOISE, bad={4}, cohort=9
    ),
}


def outcome(run: Run) -> tuple[Tree, dict[str, Any]]:
    """What a run ends with: its tensors, and its summary and events but for the seconds."""
    events: list[dict[str, Any]] = []
    run.tell = lambda event, **fields: events.append({"event": event, **fields})
    summary = run()
    for table in (summary, *events):
        table.pop("seconds", None)
    tensors = {f"params/{n}": t for n, t in run.state.server.params.items()}
    tensors |= {f"memory/{n}": t for n, t in run.state.server.state.items()}
    tensors |= {f"client {c}/{n}": t for c, tree in run.state.clients.items() for n, t in tree.items()}
    report = getattr(run.aggregation, "report", dict)()
    return tensors, json.loads(json.dumps({"summary": summary, "events": events, "privacy": report}))


def tally(events: Counter[str], event: str, **fields: Any) -> None:
    events[event] += 1


def work(rank: int, ports: dict[int, int], out: Path) -> None:
    """A rank, of 3 and then of 2: run every case, and go on with a run that was interrupted."""
    torch.set_num_threads(1)
    for ranks, port in ports.items():
        if rank >= ranks:
            return
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        assert world("cpu") == World(rank, ranks)
        for name, make in CASES.items():
            run = make()
            assert isinstance(run.engine, ShardedEngine)
            tensors, told = outcome(run)
            place = out / f"{name} {ranks} {rank}"
            safetensors.torch.save_file(
                {n: t.contiguous() for n, t in tensors.items()}, f"{place}.safetensors"
            )
            Path(f"{place}.json").write_text(json.dumps(told))

        drifted = CASES["fot vectorized"]()
        if rank:
            params = {name: torch.zeros_like(t) for name, t in drifted.state.server.params.items()}
            drifted.state.server = Server(params, {})
        tensors, _ = outcome(drifted)
        safetensors.torch.save_file(tensors, out / f"drifted {ranks} {rank}.safetensors")

        from fot.cli import console  # only now: whether it speaks is settled by the environment

        folder = out / f"folder {ranks} {rank}"
        events = Counter[str]()
        count = partial(tally, events)
        first, again = launch(EXPERIMENT, folder, count), launch(EXPERIMENT, folder, count)
        found = [first["accuracy"], again["accuracy"], events["round_finished"], console.quiet]
        (out / f"launch {ranks} {rank}.json").write_text(json.dumps(found))
        torch.distributed.destroy_process_group()


EXPERIMENT = resolve(
    "digits",
    method="fot",
    device="cpu",
    sets=["benchmark.tasks=2", "training.rounds=2", "checkpoint.rounds=1", "engine.precision=float64"],
)


def start_ranks(folder: Path) -> None:
    """Let 3 and 2 ranks leave behind what they find."""
    launch(EXPERIMENT, folder / "whole", lambda event, **_: None)

    def interrupt(event: str, **fields: Any) -> None:
        if event == "round_finished" and fields["task"] == 1 and fields["round"] == 1:
            raise KeyboardInterrupt

    for ranks in (2, 3):  # only the first rank has the folder, as on machines that share no disk
        with pytest.raises(KeyboardInterrupt):
            launch(EXPERIMENT, folder / f"folder {ranks} 0", interrupt)
    sockets = {ranks: socket.create_server(("127.0.0.1", 0)) for ranks in (3, 2)}
    ports = {ranks: free.getsockname()[1] for ranks, free in sockets.items()}
    for free in sockets.values():
        free.close()
    running = torch.multiprocessing.spawn(work, (ports, folder), nprocs=3, join=False)
    deadline = time.monotonic() + 240
    while not running.join(timeout=5):  # ranks that have lost one another would wait half an hour
        if time.monotonic() > deadline:
            for process in running.processes:
                process.kill()
            raise AssertionError("the ranks wait for one another")


def assert_same(got: tuple[Tree, Any], wanted: tuple[Tree, Any], tolerance: float) -> None:
    assert got[0].keys() == wanted[0].keys()
    for name, tensor in wanted[0].items():
        torch.testing.assert_close(got[0][name], tensor, rtol=0, atol=tolerance, msg=name)
    assert_alike(got[1], wanted[1])


def assert_alike(got: Any, wanted: Any) -> None:
    """Equal, numbers to 1e-8: the loss of a round is a float like any other."""
    if isinstance(wanted, dict):
        assert list(got) == list(wanted)
        for name in wanted:
            assert_alike(got[name], wanted[name])
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_alike(one, other)
    else:
        assert got == (pytest.approx(wanted, abs=1e-8, nan_ok=True) if isinstance(wanted, float) else wanted)


def read(place: Path) -> tuple[dict[str, Tensor], Any]:
    return safetensors.torch.load_file(f"{place}.safetensors"), json.loads(Path(f"{place}.json").read_text())


def test_the_number_of_ranks_does_not_matter(tmp_path: Path) -> None:
    """One test: to start the ranks takes longer than all that they do."""
    start_ranks(tmp_path)
    for name in CASES:
        try:
            check_case(name, tmp_path)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    wanted, _ = outcome(CASES["fot vectorized"]())
    for ranks in (2, 3):
        check_resumed(ranks, tmp_path)
        drifted = safetensors.torch.load_file(tmp_path / f"drifted {ranks} 0.safetensors")
        for name, tensor in wanted.items():  # what the first rank holds is what counts
            torch.testing.assert_close(drifted[name], tensor, rtol=0, atol=1e-10, msg=name)


def check_case(name: str, out: Path) -> None:
    wanted = outcome(CASES[name]())
    # One client after another computes the same bits on any rank, and integers add up alike in any order.
    tolerance = 0 if name == "encoded" else 1e-10
    alone = CASES[name]()
    alone.engine = ShardedEngine(alone.engine, World())
    assert_same(outcome(alone), wanted, 0)
    for ranks in (2, 3):
        results = [read(out / f"{name} {ranks} {rank}") for rank in range(ranks)]
        assert_same(results[0], wanted, tolerance)
        for other in results[1:]:
            assert other[1] == results[0][1]
            assert all(torch.equal(other[0][n], tensor) for n, tensor in results[0][0].items())


def check_resumed(ranks: int, out: Path) -> None:
    """More ranks go on with a run of one; only the first writes and speaks."""
    whole = safetensors.torch.load_file(out / "whole" / "model.safetensors")
    accuracy = RunFolder.open(out / "whole").read_summary()["accuracy"]
    resumed = safetensors.torch.load_file(out / f"folder {ranks} 0" / "model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-10, msg=name)
    for rank in range(ranks):
        first, again, rounds_told, quiet = json.loads((out / f"launch {ranks} {rank}.json").read_text())
        assert first == again == accuracy
        assert rounds_told == (rank == 0)  # of the four rounds three were done before, and told before
        assert quiet == (rank > 0)
        assert (out / f"folder {ranks} {rank}").exists() == (rank == 0)


def test_the_cases_are_what_they_are_called() -> None:
    """The comparison above would pass on runs in which nothing happens."""
    names = ("a client not finite", "no client finite")
    excluded = {name: outcome(CASES[name]())[1]["summary"]["excluded"] for name in names}
    assert excluded == {"a client not finite": 6, "no client finite": 23}
    assert outcome(CASES["encoded"]())[1]["summary"]["clipped"] > 0
    assert any(name.startswith("client ") for name in outcome(CASES["states"]())[0])


def test_a_secure_sum_is_refused() -> None:
    for privacy in (None, NOISE):
        aggregation = make_aggregation("secure", seed=0, privacy=privacy)
        with pytest.raises(UserError, match="take encoded"):
            PartSummation(aggregation.open([0, 1, 2], kind="update", path=(0, 0)))


def test_clients_that_send_unlike_arrays_are_found_out() -> None:
    class Two(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, value | {"shapes": {"w": [3]}}]

    part = PartSummation(make_aggregation("plain", seed=0).open([0, 1], kind="update", path=(0, 0)))
    part.add([0], {"w": torch.ones(1, 2)})
    with pytest.raises(UserError, match="all must send the same"):
        part.merge(Two(0, 2), torch.device("cpu"))


def test_what_the_environment_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="torchrun"):
        world()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="all ranks"):
        world("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="--nproc-per-node 1"):
        world("auto")
