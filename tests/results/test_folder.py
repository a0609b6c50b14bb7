from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from results_synthetic import make_run

import fot.results.folder as folder_module
from fot.errors import UserError
from fot.results import SUMMARY_KEYS, RunFolder, check_summary


def test_events_stand_in_order_with_the_kind_first_and_are_there_at_once(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.event("task_started", task=0, name="digits", classes=10, rounds=3)
    first = folder.events.read_text()
    assert first.startswith('{"event": "task_started", "time": ') and first.endswith("}\n")
    folder.event("warning", message="two\nlines")
    assert [e["event"] for e in folder.read_events()] == ["task_started", "warning"]
    assert folder.read_events()[1]["message"] == "two\nlines"
    assert folder.events.read_text().count("\n") == 2


def test_numbers_of_any_kind_are_written_and_none_is_nan(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.event(
        "evaluated",
        loss=float("nan"),
        big=np.float32("inf"),
        count=np.int64(3),
        tensor=torch.tensor([1.5, math.nan]),
        accuracies={0: np.float64(97.5), 1: -math.inf},
        path=Path("somewhere"),
    )
    assert "NaN" not in folder.events.read_text() and "Infinity" not in folder.events.read_text()
    event = folder.read_events()[0]
    assert (event["loss"], event["big"], event["count"]) == (None, None, 3)
    assert event["tensor"] == [1.5, None]
    assert event["accuracies"] == {"0": 97.5, "1": None}


@settings(max_examples=30)
@given(cut=st.integers(0, 400))
def test_wherever_the_last_write_was_cut_the_rest_is_read_and_the_run_goes_on(cut, tmp_path_factory):
    folder = RunFolder.create(tmp_path_factory.mktemp("cut"))
    for r in range(4):
        folder.event("round_finished", task=0, round=r, message="häuser")
    data = folder.events.read_bytes()[:cut]
    folder.events.write_bytes(data)
    whole = data.count(b"\n")
    assert len(folder.read_events()) == whole
    again = RunFolder.resume(folder.path)
    again.event("round_finished", task=0, round=99)
    assert [e["round"] for e in again.read_events()] == [*range(whole), 99]


def test_a_line_altered_in_the_middle_is_not_passed_over(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.events.write_text('{"event": "warning"}\n{"eve\n{"event": "warning"}\n')
    with pytest.raises(UserError, match="line 2"):
        folder.read_events()


def test_resume_drops_what_the_checkpoint_has_not_seen_and_time_goes_on(tmp_path):
    folder = RunFolder(tmp_path, elapsed=100.0)
    folder.event("task_started", task=0)
    position = folder.sync()
    folder.event("round_finished", round=0)
    again = RunFolder.resume(tmp_path, position)
    again.event("round_finished", round=0)
    events = again.read_events()
    assert [e["event"] for e in events] == ["task_started", "round_finished"]
    assert events[1]["time"] >= events[0]["time"] >= 100.0
    with pytest.raises(UserError, match="shorter than the checkpoint"):
        RunFolder.resume(tmp_path, again.sync() + 1)


def test_a_finished_run_is_not_overwritten_unless_told(tmp_path):
    make_run(tmp_path / "run", tasks=2)
    folder = RunFolder.open(tmp_path / "run")
    before = folder.summary.read_bytes()
    with pytest.raises(UserError, match="finished run"):
        RunFolder.create(folder.path)
    with pytest.raises(UserError, match="nothing to resume"):
        RunFolder.resume(folder.path)
    assert folder.summary.read_bytes() == before and folder.read_events()
    RunFolder.create(folder.path, overwrite=True)
    assert not folder.finished and folder.read_events() == [] and folder.read_experiment() == ""


def test_a_new_run_removes_its_forerunner_and_nothing_else(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine.txt").write_text("kept: this folder was no run yet")
    folder = RunFolder.create(tmp_path)
    assert (tmp_path / "checkpoint" / "mine.txt").exists()
    folder.model.write_bytes(b"old")
    (tmp_path / "notes.txt").write_text("kept")
    again = RunFolder.create(tmp_path)
    assert not again.model.exists() and not again.checkpoint.exists()
    assert (tmp_path / "notes.txt").exists()


def test_folders_that_hold_no_run_are_refused(tmp_path):
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        RunFolder.create(tmp_path / "file")
    folder = RunFolder.create(tmp_path / "run")
    with pytest.raises(UserError, match="no finished run"):
        folder.read_summary()
    folder.summary.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        folder.read_summary()


def test_a_summary_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    summary = make_run(tmp_path / "a", tasks=2)
    folder = RunFolder.create(tmp_path / "b")

    def power_cut(file: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(folder_module.os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        folder.write_summary(summary)
    assert not folder.finished
    monkeypatch.undo()
    folder.write_summary(summary)
    assert folder.read_summary() == summary
    assert not [p for p in folder.path.iterdir() if p.suffix == ".part"]


@pytest.mark.parametrize("key", SUMMARY_KEYS)
def test_a_missing_key_is_named(tmp_path, key):
    summary = make_run(tmp_path / "run", tasks=2)
    check_summary(summary)
    del summary[key]
    with pytest.raises(UserError, match=f"lacks '{key}'"):
        check_summary(summary)


def test_misshapen_summaries_are_refused(tmp_path):
    summary = make_run(tmp_path / "run", tasks=2)
    for change, said in [
        ({"format": 2}, "format 2"),
        ({"seconds": {"train": 1.0, "evaluate": 1.0}}, "seconds.extract"),
        ({"bytes_up": 3}, "bytes_up.training"),
        ({"tasks": ["one"]}, "names 1 tasks"),
        ({"accuracy": [[1.0, 2.0], [3.0, 4.0]]}, "row 1"),
        ({"accuracy": [[1.0, 2.0], [None]]}, "row 1"),
        ({"layers": {}}, "dimension of layer 'body.0'"),
    ]:
        with pytest.raises(UserError, match=said):
            check_summary({**summary, **change})


def test_a_killed_process_leaves_every_event_that_it_has_told(tmp_path):
    program = (
        "import os, sys; from fot.results import RunFolder; f = RunFolder.create(sys.argv[1])\n"
        "for r in range(5): f.event('round_finished', round=r)\n"
        "os.kill(os.getpid(), 9)"
    )
    source = str(Path(folder_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], env=environment)
    assert done.returncode == -9
    assert [e["round"] for e in RunFolder.open(tmp_path / "run").read_events()] == [0, 1, 2, 3, 4]


def test_the_settings_come_back_as_they_were(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.write_experiment("[method]\nname = 'föt'\n")
    assert folder.read_experiment() == "[method]\nname = 'föt'\n"
