"""What a run shows while it runs: plain lines in a pipe, one live block on a terminal."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from fot.results.progress import LiveDisplay, PlainDisplay, accuracies_line, display


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


def play(shown, tasks: int | None = 2) -> None:
    shown("run_started", tasks=tasks)
    for task in range(2):
        shown("task_started", task=task, name="t", classes=3, rounds=2)
        for round in range(2):
            shown("round_finished", task=task, round=round, loss=0.5 - 0.1 * task)
        shown("evaluated", task=task, round=1, accuracies={str(t): 11.0 for t in range(task + 1)})
        if task == 0:
            shown("warning", message="layer [bold] is full")
        shown("evaluated", task=task, round=None, accuracies={str(t): 90.0 - t for t in range(task + 1)})
    shown("run_finished", acc=89.5, fgt=0.0)


def test_the_console_decides():
    for terminal, kind in ((True, LiveDisplay), (False, PlainDisplay)):
        with display(console(terminal), ["one", "other"]) as shown:
            assert [type(one) for one in shown] == [kind, kind]


def test_plain_lines():
    out = console(False)
    with display(out, ["digits fot"]) as (shown,):
        play(shown)
    lines = [re.sub(r"^\[ +\d+\.\ds\] ", "", line) for line in out.file.getvalue().splitlines()]
    assert lines == [
        "digits fot  warning: layer [bold] is full",
        "digits fot  task 1/2  loss 0.500  accuracy 1: 90.0  2: -   mean 90.0",
        "digits fot  task 2/2  loss 0.400  accuracy 1: 90.0  2: 89.0   mean 89.5",
    ]


def test_plain_lines_of_an_open_stream_and_of_a_void_round():
    out = console(False)
    with display(out, ["t"]) as (shown,):
        shown("run_started", tasks=None)
        shown("round_finished", task=0, round=0, loss=None)
        shown("evaluated", task=0, round=None, accuracies={"0": 50.0})
    assert out.file.getvalue().endswith("s] t  task 1  accuracy 1: 50.0   mean 50.0\n")


def test_long_lines_are_not_broken():
    out = console(False)
    with display(out, ["t"]) as (shown,):
        shown("warning", message="word " * 60)
    assert len(out.file.getvalue().splitlines()) == 1


@pytest.mark.parametrize("tasks", [2, None])
def test_the_live_block(tasks):
    out = console(True)
    with display(out, ["digits fot"]) as (shown,):
        play(shown, tasks)
        bar = shown.progress.tasks[0]
        assert (bar.completed, bar.total) == (4, 4)
    last = out.file.getvalue().split("\x1b[2K")[-3:]  # each line is erased before it is drawn anew
    text = "".join(last)
    of = "/2" if tasks else ""
    assert f"digits fot  task 2{of} " in text and "4/4 rounds" in text and "in all" in text
    assert "loss 0.400   accuracy  1: 90.0  2: 89.0   mean 89.5" in text
    assert text.count("warning: layer [bold] is full") == 1


def test_the_bar_counts_the_rounds_to_come():
    shown = LiveDisplay(console(True), "t")
    shown("run_started", tasks=3)
    totals = []
    for task, rounds in enumerate((5, 2, 4)):
        shown("task_started", task=task, name="t", classes=3, rounds=rounds)
        totals.append(shown.progress.tasks[0].total)
        for round in range(rounds):
            shown("round_finished", task=task, round=round, loss=1.0)
    assert totals == [15, 5 + 4, 7 + 4]
    assert shown.progress.tasks[0].completed == 11


def test_runs_side_by_side_have_a_block_each():
    out = console(True)
    with display(out, ["seed 0", "seed 1"]) as (one, other):
        play(one)
        play(other)
    last = "".join(out.file.getvalue().split("\x1b[2K")[-6:])
    assert "seed 0  task 2/2" in last and "seed 1  task 2/2" in last and last.count("mean 89.5") == 2


def test_a_run_that_is_only_read_shows_no_bar():
    out = console(True)
    with display(out, ["t"]):
        pass
    assert out.file.getvalue() == ""


def test_accuracies():
    assert accuracies_line({}, None) == "   mean 0.0"
    assert accuracies_line({"0": 50.0, "1": 60.0}, None) == "1: 50.0  2: 60.0   mean 55.0"
