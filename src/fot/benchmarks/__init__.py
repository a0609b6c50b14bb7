"""Streams of tasks: file formats, transforms, partitions over clients, and the catalogue."""

from __future__ import annotations

from fot.benchmarks.catalogue import BENCHMARKS, build
from fot.benchmarks.dataset import Dataset
from fot.benchmarks.datasets import load
from fot.benchmarks.own import from_tensors, read
from fot.benchmarks.partition import Partition
from fot.benchmarks.stream import Stream, Task, TaskStream, class_split, permuted, sequence

__all__ = [
    "BENCHMARKS",
    "Dataset",
    "Partition",
    "Stream",
    "Task",
    "TaskStream",
    "build",
    "class_split",
    "from_tensors",
    "load",
    "permuted",
    "read",
    "sequence",
]
