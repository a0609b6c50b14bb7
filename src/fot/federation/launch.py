"""From an experiment to a run folder: runs it, or finds that it has been run already."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fot.engines.sharded import World, world
from fot.errors import UserError
from fot.federation.checkpoint import Checkpoints
from fot.federation.experiment import Experiment
from fot.federation.run import Run
from fot.federation.state import State
from fot.methods.base import Server
from fot.network import Tree, save_tree
from fot.results import RunFolder, write_report

Observer = Callable[..., None]
Found = tuple[State, int, list[Any]]


def launch(experiment: Experiment, path: Path, observer: Observer) -> dict[str, Any]:
    """Run an experiment in a folder of its own, with events, summary, model, memory and report.

    A folder that holds the finished run of the very same settings is read instead of run again; an
    unfinished one goes on from its last checkpoint. Of several ranks the first alone reads and writes.
    """
    ranks, folder = world(experiment.engine.device), RunFolder(path)
    first = ranks.rank == 0
    known: dict[str, Any] | None = ranks.told(
        folder.read_summary() if first and finished(experiment, path) else None
    )
    if known is not None:
        return known
    if first and not _free(experiment, path):
        raise UserError(f"{path} holds a run of other settings: choose another --out, or delete it")
    run = Run.of(experiment)
    checkpoints = Checkpoints(folder.checkpoint, experiment.checkpoint)
    found: Found | None = None
    problems: list[str] = []
    if first and folder.read_experiment() == experiment.to_toml():
        found, problems = checkpoints.load(run.device)
    found = _shared(found, ranks)
    if found is not None:
        run.state, position, releases = found
        run.aggregation.restore(releases)
    if not first:
        return run()
    if found is None:
        folder = RunFolder.create(path)
        folder.write_experiment(experiment.to_toml())
    else:
        folder = RunFolder.resume(path, position)

    def tell(event: str, **fields: Any) -> None:
        folder.event(event, **fields)
        observer(event, **fields)

    def save(task_ended: bool) -> None:
        if task_ended or checkpoints.due(run.state.rounds):
            checkpoints.save(run.state, folder.position, run.aggregation.state())

    run.tell = tell
    if found is not None:  # the display alone: the folder's events have told it
        observer("resumed", **run.position())
    for problem in problems:
        tell("warning", message=problem)
    summary = run(save) | {"settings": experiment.digest()}
    save_tree(run.state.server.params, folder.model)
    run.method.save_memory(run.network, run.state.server, folder.memory)
    folder.write_summary(summary)
    write_report(path)
    shutil.rmtree(folder.checkpoint, ignore_errors=True)
    return folder.read_summary()


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


def default_path(root: Path, experiment: Experiment) -> Path:
    """A folder below ``root`` named after the run; a number is added where one of other settings lies."""
    name = "-".join(
        [
            experiment.method["name"].replace(":", "."),
            str(experiment.benchmark.get("partition", "iid")),
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
