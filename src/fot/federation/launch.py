"""From an experiment to a run folder: runs it, or finds that it has been run already."""

from __future__ import annotations

import errno
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fot.engines.sharded import World, world
from fot.errors import UserError
from fot.federation.checkpoint import Checkpoints, Found
from fot.federation.experiment import Experiment
from fot.federation.lockstep import lockstep
from fot.federation.run import Run
from fot.federation.state import State
from fot.methods.base import Server
from fot.network import Tree, save_tree
from fot.results import RunFolder, write_report

Observer = Callable[..., None]
ON_A_CPU = 8
"""Runs that go side by side on a CPU: more gain nothing there, and each holds its data in memory."""


def launch(experiment: Experiment, path: Path, observer: Observer) -> dict[str, Any]:
    """Run an experiment in a folder of its own, with events, summary, model, memory and report.

    A folder that holds the finished run of the very same settings is read instead of run again; an
    unfinished one goes on from its last checkpoint. Of several ranks the first alone reads and writes.
    """
    return launch_together([(experiment, path, observer)])[0]


def launch_together(
    jobs: Sequence[tuple[Experiment, Path, Observer]], notes: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Run experiments that are alike (see ``alike``) side by side, each in a folder of its own.

    ``notes`` are entries of each run's summary that tell it apart from the others.
    """
    launches = [_Launch(*job, note) for job, note in zip(jobs, notes or [{}] * len(jobs), strict=True)]
    todo = [one for one in launches if one.summary is None]
    common = set.intersection(*(one.checkpoints.rounds() for one in todo)) if todo else set()
    due: dict[int, bool] = {}  # after so many rounds: all runs are saved, or none is
    try:
        for one in todo:
            one.prepare(max(common, default=None), lambda r: due.setdefault(r, todo[0].checkpoints.due(r)))
        for one, summary in zip(todo, lockstep([one.run for one in todo]) if todo else [], strict=True):
            one.finish(summary)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        again = "make room and give the same command again: it goes on from the last checkpoint"
        raise UserError(f"the disk is full; {again}") from error
    return [one.summary for one in launches if one.summary is not None]


class _Launch:
    """One experiment and its folder: read, or made ready, run and written."""

    def __init__(
        self, experiment: Experiment, path: Path, observer: Observer, note: Mapping[str, Any]
    ) -> None:
        self.experiment, self.path, self.observer, self.note = experiment, path, observer, note
        self.ranks, self.folder = world(experiment.engine.device), RunFolder(path)
        self.first = self.ranks.rank == 0
        self.checkpoints = Checkpoints(self.folder.checkpoint, experiment.checkpoint)
        self.summary: dict[str, Any] | None = self.ranks.told(
            self.folder.read_summary() if self.first and finished(experiment, path) else None
        )
        if self.summary is None and self.first and not _free(experiment, path):
            raise UserError(f"{path} holds a run of other settings: choose another --out, or delete it")

    def prepare(self, until: int | None, due: Callable[[int], bool]) -> None:
        """Make the run, or take it up at a checkpoint of no more rounds than ``until``."""
        self.run = run = Run.of(self.experiment)
        found: Found | None = None
        problems: list[str] = []
        if self.first and self.folder.read_experiment() == self.experiment.to_toml():
            found, problems = self.checkpoints.load(run.device, self.folder.written(), until)
        found = _shared(found, self.ranks)
        if found is not None:
            run.state, position, releases = found
            run.aggregation.restore(releases)
        if not self.first:
            return
        if found is None:
            self.folder = RunFolder.create(self.path)
            self.folder.write_experiment(self.experiment.to_toml())
        else:
            self.folder = RunFolder.resume(self.path, position)
            self.observer("resumed", **run.position())  # the display alone: the folder's events have told it

        def tell(event: str, **fields: Any) -> None:
            self.folder.event(event, **fields)
            self.observer(event, **fields)

        def save(task_ended: bool) -> None:
            if task_ended or due(run.state.rounds):
                self.checkpoints.save(run.state, self.folder.sync(), run.aggregation.state())

        run.tell, run.save = tell, save
        for problem in problems:
            tell("warning", message=problem)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write what the run came to."""
        self.summary = summary
        if not self.first:
            return
        run, folder = self.run, self.folder
        save_tree(run.state.server.params, folder.model)
        run.method.save_memory(run.network, run.state.server, folder.memory)
        folder.write_summary(summary | {"settings": self.experiment.digest(), **self.note})
        write_report(self.path)
        shutil.rmtree(folder.checkpoint, ignore_errors=True)
        self.summary = folder.read_summary()


def groups(experiments: Sequence[Experiment], together: int | None = None) -> list[list[int]]:
    """Which experiments run side by side: those alike, in their order, as many as memory allows.

    ``together`` is the most of them; 1 lets each run by itself.

    Examples
    --------
    >>> from fot.federation.experiment import resolve
    >>> some = [resolve("digits", method=m, seed=s) for m in ("fedavg", "fot") for s in (0, 1)]
    >>> groups([*some, resolve("digits", sets=["training.lr=0.3"])]), groups(some, together=3)
    ([[0, 1, 2, 3], [4]], [[0, 1, 2], [3]])
    """
    found: list[list[int]] = []
    for number, experiment in enumerate(experiments):
        kind = alike(experiment)
        for group in found:
            room = len(group) < (together or _most(experiment))
            if room and kind is not None and kind == alike(experiments[group[0]]):
                group.append(number)
                break
        else:
            found.append([number])
    return found


def alike(experiment: Experiment) -> str | None:
    """What runs must share to train side by side; None where a run goes by itself.

    They differ in their seed and in what the server does: in the method, where clients train as in
    federated averaging, or in its options. A secure sum can fail, and then its round alone is void.
    """
    if experiment.aggregation["kind"] == "secure" or experiment.engine.kind != "vectorized":
        return None
    method = {"name": "plain"} if experiment.make_method().plain else experiment.method
    return replace(experiment, seed=0, method=method).to_toml()


def _most(experiment: Experiment) -> int:
    """How many runs fit on the device at once; a rule of its whole memory, so that it is always the same."""
    if world(experiment.engine.device).size > 1:
        return 1
    device = experiment.engine.resolved_device()
    if device.type != "cuda":
        return ON_A_CPU
    model = sum(p.numel() * p.element_size() for p in experiment.make_model().parameters())
    # Weights, their gradients where they are stored, and about as much again in maps and masks.
    need = 4 * experiment.training.cohort * model
    return max(1, torch.cuda.get_device_properties(device).total_memory // 2 // need)


def _shared(found: Found | None, ranks: World) -> Found | None:
    """The checkpoint that the first rank found, on every rank."""
    rest, trees = None, dict[int, Tree]()
    if found is not None:
        state, position, releases = found
        plain = {name: value for name, value in vars(state).items() if name not in ("server", "clients")}
        rest = (plain, position, releases)
        trees = {-2: state.server.params, -1: state.server.state, **state.clients}
    rest = ranks.told(rest)
    if rest is None:
        return None
    plain, position, releases = rest
    clients = ranks.share(trees)
    return State(Server(clients.pop(-2), clients.pop(-1)), clients, **plain), position, releases


def settings_of(path: Path) -> Experiment:
    """The settings of the unfinished run in a folder."""
    folder = RunFolder.open(path)
    if folder.finished:
        raise UserError(f"{path} holds a finished run: there is nothing to resume")
    if not folder.experiment.exists():
        raise UserError(f"{path} holds no experiment.toml: the run was ended before it began; start it anew")
    return Experiment.from_table(tomllib.loads(folder.read_experiment()))


def finished(experiment: Experiment, path: Path) -> bool:
    """Whether the folder holds a finished run of these settings."""
    folder = RunFolder(path)
    return folder.finished and folder.read_experiment() == experiment.to_toml()


def default_path(root: Path, experiment: Experiment, values: Mapping[str, Any] | None = None) -> Path:
    """A folder below ``root`` named after the run, and after those of its settings that a sweep varies.

    A number is added where a run of other settings lies.
    """
    varied = [f"{key.rpartition('.')[2]}-{value}" for key, value in (values or {}).items()]
    name = "-".join(
        [
            experiment.method["name"].replace(":", "."),
            str(experiment.benchmark.get("partition", "iid")),
            *(re.sub(r"[^\w.+-]+", "_", text) for text in varied),
            f"seed{experiment.seed}",
        ]
    )
    number = 1
    while True:
        path = root / (name if number == 1 else f"{name}-{number}")
        if _free(experiment, path):
            return path
        number += 1


def _free(experiment: Experiment, path: Path) -> bool:
    """Whether no run of other settings lies there, finished or interrupted."""
    return RunFolder(path).read_experiment() in ("", experiment.to_toml())
