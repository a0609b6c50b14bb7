"""A run killed with -9 again and again: a program of its own, for only a process of one thread may fork.

    python killed_runs.py FOLDER RECIPE KILLS [KEY=VALUE ...]

Runs the recipe undisturbed in FOLDER/undisturbed, then once more in other folders below FOLDER, killed at
random moments and taken up again each time; prints the folders of the runs that came to their end.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from fot.federation.experiment import Experiment, resolve
from fot.federation.launch import launch


def run_in_child(experiment: Experiment, path: Path, kill_after: float | None) -> int:
    """Run in a forked process, killed after a while; returns its exit status (-9 when killed)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            launch(experiment, path, lambda event, **fields: None)
            status = 0
        finally:
            os._exit(status)
    deadline = math.inf if kill_after is None else time.monotonic() + kill_after
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, recipe: str, kills: int, sets: list[str]) -> None:
    torch.set_num_threads(1)
    experiment = resolve(recipe, method="fot", sets=sets)
    start = time.monotonic()
    assert run_in_child(experiment, folder / "undisturbed", None) == 0
    whole = time.monotonic() - start
    moments = random.Random(0)
    killed = 0
    path = folder / "disturbed"
    while killed < kills:
        if run_in_child(experiment, path, whole * moments.uniform(0.05, 0.6)) == -signal.SIGKILL:
            killed += 1
        else:  # it came to its end before, the machine being less busy than at first: start another
            print(path)
            whole /= 2
            path = folder / f"disturbed-{killed}"
    assert run_in_child(experiment, path, None) == 0
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
