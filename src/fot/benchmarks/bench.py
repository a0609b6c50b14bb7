"""How long a benchmark's data take: ``fot bench data``."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fot.benchmarks.catalogue import build


@dataclass(frozen=True)
class DataBench:
    """Reading a benchmark's data and making each of its tasks once."""

    benchmark: str
    tasks: int
    samples: int
    load_seconds: float
    tasks_seconds: float
    peak_megabytes: float

    def __str__(self) -> str:
        return (
            f"{self.benchmark}: {self.tasks} tasks, {self.samples} training samples;"
            f" load {self.load_seconds:.2f} s, tasks {self.tasks_seconds:.2f} s,"
            f" peak memory of the process {self.peak_megabytes:.0f} MB"
        )


def bench_data(benchmark: str = "cifar100", data_dir: str | Path | None = None) -> DataBench:
    """Times the data of a benchmark. The peak counts the interpreter and torch, so run it in a fresh process.

    Examples
    --------
    >>> bench_data("digits").samples
    7190
    """
    start = time.perf_counter()
    stream = build(benchmark, data_dir=data_dir)
    loaded = time.perf_counter()
    counts = [len(task.train_y) for task in stream]
    done = time.perf_counter()
    unit = 1e6 if sys.platform == "darwin" else 1e3  # the one counts bytes, the others kilobytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return DataBench(benchmark, len(counts), sum(counts), loaded - start, done - loaded, peak)


if __name__ == "__main__":
    print(bench_data(*sys.argv[1:]))
