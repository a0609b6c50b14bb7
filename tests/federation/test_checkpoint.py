"""A run may be killed at any moment, and ends as if it had not been."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fot.errors import UserError
from fot.federation.checkpoint import CheckpointOptions, Checkpoints
from fot.federation.experiment import resolve
from fot.federation.launch import default_path, launch, settings_of
from fot.federation.state import State
from fot.methods.base import Server
from fot.results import RunFolder

SMALL = [
    "benchmark.tasks=3",
    "training.rounds=6",
    "model.hidden=[40,40]",
    "checkpoint.rounds=1",
    "evaluation.every=2",
]


def small(*more: str, recipe: str = "digits"):
    return resolve(recipe, sets=[*SMALL, *more], method="fot")


def silent(event: str, **fields: object) -> None:
    return None


def results(path: Path) -> dict[str, object]:
    """All that a run leaves behind, but for the seconds it took."""
    folder = RunFolder.open(path)
    summary = folder.read_summary()
    del summary["seconds"]
    events = [{k: v for k, v in e.items() if k not in ("time", "seconds")} for e in folder.read_events()]
    return {
        "summary": summary,
        "events": [e for e in events if e["event"] != "warning"],
        "model": folder.model.read_bytes(),
        "memory": folder.memory.read_bytes(),
    }


@pytest.mark.parametrize(
    "recipe, more",
    [
        ("digits", ()),
        ("digits-split", ("engine.kind=sequential", "method.participants=cohort", "method.model=local")),
    ],
)
def test_killed_at_random_moments_it_ends_byte_identical(tmp_path, recipe, more):
    program = Path(__file__).with_name("killed_runs.py")
    ten = "10"  # of each of the two recipes: twenty
    command = [sys.executable, str(program), str(tmp_path), recipe, ten, *SMALL, *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ended = done.stdout.split()
    assert ended
    for path in ended:
        assert results(Path(path)) == results(tmp_path / "undisturbed")
        assert not (Path(path) / "checkpoint").exists()


class Interrupted(Exception):
    pass


def interrupted(experiment, path: Path, at: int) -> None:
    """Run until the round of this number has been told of."""
    rounds = 0

    def stop(event: str, **fields: object) -> None:
        nonlocal rounds
        rounds += event == "round_finished"
        if rounds == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        launch(experiment, path, stop)


def test_a_torn_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path):
    experiment = small()
    launch(experiment, tmp_path / "whole", silent)
    interrupted(experiment, tmp_path / "torn", 9)
    newest = max((tmp_path / "torn" / "checkpoint").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-100])
    told = []
    launch(experiment, tmp_path / "torn", lambda event, **fields: told.append((event, fields)))
    assert [f["message"] for e, f in told if e == "warning" and "damaged" in f["message"]]
    assert results(tmp_path / "torn") == results(tmp_path / "whole")


def test_events_lost_in_a_power_cut_are_told_again_from_the_checkpoint_before(tmp_path):
    experiment = small()
    launch(experiment, tmp_path / "whole", silent)
    interrupted(experiment, tmp_path / "run", 9)
    events = tmp_path / "run" / "events.jsonl"
    events.write_bytes(b"".join(events.read_bytes().splitlines(keepends=True)[:-2]) + b'{"event": "rou')
    told = []
    launch(experiment, tmp_path / "run", lambda event, **fields: told.append((event, fields)))
    assert [f["message"] for e, f in told if e == "warning" and "events before it" in f["message"]]
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_with_every_checkpoint_gone_the_run_starts_anew(tmp_path):
    experiment = small()
    interrupted(experiment, tmp_path / "run", 9)
    for file in (tmp_path / "run" / "checkpoint").iterdir():
        file.write_bytes(b"")
    launch(experiment, tmp_path / "run", silent)
    launch(experiment, tmp_path / "whole", silent)
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_a_full_disk_ends_the_run_and_leaves_it_resumable(tmp_path, monkeypatch):
    experiment = small()
    calls = 0

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fot.files.os.fsync", fsync)
    with pytest.raises(UserError, match="disk is full"):
        launch(experiment, tmp_path / "run", silent)
    monkeypatch.undo()
    assert not list((tmp_path / "run").rglob("*.part"))
    launch(experiment, tmp_path / "run", silent)
    launch(experiment, tmp_path / "whole", silent)
    assert results(tmp_path / "run") == results(tmp_path / "whole")


def test_epsilon_counts_the_releases_before_an_interruption(tmp_path):
    experiment = small("dp.epsilon=2.0", "dp.clip=1000.0")
    launch(experiment, tmp_path / "whole", silent)
    interrupted(experiment, tmp_path / "run", 15)
    launch(experiment, tmp_path / "run", silent)
    privacy = RunFolder.open(tmp_path / "run").read_summary()["privacy"]
    assert privacy["releases"] == 2  # one after each task but the last
    assert privacy == RunFolder.open(tmp_path / "whole").read_summary()["privacy"]


def test_other_settings_neither_take_up_nor_destroy_an_unfinished_run(tmp_path):
    first, other = small(), small("training.lr=0.2")
    path = default_path(tmp_path, first)
    interrupted(first, path, 9)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match="run of other settings"):
        launch(other, path, silent)
    assert default_path(tmp_path, first) == path
    assert default_path(tmp_path, other) == path.with_name(path.name + "-2")
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_resumed_run_tells_the_display_where_it_stands(tmp_path):
    interrupted(small(), tmp_path / "run", 9)  # the third round of the second of three tasks
    told = []
    launch(small(), tmp_path / "run", lambda event, **fields: told.append((event, fields)))
    assert told[0] == ("resumed", {"tasks": 3, "task": 1, "round": 2, "rounds": 6})
    assert "resumed" not in [event["event"] for event in RunFolder.open(tmp_path / "run").read_events()]


def test_state_survives_the_files_and_two_are_kept(tmp_path):
    state = State(
        Server({"w/x": torch.arange(3.0)}, {"O": torch.eye(2)}), {7: {"a/b": torch.ones(1)}}, task=1, round=4
    )
    state.accuracy, state.usage = [[90.0, None]], {"fc": [12.5]}
    checkpoints = Checkpoints(tmp_path)
    for position in (10, 20, 30):
        checkpoints.save(state, position, [[1.5, None]])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "00000002.json", "00000002.safetensors", "00000003.json", "00000003.safetensors",
    ]  # fmt: skip
    found, problems = checkpoints.load(torch.device("cpu"), events=30)
    assert found is not None and not problems
    loaded, position, releases = found
    assert (position, releases) == (30, [[1.5, None]])
    assert torch.equal(loaded.server.params["w/x"], torch.arange(3.0))
    assert torch.equal(loaded.server.state["O"], torch.eye(2))
    assert torch.equal(loaded.clients[7]["a/b"], torch.ones(1))
    assert (loaded.task, loaded.round, loaded.accuracy, loaded.usage) == (
        1,
        4,
        [[90.0, None]],
        {"fc": [12.5]},
    )


def test_when_a_checkpoint_is_due(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr("fot.federation.checkpoint.time.monotonic", lambda: now)
    checkpoints = Checkpoints(tmp_path, CheckpointOptions(rounds=3, minutes=2))
    assert [checkpoints.due(n) for n in (1, 2, 3, 4)] == [False, False, True, False]
    now = 121.0
    assert checkpoints.due(1)
    checkpoints.save(State(Server({}, {})), 0, [])
    assert not checkpoints.due(1)
    assert not Checkpoints(tmp_path, CheckpointOptions(minutes=0)).due(5)


def test_what_cannot_be_resumed_says_why(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        settings_of(tmp_path)
    launch(small("benchmark.tasks=1", "training.rounds=1"), tmp_path / "done", silent)
    with pytest.raises(UserError, match="nothing to resume"):
        settings_of(tmp_path / "done")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "events.jsonl").write_text(json.dumps({"event": "run_started"}) + "\n")
    with pytest.raises(UserError, match=r"no experiment\.toml"):
        settings_of(tmp_path / "begun")
