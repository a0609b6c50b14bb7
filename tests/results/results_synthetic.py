"""A run folder as a real run would leave it, made up but plausible, for the tests of this room."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fot.results import RunFolder, metrics

TOML = """seed = 0
[benchmark]
name = "permuted-mnist"
tasks = 10
clients = 125
partition = "iid"
[model]
name = "mlp"
hidden = [400, 400, 400]
[training]
rounds = 200
cohort = 64
batch = 64
lr = 0.01
weight_decay = 1e-5
[method]
name = "fot"
threshold = 0.94
increment = 0.0
rule = "energy"
[aggregation]
kind = "plain"
[engine]
name = "vectorized"
precision = "float32"
"""


def matrix(tasks: int, rate: float) -> list[list[float | None]]:
    """Accuracies that fall by about ``rate`` a task, with a deterministic ripple."""
    return [
        [
            None if t < i else 96.4 - 0.55 * i - rate * (t - i) ** 1.15 + 0.4 * math.sin(3.0 * i + t)
            for t in range(tasks)
        ]
        for i in range(tasks)
    ]


def make_run(
    path: Path,
    *,
    method: str = "fot",
    tasks: int = 10,
    seed: int = 0,
    rate: float = 0.25,
    depth: int = 4,
    rounds: int = 200,
    **changes: Any,
) -> dict[str, Any]:
    """Write a finished run into ``path`` and return its summary."""
    folder = RunFolder.create(path)
    accuracy = matrix(tasks, rate + 0.02 * seed)
    names = ["digits"] + [f"permutation {i}" for i in range(1, tasks)]
    sizes = {f"body.{2 * n}": 784 if n == 0 else 400 for n in range(depth)} if method == "fot" else {}
    subspace = {
        name: [min(100.0, 8.0 + 7 * n + 30 * math.log1p(t) / (1 + 0.3 * n)) for t in range(tasks)]
        for n, name in enumerate(sizes)
    }
    folder.write_experiment(TOML)
    folder.event("run_started", benchmark="permuted-mnist", method=method, seed=seed)
    for t in range(tasks):
        folder.event("task_started", task=t, name=names[t], classes=10, rounds=rounds)
        for r in [*range(rounds // 10 - 1, rounds, rounds // 10), None]:
            part = 1.0 if r is None else (r + 1) / rounds
            now = {}
            for i in range(t + 1):
                end = accuracy[i][t]
                start = 12.0 if i == t else accuracy[i][t - 1]
                now[str(i)] = end - (end - start) * math.exp(-5 * part) + (0.3 * math.sin(40 * part + i))
                now[str(i)] = end if r is None else now[str(i)]
            folder.event("evaluated", task=t, round=r, accuracies=now)
    folder.event("warning", message="client 17 holds no data of task 3 <b>and was skipped</b>")
    summary = {
        "version": "0.1.0",
        "benchmark": "permuted-mnist",
        "method": method,
        "partition": "iid",
        "seed": seed,
        "engine": "vectorized",
        "device": "cpu",
        "acc": metrics.average_accuracy(accuracy),
        "fgt": metrics.forgetting(accuracy),
        "fgt_max": metrics.forgetting_max(accuracy),
        "bwt": metrics.backward_transfer(accuracy),
        "fwt": metrics.forward_transfer([10.0 + i for i in range(tasks)], [9.5] * tasks),
        "accuracy": accuracy,
        "zero_shot": [10.0 + i for i in range(tasks)],
        "initial": [9.5] * tasks,
        "tasks": names,
        "clients": 125,
        "cohort": 64,
        "rounds": rounds * tasks,
        "parameters": 638_810,
        "excluded": 3,
        "layers": sizes,
        "subspace": subspace,
        "bytes_up": {"training": 5_110_480_000, "extraction": 42_600_000 if sizes else 0},
        "bytes_down": {"training": 5_110_480_000, "extraction": 9_200_000 if sizes else 0},
        "seconds": {"train": 812.4 + seed, "extract": 31.0 if sizes else 0.0, "evaluate": 44.9},
        **changes,
    }
    folder.write_summary(summary)
    folder.event("run_finished", acc=summary["acc"], fgt=summary["fgt"])
    return json.loads(folder.summary.read_text())
