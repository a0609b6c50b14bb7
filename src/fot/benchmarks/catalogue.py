"""The benchmarks by name: what each is made of, and the options it takes.

>>> stream = build("digits", seed=0, partition="shards", clients=5, tasks=2)
>>> [task.classes for task in stream]
[10, 10]
>>> BENCHMARKS["digits-split"].options["tasks"].default
5
>>> build("digits", tasks=0)
Traceback (most recent call last):
fot.errors.UserError: benchmark.tasks: 0 is out of range; allowed: a whole number at least 1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from fot.benchmarks.dataset import Dataset
from fot.benchmarks.datasets import digits, load, located
from fot.benchmarks.own import LARGEST_SIDE, read
from fot.benchmarks.partition import KINDS, Partition
from fot.benchmarks.stream import Stream, TaskStream, class_split, permuted, sequence
from fot.benchmarks.transforms import CropAndFlip, Pictures, Prepare, standardise
from fot.errors import UserError
from fot.options import Between, check_table


@dataclass(frozen=True)
class Option:
    """An option of a benchmark: its type, with its range where it has one, and its default."""

    type: Any
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
        hints = get_type_hints(self.make, include_extras=True)
        own = {
            name: Option(hints[name], parameter.default)
            for name, parameter in inspect.signature(self.make).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        return own | _SHARED | {"clients": Option(_SHARED["clients"].type, self.clients)}


_SHARED = {
    name: Option(hint, getattr(Partition, name))
    for name, hint in get_type_hints(Partition, include_extras=True).items()
    if name not in ("kind", "seed")
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
    options = check_table(options, {n: o.type for n, o in benchmark.options.items()}, "benchmark")
    shared = {name: options.pop(name) for name in _SHARED if name in options}
    deal = Partition(partition, seed=seed, **({"clients": benchmark.clients} | shared))
    return benchmark.make(deal, None if data_dir is None else Path(data_dir), **options)


Make = Callable[..., TaskStream]
Tasks = Annotated[int, Between(1)]
ClassesPerTask = Annotated[int, Between(2)]
Size = Annotated[int, Between(0, LARGEST_SIDE)]
TestShare = Annotated[float, Between(0, 1)]


def _add(name: str, about: str, clients: int, *data: str) -> Callable[[Make], Make]:
    def enter(make: Make) -> Make:
        BENCHMARKS[name] = Benchmark(name, about, data, clients, make)
        return make

    return enter


# Mean and deviation of all pixels of the digits' training part, of values in [0, 1].
_DIGITS = Pictures((0.3054,), (0.3762,), largest=16.0)


@_add("digits", "permuted handwritten digits of scikit-learn, one head; needs no download", 10)
def _digits(deal: Partition, data_dir: Path | None, *, tasks: Tasks = 5) -> TaskStream:
    return permuted(digits(), _DIGITS, deal, tasks, "digits")


@_add("digits-split", "handwritten digits of scikit-learn, two classes a task; needs no download", 10)
def _digits_split(
    deal: Partition, data_dir: Path | None, *, tasks: Tasks = 5, random_classes: bool = False
) -> TaskStream:
    return class_split(digits(), _DIGITS, deal, tasks, 2, "digits-split", random_classes)


# Means and deviations of pixel values in [0, 1], as the paper's authors and those before them used them.
_MNIST = Pictures((0.1307,), (0.3081,))
_CIFAR100 = Pictures((0.4914, 0.4824, 0.4467), (0.2471, 0.24353, 0.2616))
_FIVE: dict[str, Pictures] = {  # the order of the tasks; grey pictures become 3 x 32 x 32
    "cifar10": Pictures(
        (125.3 / 255, 123.0 / 255, 113.9 / 255),
        (63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
    "mnist": Pictures((0.1,), (0.2752,), padding=2, channels=3),
    "svhn": Pictures((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion-mnist": Pictures((0.2190,), (0.3318,), padding=2, channels=3),
    "notmnist": Pictures((0.4254,), (0.4501,), padding=2, channels=3),
}
_MINI = Pictures((0.47313006, 0.44905752, 0.40378186), (0.27292014, 0.26559181, 0.27953038), size=84)


@_add("pmnist", "permuted MNIST, one head", 125, "mnist")
def _pmnist(deal: Partition, data_dir: Path | None, *, tasks: Tasks = 10) -> TaskStream:
    return permuted(load("mnist", data_dir), _MNIST, deal, tasks, "pmnist")


@_add("cifar100", "Split-CIFAR100, ten classes a task", 50, "cifar100")
def _cifar100(
    deal: Partition,
    data_dir: Path | None,
    *,
    tasks: Tasks = 10,
    classes_per_task: ClassesPerTask = 10,
    random_classes: bool = False,
) -> TaskStream:
    data = load("cifar100", data_dir)
    return class_split(data, _CIFAR100, deal, tasks, classes_per_task, "cifar100", random_classes)


@_add("five-datasets", "CIFAR-10, MNIST, SVHN, Fashion-MNIST, notMNIST in turn", 150, *_FIVE)
def _five_datasets(
    deal: Partition, data_dir: Path | None, *, tasks: Annotated[int, Between(1, 5)] = 5
) -> TaskStream:
    names = list(_FIVE)[:tasks]
    for name in names:
        located(name, data_dir)  # a missing set shows now, and not after hours when its turn comes

    def read_one(name: str) -> tuple[Dataset, Prepare]:
        return load(name, data_dir), _FIVE[name]

    return sequence([partial(read_one, name) for name in names], deal, "five-datasets")


def _mini(name: str, data: str) -> Make:
    def make(
        deal: Partition,
        data_dir: Path | None,
        *,
        tasks: Tasks = 20,
        classes_per_task: ClassesPerTask = 5,
        random_classes: bool = False,
        augment: bool = True,
    ) -> TaskStream:
        crop = CropAndFlip(4, _MINI.black) if augment else None
        images = load(data, data_dir)
        return class_split(images, _MINI, deal, tasks, classes_per_task, name, random_classes, crop)

    return make


_add("miniimagenet", "Split Mini-ImageNet, five classes a task", 50, "miniimagenet")(
    _mini("miniimagenet", "miniimagenet")
)
_add(
    "miniimagenet-standin",
    "100 classes of Tiny-ImageNet at 84 x 84 in place of Mini-ImageNet; name its figures the stand-in's",
    50,
    "tinyimagenet100",
)(_mini("miniimagenet-standin", "tinyimagenet100"))


@_add("own-permuted", "data of your own, permuted, one head; path = a folder, .npz or .csv", 10)
def _own_permuted(
    deal: Partition,
    data_dir: Path | None,
    *,
    path: str = "",
    tasks: Tasks = 5,
    label: str = "label",
    owner: str = "",
    size: Size = 0,
    test_share: TestShare = 0.2,
) -> TaskStream:
    data = _own(path, label, owner, size, test_share)
    return permuted(data, standardise(data.train_x), deal, tasks, data.name)


@_add("own-split", "data of your own, a few classes a task; path = a folder, .npz or .csv", 10)
def _own_split(
    deal: Partition,
    data_dir: Path | None,
    *,
    path: str = "",
    tasks: Annotated[int, Between(0)] = 0,
    classes_per_task: ClassesPerTask = 2,
    random_classes: bool = False,
    label: str = "label",
    owner: str = "",
    size: Size = 0,
    test_share: TestShare = 0.2,
) -> TaskStream:
    """With tasks = 0, as many as there are classes for."""
    data = _own(path, label, owner, size, test_share)
    tasks = tasks or data.classes // max(classes_per_task, 1)
    prepare = standardise(data.train_x)
    return class_split(data, prepare, deal, tasks, classes_per_task, data.name, random_classes)


@_add("own-sequence", "data sets of your own in turn; paths = folders, .npz or .csv", 10)
def _own_sequence(
    deal: Partition,
    data_dir: Path | None,
    *,
    paths: tuple[str, ...] = (),
    label: str = "label",
    owner: str = "",
    size: Size = 0,
    test_share: TestShare = 0.2,
) -> TaskStream:
    for path in paths:
        if not Path(path).exists():
            raise UserError(f"benchmark.paths: {path} does not exist; give folders, or .npz or .csv files")

    def read_one(path: str) -> tuple[Dataset, Prepare]:
        data = _own(path, label, owner, size, test_share)
        return data, standardise(data.train_x)

    return sequence([partial(read_one, path) for path in paths], deal, "own-sequence")


def _own(path: str, label: str, owner: str, size: int, test_share: float) -> Dataset:
    if not path:
        raise UserError("data of your own need a path: set benchmark.path to a folder, .npz or .csv")
    return read(path, label=label, owner=owner, size=size, test_share=test_share)
