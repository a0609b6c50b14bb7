"""From an experiment to a run folder: runs it, or finds that it has been run already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fot.errors import UserError
from fot.federation.experiment import Experiment
from fot.federation.run import Run
from fot.network import save_tree
from fot.results import RunFolder, write_report

Observer = Callable[..., None]


def launch(experiment: Experiment, path: Path, observer: Observer) -> dict[str, Any]:
    """Run an experiment in a folder of its own, with events, summary, model, memory and report.

    A folder that holds the finished run of the very same settings is read instead of run again.
    """
    if finished(experiment, path):
        return RunFolder.open(path).read_summary()
    if RunFolder(path).finished:
        raise UserError(f"{path} holds a finished run of other settings: choose another --out")
    run = Run.of(experiment)
    folder = RunFolder.create(path)
    folder.write_experiment(experiment.to_toml())

    def tell(event: str, **fields: Any) -> None:
        folder.event(event, **fields)
        observer(event, **fields)

    run.tell = tell
    summary = run()
    save_tree(run.state.server.params, folder.model)
    run.method.save_memory(run.network, run.state.server, folder.memory)
    folder.write_summary(summary)
    write_report(path)
    return folder.read_summary()


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
        if not RunFolder(path).finished or finished(experiment, path):
            return path
        number += 1
