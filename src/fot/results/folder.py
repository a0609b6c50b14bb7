"""The folder that a run leaves behind, readable by people and by programs, and safe to kill at any moment.

====================== ====================================================================
``experiment.toml``     every setting of the run, resolved
``events.jsonl``        one JSON object a line, written as it happens
``summary.json``        the results; its presence means that the run has finished
``model.safetensors``   the final global model
``memory.safetensors``  the server's memory of past tasks
``checkpoint/``         what a resumed run starts from
``report.html``         the results for people, self-contained
====================== ====================================================================
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fot.errors import UserError
from fot.files import write_whole

FORMAT = 1
"""Version of the layout of ``summary.json``."""

SUMMARY_KEYS = (
    *("format", "version", "benchmark", "method", "partition", "seed", "engine", "device"),
    *("acc", "fgt", "fgt_max", "bwt", "fwt", "accuracy", "zero_shot", "initial"),
    *("tasks", "clients", "cohort", "rounds", "parameters", "excluded"),
    *("layers", "subspace", "bytes_up", "bytes_down", "seconds"),
)
"""Every key that ``summary.json`` must have."""

_PARTS = {
    "bytes_up": ("training", "extraction"),
    "bytes_down": ("training", "extraction"),
    "seconds": ("train", "extract", "evaluate"),
}


def check_summary(summary: Mapping[str, Any], where: str = "summary.json") -> None:
    """Raise :class:`~fot.errors.UserError` naming what is missing or misshapen in a summary.

    Examples
    --------
    >>> check_summary({"format": 1})
    Traceback (most recent call last):
    ...
    fot.errors.UserError: summary.json lacks 'version': it is not the summary of a finished run; run it again
    """
    for name in SUMMARY_KEYS:
        if name not in summary:
            raise UserError(f"{where} lacks '{name}': it is not the summary of a finished run; run it again")
    if summary["format"] != FORMAT:
        raise UserError(
            f"{where} has format {summary['format']}, and this version of fot reads format {FORMAT}: "
            "use the version that wrote it"
        )
    for name, parts in _PARTS.items():
        for part in parts:
            if not isinstance(summary[name], Mapping) or part not in summary[name]:
                raise UserError(f"{where} lacks '{name}.{part}': run it again")
    names, accuracy = summary["tasks"], summary["accuracy"]
    if len(names) != len(accuracy):
        raise UserError(
            f"{where} names {len(names)} tasks and 'accuracy' has {len(accuracy)} rows: run it again"
        )
    for i, row in enumerate(accuracy):
        if len(row) != len(accuracy) or any(value is not None for value in row[:i]):
            raise UserError(f"{where}: row {i} of 'accuracy' must be null before column {i}: run it again")
    for layer in summary["subspace"] or {}:
        if layer not in summary["layers"]:
            raise UserError(f"{where} lacks the dimension of layer '{layer}' in 'layers': run it again")


def _plain(value: Any) -> Any:
    """Return ``value`` in JSON's own types; a number that is not finite becomes ``None``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's and torch's scalars and arrays
        return _plain(value.tolist())
    return str(value)


class RunFolder:
    """One run's folder. Make it with :meth:`create`, :meth:`open` or :meth:`resume`.

    Examples
    --------
    >>> import tempfile
    >>> folder = RunFolder.create(Path(tempfile.mkdtemp()) / "run")
    >>> folder.event("warning", message="loss is not finite", loss=float("nan"))
    >>> [(event["message"], event["loss"]) for event in folder.read_events()]
    [('loss is not finite', None)]
    >>> folder.finished
    False
    """

    def __init__(self, path: str | Path, elapsed: float = 0.0) -> None:
        self.path = Path(path)
        self._start = time.monotonic() - elapsed
        self.experiment = self.path / "experiment.toml"
        self.events = self.path / "events.jsonl"
        self.summary = self.path / "summary.json"
        self.model = self.path / "model.safetensors"
        self.memory = self.path / "memory.safetensors"
        self.checkpoint = self.path / "checkpoint"
        self.report = self.path / "report.html"

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False) -> RunFolder:
        """Start a new run in ``path``; a finished run is kept unless ``overwrite``.

        What an unfinished run left behind there is removed, and nothing else.
        """
        folder = cls(path)
        if folder.finished and not overwrite:
            raise UserError(f"{path} holds a finished run: choose another folder, or delete this one first")
        if folder.path.exists() and not folder.path.is_dir():
            raise UserError(f"{path} is a file: choose another folder for the run")
        if folder.events.exists() or folder.finished:
            # The summary goes first: killed half-way, what is left is an unfinished run, not a false result.
            for file in (folder.summary, folder.report, folder.model, folder.memory, folder.experiment):
                file.unlink(missing_ok=True)
            shutil.rmtree(folder.checkpoint, ignore_errors=True)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.events.write_bytes(b"")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}): choose another folder") from None
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open an existing run for reading."""
        folder = cls(path)
        if not folder.events.exists() and not folder.finished:
            raise UserError(f"{path} is not a run folder: it has neither summary.json nor events.jsonl")
        return folder

    @classmethod
    def resume(cls, path: str | Path, position: int | None = None) -> RunFolder:
        """Go on with an interrupted run.

        Parameters
        ----------
        path
            The folder.
        position
            What :meth:`sync` gave when the checkpoint was written: later events are dropped, since they will
            happen again. Without it all whole lines stay.
        """
        folder = cls.open(path)
        if folder.finished:
            raise UserError(f"{path} holds a finished run: there is nothing to resume")
        whole = folder.written()  # a line torn by the interruption would spoil the next one
        if position is not None and position > whole:
            raise UserError(f"{folder.events} is shorter than the checkpoint says: start the run anew")
        os.truncate(folder.events, whole if position is None else position)
        kept = folder.read_events()
        return cls(path, elapsed=float(kept[-1]["time"]) if kept else 0.0)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end."""
        return self.summary.exists()

    def written(self) -> int:
        """How many bytes of events there are, in whole lines."""
        return self.events.read_bytes().rfind(b"\n") + 1 if self.events.exists() else 0

    def sync(self) -> int:
        """Put the events onto the disk, power cut or not; a checkpoint stores how many bytes they are."""
        with self.events.open("ab") as file:
            os.fsync(file.fileno())
            return file.tell()

    def event(self, kind: str, **fields: Any) -> None:
        """Append one event with the seconds since the run's start, and flush it."""
        record = {"event": kind, "time": round(time.monotonic() - self._start, 3), **_plain(fields)}
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def read_events(self) -> list[dict[str, Any]]:
        """Return all events; a last line torn by an interruption is left out."""
        if not self.events.exists():
            return []
        *lines, _torn = self.events.read_bytes().split(b"\n")  # the remainder is empty when nothing is torn
        events: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            try:
                events.append(json.loads(line))
            except ValueError:
                raise UserError(f"{self.events}, line {number} is not JSON: the file was altered") from None
        return events

    def write_experiment(self, text: str) -> None:
        """Write ``experiment.toml``."""
        write_whole(self.experiment, text.encode())

    def read_experiment(self) -> str:
        """Return the text of ``experiment.toml``, empty where there is none."""
        return self.experiment.read_text(encoding="utf-8") if self.experiment.exists() else ""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Check and write ``summary.json``, all of it or nothing; ``format`` may be left out."""
        whole = _plain({"format": FORMAT, **summary})
        check_summary(whole)
        write_whole(self.summary, (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode())

    def read_summary(self) -> dict[str, Any]:
        """Return the checked summary of a finished run."""
        try:
            summary: dict[str, Any] = json.loads(self.summary.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{self.path} holds no finished run (no summary.json): resume it, or name another"
            ) from None
        except ValueError:
            raise UserError(f"{self.summary} is not JSON: run it again") from None
        check_summary(summary, str(self.summary))
        return summary
