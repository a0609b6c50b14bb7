from __future__ import annotations

import numpy as np
import pytest
import torch

from fot.benchmarks import BENCHMARKS, Partition, build
from fot.benchmarks.dataset import Dataset
from fot.benchmarks.datasets import digits
from fot.benchmarks.stream import class_split, permuted, sequence
from fot.errors import UserError
from fot.options import convert


def numbered(classes: int = 6, each: int = 5, d: int = 3) -> Dataset:
    """Sample n of class c is (c, c, ..., n): it can be recognised after any shuffling."""
    y = np.repeat(np.arange(classes), each)
    x = np.repeat(y[:, None], d, 1).astype(np.float32)
    x[:, -1] = np.arange(len(y))
    return Dataset("numbered", x, y, x + 100, y, classes)


def test_digits_are_a_permuted_stream():
    stream = build("digits", seed=1, clients=7)
    tasks = list(stream)
    assert len(stream) == len(tasks) == 5 and not stream.multi_head and stream.input_shape == (64,)
    plain = torch.from_numpy(digits().train_x).float() / 16
    restored = tasks[0].train_x * 0.3762 + 0.3054
    assert torch.allclose(restored, plain, atol=1e-5)  # task 1 is not permuted
    for task in tasks[1:]:
        assert not torch.equal(task.train_x, tasks[0].train_x)
        assert torch.equal(task.train_x.sort(1).values, tasks[0].train_x.sort(1).values)
        assert torch.equal(task.train_y, tasks[0].train_y)
    # One permutation serves training and test: find it by each column's fingerprint.
    columns = {tuple(c.tolist()): j for j, c in enumerate(torch.cat([tasks[0].train_x, tasks[0].test_x]).T)}
    for task in tasks[1:]:
        assert {tuple(c.tolist()) for c in torch.cat([task.train_x, task.test_x]).T} == set(columns)
    assert not torch.equal(tasks[1].train_x, tasks[2].train_x)


def test_digits_are_normalised_and_stratified():
    data, task = digits(), build("digits")[0]
    assert abs(task.train_x.mean()) < 1e-3 and abs(task.train_x.std() - 1) < 1e-3
    counts = np.bincount(data.train_y) + np.bincount(data.test_y)
    assert counts.sum() == 1797 and (abs(np.bincount(data.test_y) - 0.2 * counts) <= 0.5).all()


def test_digits_split_is_multi_head():
    stream = build("digits-split", partition="shards", clients=4)
    tasks = list(stream)
    assert stream.multi_head and [t.classes for t in tasks] == [2] * 5
    assert [t.name for t in tasks] == [f"classes {2 * k}, {2 * k + 1}" for k in range(5)]
    assert sum(len(t.train_y) for t in tasks) == len(digits().train_y)
    for task in tasks:
        assert task.train_y.dtype == torch.int64 and task.train_y.unique().tolist() == [0, 1]
        assert task.train_x.dtype == torch.float32 and len(task.clients) == 4


def test_a_third_class_that_cannot_be_helped_is_told():
    stream = class_split(numbered(), torch.from_numpy, Partition("shards", clients=1), 1, 6, "demo")
    assert stream[0].notes == ("1 of 1 clients hold more than two classes: the shards allow no other",)
    assert (
        class_split(numbered(), torch.from_numpy, Partition("shards", clients=3), 1, 6, "demo")[0].notes == ()
    )
    assert class_split(numbered(), torch.from_numpy, Partition(clients=1), 1, 6, "demo")[0].notes == ()


def test_class_split_relabels_and_keeps_pairs():
    stream = class_split(numbered(), torch.from_numpy, Partition(clients=2), 3, 2, "demo")
    for t, task in enumerate(stream):
        assert torch.equal(task.train_x[:, 0].long(), task.train_y + 2 * t)
        assert torch.equal(task.test_x[:, 0].long(), task.test_y + 2 * t + 100)


def test_random_classes_are_a_seeded_order():
    def first_classes(seed):
        deal = Partition(clients=2, seed=seed)
        stream = class_split(numbered(), torch.from_numpy, deal, 3, 2, "demo", random_classes=True)
        return [tuple(task.train_x[:, 0].unique().tolist()) for task in stream]

    assert first_classes(0) == first_classes(0)
    assert len({tuple(first_classes(seed)) for seed in range(5)}) > 1
    assert sorted(c for pair in first_classes(3) for c in pair) == list(range(6))


def test_sequence_of_datasets_reads_each_in_its_turn():
    read = []

    def reader(n):
        def open_it():
            read.append(n)
            return numbered(classes=n), torch.from_numpy

        return open_it

    stream = sequence([reader(n) for n in (2, 4)], Partition(clients=2), "demo")
    read.clear()
    assert [task.classes for task in stream] == [2, 4] and read == [2, 4]


def test_sequence_refuses_shapes_that_differ():
    stream = sequence(
        [lambda: (numbered(d=3), torch.from_numpy), lambda: (numbered(d=4), torch.from_numpy)],
        Partition(clients=2),
        "demo",
    )
    with pytest.raises(UserError, match="must agree"):
        list(stream)


def test_a_stream_is_walked_again_with_the_same_tasks():
    stream = build("digits", partition="dirichlet", seed=3)
    for one, two in zip(stream, stream, strict=True):
        assert torch.equal(one.train_x, two.train_x)
        assert all(map(torch.equal, one.clients, two.clients))
    assert torch.equal(stream[3].test_x, list(stream)[3].test_x)


def test_seeds_change_the_permutations():
    assert not torch.equal(build("digits", seed=1)[1].train_x, build("digits", seed=2)[1].train_x)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"tasks": 0}, r"^benchmark\.tasks: 0 is out of range; allowed: a whole number at least 1$"),
        ({"clients": 0}, r"^benchmark\.clients: 0 is out of range; allowed: a whole number at least 1$"),
        ({"tasks": 2.5}, r"^benchmark\.tasks: 2\.5 is not allowed; allowed: a whole number"),
        ({"tasks": True}, r"^benchmark\.tasks: True is not allowed; allowed: a whole number"),
        ({"colour": 1}, "benchmark.colour: no such option"),
        ({"partition": "striped"}, "no partition"),
        ({"clients": 10**6}, "too few"),
    ],
)
def test_mistaken_options_are_named(options, words):
    with pytest.raises(UserError, match=words):
        list(build("digits", **options))


def test_unknown_benchmark_and_too_many_classes():
    with pytest.raises(UserError, match="choose one of digits"):
        build("nothing")
    with pytest.raises(UserError, match="more than the 10 classes"):
        build("digits-split", tasks=6)


def test_options_can_be_read_by_a_checker():
    options = {
        name: (convert(option.default, option.type, name))
        for name, option in BENCHMARKS["digits"].options.items()
    }
    assert options == {"tasks": 5, "clients": 10, "alpha": 0.5, "task_share": 1.0, "imbalance": 0.0}
    with pytest.raises(UserError, match="from 0 to 1"):
        convert(1.5, BENCHMARKS["digits"].options["task_share"].type, "share")


def test_whole_numbers_are_accepted_for_shares():
    assert build("digits", task_share=1).num_clients == 10


def test_permuted_needs_flattened_pictures_only_once():
    pictures = Dataset(
        "p",
        np.zeros((4, 1, 2, 2), np.uint8),
        np.arange(4) % 2,
        np.zeros((2, 1, 2, 2), np.uint8),
        np.arange(2),
        2,
    )
    assert permuted(pictures, torch.from_numpy, Partition(clients=2), 1, "p")[0].train_x.shape == (4, 4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"train_y": np.arange(3)}, "labels"),
        ({"train_y": np.full(4, 2)}, "classes are 0 to 1"),
        ({"test_x": np.zeros((2, 5), np.float32)}, "shape"),
        ({"test_x": np.zeros((0, 3), np.float32), "test_y": np.zeros(0, np.int64)}, "no test samples"),
    ],
)
def test_a_dataset_that_does_not_add_up_is_refused(change, words):
    good = {
        "name": "mine",
        "train_x": np.zeros((4, 3), np.float32),
        "train_y": np.arange(4) % 2,
        "test_x": np.zeros((2, 3), np.float32),
        "test_y": np.arange(2),
        "classes": 2,
    }
    Dataset(**good)
    with pytest.raises(UserError, match=words):
        Dataset(**(good | change))
