"""Runs as they happen: a live display on a terminal, plain lines everywhere else.

Both are observers, one a run: they are called as ``observer(event, **fields)`` with the run's events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text


class Display(Protocol):
    """Shows the events of a run."""

    def __call__(self, event: str, **fields: Any) -> None: ...


@contextmanager
def display(console: Console, titles: Sequence[str]) -> Iterator[Sequence[Display]]:
    """The displays of runs that go side by side, of the kind that suits the console."""
    if not console.is_terminal:
        yield [PlainDisplay(console, title) for title in titles]
        return
    # It appears with the first event: a run that is only read from its folder shows none.
    blocks: list[LiveDisplay] = []
    live = Live(
        console=console,
        refresh_per_second=8,
        get_renderable=lambda: Group(*(block.body() for block in blocks)),
    )
    blocks += [LiveDisplay(console, title, live.start) for title in titles]
    try:
        yield blocks
    finally:
        live.stop()


def accuracies_line(accuracies: dict[str, float], tasks: int | None) -> str:
    """The accuracy of each task seen so far, and their mean.

    Examples
    --------
    >>> accuracies_line({"0": 91.25, "1": 88.0}, 3)
    '1: 91.2  2: 88.0  3: -   mean 89.6'
    """
    seen = [f"{int(task) + 1}: {value:.1f}" for task, value in accuracies.items()]
    unseen = [f"{task + 1}: -" for task in range(len(accuracies), tasks or 0)]
    mean = sum(accuracies.values()) / max(len(accuracies), 1)
    return "  ".join([*seen, *unseen]) + f"   mean {mean:.1f}"


class PlainDisplay:
    """One line a task, for logs and pipes."""

    def __init__(self, console: Console, title: str) -> None:
        self.console = console
        self.title = title
        self.start = time.monotonic()
        self.tasks: int | None = None
        self.loss: float | None = None

    def __call__(self, event: str, **fields: Any) -> None:
        if event in ("run_started", "resumed"):
            self.tasks = fields["tasks"]
        if event == "resumed":
            self._print(f"{self.title}  goes on at task {fields['task'] + 1}, round {fields['round'] + 1}")
        elif event == "round_finished":
            self.loss = fields["loss"]
        elif event == "evaluated" and fields["round"] is None:
            of = f"/{self.tasks}" if self.tasks else ""
            line = accuracies_line(fields["accuracies"], self.tasks)
            loss = f"loss {self.loss:.3f}  " if self.loss is not None else ""
            self._print(f"{self.title}  task {fields['task'] + 1}{of}  {loss}accuracy {line}")
        elif event == "warning":
            self._print(f"{self.title}  warning: {fields['message']}")

    def _print(self, text: str) -> None:
        stamp = f"[{time.monotonic() - self.start:6.1f}s]"
        self.console.print(f"{stamp} {text}", markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A bar over all rounds with the time left, and below it the loss, the accuracies and warnings.

    ``start`` is called with every event: it makes the display appear.
    """

    def __init__(self, console: Console, title: str, start: Callable[[], None] = lambda: None) -> None:
        self.title = title
        self.start = start
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[time]}"),
            console=console,
            expand=True,
        )
        self.bar = self.progress.add_task(title, total=None, time="left")
        self.loss: float | None = None
        self.accuracies = ""
        self.warnings: list[Text] = []
        self.tasks: int | None = None

    def __call__(self, event: str, **fields: Any) -> None:
        self.start()
        if event in ("run_started", "resumed"):
            self.tasks = fields["tasks"]
        if event in ("task_started", "resumed"):
            of = f"/{self.tasks}" if self.tasks else ""
            bar = self.progress.tasks[0]
            # Rounds to come are taken to be as many a task as this one's; each task sets it right.
            ahead = fields["rounds"] * ((self.tasks or fields["task"] + 1) - fields["task"])
            description = f"{self.title}  task {fields['task'] + 1}{of}"
            total = bar.completed + ahead - fields.get("round", 0)
            self.progress.update(self.bar, description=description, total=total)
        elif event == "round_finished":
            self.loss = fields["loss"]
            self.progress.advance(self.bar)
        elif event == "evaluated":
            self.accuracies = f"accuracy  {accuracies_line(fields['accuracies'], self.tasks)}"
        elif event == "warning":
            self.warnings.append(Text(f"warning: {fields['message']}", style="yellow"))
        elif event == "run_finished":
            self.progress.update(self.bar, total=self.progress.tasks[0].completed, time="in all")

    def body(self) -> Group:
        """What is to be seen of the run."""
        loss = "" if self.loss is None else f"loss {self.loss:.3f}   "
        return Group(self.progress, Text(loss + self.accuracies, style="dim"), *self.warnings)
