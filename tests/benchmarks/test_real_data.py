"""The publishers' own data, where FOT_DATA names a folder that has them; skipped, and said so, where not.

Means and deviations are the ones that the benchmarks normalise by, so a wrong channel, padding or scale
shows here.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from fot.benchmarks import build
from fot.benchmarks.datasets import KNOWN, find, load

pytestmark = pytest.mark.skipif(
    not os.environ.get("FOT_DATA"), reason="FOT_DATA names no folder of real data"
)


def need(*names: str) -> None:
    for name in names:
        if find(name) is None:
            pytest.skip(f"{name} is not in FOT_DATA")


@pytest.mark.parametrize(
    "name, shape, classes, smallest, largest, mean",
    [
        ("mnist", (1, 28, 28), 10, 5421, 6742, [0.1307]),
        ("fashion-mnist", (1, 28, 28), 10, 6000, 6000, [0.2860]),
        ("cifar10", (3, 32, 32), 10, 5000, 5000, [0.4914, 0.4822, 0.4465]),
        ("cifar100", (3, 32, 32), 100, 500, 500, [0.5071, 0.4866, 0.4409]),
        ("svhn", (3, 32, 32), 10, 4659, 13861, [0.4377, 0.4438, 0.4728]),
        ("notmnist", (1, 28, 28), 10, 1685, 1686, [0.4254]),
        ("tinyimagenet100", (3, 64, 64), 100, 500, 500, None),
        ("miniimagenet", (3, 84, 84), 100, 500, 500, [0.4731, 0.4491, 0.4038]),
    ],
)
def test_counts_shapes_balance_and_means(name, shape, classes, smallest, largest, mean):
    need(name)
    data = load(name)
    assert not data.notes and (len(data.train_y), len(data.test_y)) == KNOWN[name].counts
    assert data.train_x.shape[1:] == shape and data.train_x.dtype == np.uint8 and data.classes == classes
    balance = np.bincount(data.train_y, minlength=classes)
    assert (balance.min(), balance.max()) == (smallest, largest)
    if mean is not None:
        sums = sum(part.sum((0, 2, 3), dtype=np.int64) for part in np.array_split(data.train_x, 20))
        measured = sums / (data.train_x.size / shape[0]) / 255
        assert np.allclose(measured, mean, atol=0.003)  # SVHN and CIFAR-10 may be re-encoded copies


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_pmnist(partition):
    need("mnist")
    first = build("pmnist", partition=partition)[0]
    assert first.train_x.shape == (60000, 784) and {len(held) for held in first.clients} == {480}
    assert abs(first.train_x.mean()) < 1e-3 and abs(first.train_x.std() - 1) < 1e-3


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_cifar100(partition):
    need("cifar100")
    stream = build("cifar100", partition=partition)
    for task in stream:
        assert task.train_x.shape == (5000, 3, 32, 32) and task.test_x.shape[0] == 1000
        assert len(task.clients) == 50 and {len(held) for held in task.clients} == {100}
        classes = [task.train_y[held].unique().numel() for held in task.clients]
        assert max(classes) <= 2 if partition == "shards" else min(classes) >= 8
    assert stream[1].name.startswith("classes bowl, boy, bridge") or stream[1].name.startswith(
        "classes 10, 11"
    )


def test_five_datasets():
    need("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist")
    for task, each in zip(build("five-datasets"), [333, 400, 488, 400, 112], strict=True):
        assert {len(held) for held in task.clients} == {each} and len(task.clients) == 150, task.name
        assert task.train_x.shape[1:] == (3, 32, 32)
        # MNIST's and Fashion-MNIST's figures are of the padded pictures, notMNIST's of those before padding.
        x = task.train_x[..., 2:-2, 2:-2] if task.name == "notmnist" else task.train_x
        assert x.mean((0, 2, 3)).abs().max() < 0.03, task.name
        assert (x[::7].std((0, 2, 3)) - 1).abs().max() < 0.05, task.name


@pytest.mark.parametrize(
    "name, data", [("miniimagenet", "miniimagenet"), ("miniimagenet-standin", "tinyimagenet100")]
)
def test_miniimagenet(name, data):
    need(data)
    stream = build(name)
    task = stream[19]
    assert len(stream) == 20 and task.train_x.shape == (2500, 3, 84, 84) and task.classes == 5
    assert {len(held) for held in task.clients} == {50} and task.train_y.bincount().tolist() == [500] * 5
    assert task.augment is not None
    augmented = task.augment(task.train_x[:64], torch.arange(64))
    assert augmented.shape == (64, 3, 84, 84) and not torch.equal(augmented, task.train_x[:64])
