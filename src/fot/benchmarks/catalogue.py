"""The benchmarks by name: what each is made of, and the options it takes.

>>> stream = build("digits", seed=0, partition="shards", clients=5, tasks=2)
>>> [task.classes for task in stream]
[10, 10]
>>> BENCHMARKS["digits-split"].options["tasks"]
Option(type=<class 'int'>, default=5)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from fot.benchmarks.datasets import digits
from fot.benchmarks.partition import KINDS, Partition
from fot.benchmarks.stream import Stream, TaskStream, class_split, permuted
from fot.benchmarks.transforms import Pictures
from fot.errors import UserError


@dataclass(frozen=True)
class Option:
    """An option of a benchmark: its type and its default."""

    type: type
    default: Any


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: a line that describes it, the data sets it reads, and what makes its stream.

    `make` takes the partition, the data folder, and the benchmark's own options by keyword.
    """

    name: str
    about: str
    data: tuple[str, ...]
    clients: int
    make: Callable[..., TaskStream]

    @property
    def options(self) -> dict[str, Option]:
        """Every option `build` takes for this benchmark, by name."""
        hints = get_type_hints(self.make)
        own = {
            name: Option(hints[name], parameter.default)
            for name, parameter in inspect.signature(self.make).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        return own | {
            "clients": Option(int, self.clients),
            "alpha": Option(float, 0.5),
            "task_share": Option(float, 1.0),
            "imbalance": Option(float, 0.0),
        }


BENCHMARKS: dict[str, Benchmark] = {}


def build(
    name: str,
    *,
    seed: int = 0,
    partition: str = "iid",
    data_dir: str | Path | None = None,
    **options: Any,
) -> Stream:
    """The stream of a benchmark.

    Parameters
    ----------
    name
        A key of `BENCHMARKS`.
    seed
        The run's seed: it keys the partition, the permutations and a random order of classes.
    partition
        ``iid``, ``shards``, ``dirichlet`` or ``natural``; see `Partition`.
    data_dir
        Where the data sets lie; by default the folder that FOT_DATA names.
    options
        ``BENCHMARKS[name].options``: `tasks`, `clients`, `alpha`, `task_share`, `imbalance`, ...

    Examples
    --------
    >>> build("digits", partition="striped")
    Traceback (most recent call last):
    fot.errors.UserError: there is no partition 'striped'; choose one of iid, shards, dirichlet, natural
    """
    if name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {name!r}; choose one of {', '.join(BENCHMARKS)}")
    if partition not in KINDS:
        raise UserError(f"there is no partition {partition!r}; choose one of {', '.join(KINDS)}")
    benchmark = BENCHMARKS[name]
    known = benchmark.options
    for option, value in options.items():
        if option not in known:
            raise UserError(f"{name} has no option {option!r}; it has {', '.join(known)}")
        kind = known[option].type
        if kind is float and type(value) is int:
            options[option] = float(value)
        elif type(value) is not kind:
            raise UserError(f"{name}: {option} = {value!r} is not of type {kind.__name__}")
    shared = {"clients": benchmark.clients} | {
        option: options.pop(option)
        for option in ("clients", "alpha", "task_share", "imbalance")
        if option in options
    }
    deal = Partition(partition, seed=seed, **shared)
    return benchmark.make(deal, None if data_dir is None else Path(data_dir), **options)


Make = Callable[..., TaskStream]


def _add(name: str, about: str, clients: int, *data: str) -> Callable[[Make], Make]:
    def enter(make: Make) -> Make:
        BENCHMARKS[name] = Benchmark(name, about, data, clients, make)
        return make

    return enter


# Mean and deviation of all pixels of the digits' training part, of values in [0, 1].
_DIGITS = Pictures((0.3054,), (0.3762,), largest=16.0)


@_add("digits", "permuted handwritten digits of scikit-learn, one head; needs no download", 10)
def _digits(deal: Partition, data_dir: Path | None, *, tasks: int = 5) -> TaskStream:
    return permuted(digits(), _DIGITS, deal, tasks, "digits")


@_add("digits-split", "handwritten digits of scikit-learn, two classes a task; needs no download", 10)
def _digits_split(
    deal: Partition, data_dir: Path | None, *, tasks: int = 5, random_classes: bool = False
) -> TaskStream:
    return class_split(digits(), _DIGITS, deal, tasks, 2, "digits-split", random_classes)
