"""Checkpoints: a run killed at any moment goes on from the last one and ends as if nothing had happened.

A checkpoint is two files: ``NUMBER.safetensors`` holds every tensor of the state, ``NUMBER.json`` the
rest and the digest of the first. Each is written beside its place and moved there once it is on the
disk, the JSON last: a checkpoint is whole, or it is not there. The last two are kept, so that one
damaged later still leaves another.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch

from fot.federation.state import State
from fot.files import write_whole
from fot.methods.base import Server
from fot.network import Tree
from fot.options import Between

FORMAT = 1
KEPT = 2
Found = tuple[State, int, list[Any]]
"""What a checkpoint holds: the state, how much of the events was written, the accountant."""


@dataclass(frozen=True)
class CheckpointOptions:
    """How often a run is saved, besides at the end of every task."""

    rounds: Annotated[int, Between(0)] = 0
    """After every so many rounds; 0 for not."""
    minutes: Annotated[float, Between(0)] = 5.0
    """After so many minutes; 0 for not."""


class Checkpoints:
    """The checkpoints of a run folder."""

    def __init__(self, folder: Path, options: CheckpointOptions | None = None) -> None:
        self.folder = folder
        self.options = options or CheckpointOptions()
        self._saved = time.monotonic()

    def due(self, rounds: int) -> bool:
        """Whether it is time, after so many rounds of the run."""
        every, minutes = self.options.rounds, self.options.minutes
        return bool(every and rounds % every == 0) or bool(
            minutes and time.monotonic() - self._saved > 60 * minutes
        )

    def save(self, state: State, position: int, accountant: list[Any]) -> None:
        """Write a checkpoint; ``position`` is how much of the events was written before it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        numbers = self._numbers()
        path = self._path(max(numbers, default=0) + 1)
        packed = safetensors.torch.save(_pack(state))
        rest = {
            "format": FORMAT,
            "sha256": hashlib.sha256(packed).hexdigest(),
            "position": position,
            "accountant": accountant,
            "state": {
                k: v for k, v in asdict(_without_tensors(state)).items() if k not in ("server", "clients")
            },
        }
        write_whole(path.with_suffix(".safetensors"), packed)
        write_whole(path.with_suffix(".json"), json.dumps(rest).encode())
        self._saved = time.monotonic()
        for file in self.folder.iterdir():
            number = file.name.split(".")[0]
            if number.isdigit() and int(number) not in sorted([*numbers, int(path.name)])[-KEPT:]:
                file.unlink(missing_ok=True)

    def rounds(self) -> set[int]:
        """After how many rounds of the run the checkpoints were written."""
        found = set()
        for number in self._numbers():
            with suppress(OSError, ValueError, KeyError):
                found.add(json.loads(self._path(number, ".json").read_bytes())["state"]["rounds"])
        return found

    def load(
        self, device: torch.device, events: int, until: int | None = None
    ) -> tuple[Found | None, list[str]]:
        """The newest good checkpoint, and what was wrong with newer ones.

        Parameters
        ----------
        events
            How much of the events is there: what was lost of them is told again from an older checkpoint.
        until
            Leaves out those of more rounds, so that runs side by side go on from the same one.
        """
        problems: list[str] = []
        for number in sorted(self._numbers(), reverse=True):
            path = self._path(number)
            try:
                rest = json.loads(path.with_suffix(".json").read_bytes())
                if until is not None and rest["state"]["rounds"] > until:
                    continue
                packed = path.with_suffix(".safetensors").read_bytes()
                if rest["format"] != FORMAT or hashlib.sha256(packed).hexdigest() != rest["sha256"]:
                    raise ValueError("its digest is wrong")
                if rest["position"] > events:
                    raise ValueError("of the events before it some are lost")
                server, clients = _unpack(safetensors.torch.load(packed), device)
                state = State(server=server, clients=clients, **rest["state"])
                return (state, rest["position"], rest["accountant"]), problems
            except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
                problems.append(f"checkpoint {path.name} is damaged ({error}): going back to the one before")
        return None, problems

    def _path(self, number: int, suffix: str = "") -> Path:
        return self.folder / f"{number:08d}{suffix}"

    def _numbers(self) -> list[int]:
        found = self.folder.glob("*.json") if self.folder.is_dir() else ()
        return [int(file.stem) for file in found if file.stem.isdigit()]


def _pack(state: State) -> Tree:
    trees = {"params": state.server.params, "state": state.server.state}
    trees |= {f"client/{client}": tree for client, tree in state.clients.items()}
    return {f"{of}/{name}": t.contiguous().cpu() for of, tree in trees.items() for name, t in tree.items()}


def _unpack(tensors: Tree, device: torch.device) -> tuple[Server, dict[int, Tree]]:
    params: Tree = {}
    kept: Tree = {}
    clients: dict[int, Tree] = {}
    for full, tensor in tensors.items():
        of, _, name = full.partition("/")
        tensor = tensor.to(device)
        if of == "client":
            client, _, name = name.partition("/")
            clients.setdefault(int(client), {})[name] = tensor
        else:
            (params if of == "params" else kept)[name] = tensor
    return Server(params, kept), clients


def _without_tensors(state: State) -> State:
    return State(**{**vars(state), "server": Server({}, {}), "clients": {}})
