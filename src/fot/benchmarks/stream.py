"""A continual benchmark is a stream of tasks, made one at a time as the run comes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fot.benchmarks.dataset import Dataset
from fot.benchmarks.partition import Partition
from fot.benchmarks.transforms import Prepare
from fot.errors import UserError
from fot.randomness import key, permutation

Augment = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Task:
    """One task: data ready for the model, and which client holds which training samples.

    `clients[i]` are the indices into the training samples that client i holds; it may be empty. `augment`
    changes training inputs, given int64 keys, one a sample. `notes` are lines that the reader of the data
    wants seen.
    """

    index: int
    name: str
    classes: int
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    clients: tuple[Tensor, ...]
    augment: Augment | None = None
    notes: tuple[str, ...] = ()


class Stream(Protocol):
    """What a run asks of a benchmark. A stream may also have a length; a run without one is open-ended."""

    @property
    def name(self) -> str: ...
    @property
    def num_clients(self) -> int: ...
    @property
    def multi_head(self) -> bool: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    def __iter__(self) -> Iterator[Task]: ...


@dataclass(frozen=True)
class TaskStream:
    """A stream of `count` tasks, each made by `make` when it is asked for.

    It may be walked again and again, and ``stream[t]`` is task t alone: a resumed run need not make the
    tasks before.
    """

    name: str
    num_clients: int
    multi_head: bool
    input_shape: tuple[int, ...]
    count: int
    make: Callable[[int], Task]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return self.make(index)

    def __iter__(self) -> Iterator[Task]:
        return (self.make(index) for index in range(self.count))


def permuted(data: Dataset, prepare: Prepare, deal: Partition, tasks: int, name: str) -> TaskStream:
    """Every task is the whole data set with its inputs in another fixed order; the first as they are.

    Inputs are flattened: a permuted picture has no rows and columns.

    Examples
    --------
    >>> from fot.benchmarks.datasets import digits
    >>> stream = permuted(digits(), torch.from_numpy, Partition(clients=4), 3, "demo")
    >>> [task.name for task in stream], stream.input_shape
    (['permutation 1', 'permutation 2', 'permutation 3'], (64,))
    """
    _at_least_one(tasks)
    dimension = prepare(data.train_x[:1]).numel()

    def make(index: int) -> Task:
        def inputs(raw: np.ndarray) -> Tensor:
            x = prepare(raw).flatten(1)
            if index == 0:
                return x
            return x.index_select(1, permutation(key(deal.seed, "permutation", index), dimension))

        shown = data if index == 0 else replace(data, notes=())  # once is enough
        return _task(shown, inputs, deal, index, f"permutation {index + 1}")

    return TaskStream(name, deal.num_clients, False, (dimension,), tasks, make)


def class_split(
    data: Dataset,
    prepare: Prepare,
    deal: Partition,
    tasks: int,
    classes_per_task: int,
    name: str,
    random_classes: bool = False,
    augment: Augment | None = None,
) -> TaskStream:
    """Every task is the next few classes, with a head of their own; in order, or in a seeded random one.

    Examples
    --------
    >>> from fot.benchmarks.datasets import digits
    >>> stream = class_split(digits(), torch.from_numpy, Partition(clients=4), 2, 2, "demo")
    >>> [(task.name, task.classes) for task in stream]
    [('classes 0, 1', 2), ('classes 2, 3', 2)]
    """
    _at_least_one(tasks)
    if classes_per_task < 2:
        raise UserError(f"classes_per_task = {classes_per_task}: a task needs at least 2 classes")
    if tasks * classes_per_task > data.classes:
        raise UserError(
            f"{tasks} tasks of {classes_per_task} classes are more than the {data.classes} classes of"
            f" {data.name}: ask for fewer"
        )
    order = np.arange(data.classes)
    if random_classes:
        order = permutation(key(deal.seed, "classes"), data.classes).numpy()

    def make(index: int) -> Task:
        chosen = order[index * classes_per_task : (index + 1) * classes_per_task]
        part = data.only(chosen.tolist())
        if index == 0:
            part = replace(part, notes=data.notes)
        names = part.class_names or tuple(map(str, chosen))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return _task(part, prepare, deal, index, f"classes {', '.join(names[:3])}{more}", augment)

    shape = tuple(prepare(data.train_x[:1]).shape[1:])
    return TaskStream(name, deal.num_clients, True, shape, tasks, make)


def sequence(data: Sequence[Callable[[], tuple[Dataset, Prepare]]], deal: Partition, name: str) -> TaskStream:
    """Every task is another data set with a head of its own; each is read when its turn comes."""
    if not data:
        raise UserError("a sequence of datasets needs at least one dataset")

    def make(index: int) -> Task:
        part, prepare = data[index]()
        task = _task(part, prepare, deal, index, part.name)
        if tuple(task.train_x.shape[1:]) != shape:
            raise UserError(
                f"{part.name}: samples of shape {tuple(task.train_x.shape[1:])} after others of {shape};"
                " the datasets of a sequence must agree"
            )
        return task

    first, prepare_first = data[0]()
    shape = tuple(prepare_first(first.train_x[:1]).shape[1:])
    del first, prepare_first
    return TaskStream(name, deal.num_clients, True, shape, len(data), make)


def _task(
    data: Dataset, inputs: Prepare, deal: Partition, index: int, name: str, augment: Augment | None = None
) -> Task:
    train_y, test_y = torch.from_numpy(data.train_y), torch.from_numpy(data.test_y)
    owners = None if data.owners is None else torch.from_numpy(data.owners)
    clients = deal(train_y, index, owners)
    notes = data.notes
    if deal.kind == "shards":
        over = sum(len(set(train_y[held].tolist())) > 2 for held in clients)
        if over:
            notes += (
                f"{over} of {deal.clients} clients hold more than two classes: the shards allow no other",
            )
    return Task(
        index=index,
        name=name,
        classes=data.classes,
        train_x=inputs(data.train_x),
        train_y=train_y,
        test_x=inputs(data.test_x),
        test_y=test_y,
        clients=clients,
        augment=augment,
        notes=notes,
    )


def _at_least_one(tasks: int) -> None:
    if tasks < 1:
        raise UserError(f"tasks = {tasks}: a benchmark needs at least 1 task")
