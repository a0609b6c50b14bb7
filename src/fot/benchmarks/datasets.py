"""The data sets the package knows by name: where their files may lie, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from fot.benchmarks.dataset import Dataset
from fot.benchmarks.formats import list_classes, read_cifar_binary, read_idx, read_mat, read_npy, reading
from fot.benchmarks.own import from_arrays, read_classes
from fot.benchmarks.partition import stratified
from fot.benchmarks.pickled import read_pickled_cifar
from fot.benchmarks.sources import SOURCES
from fot.errors import UserError
from fot.randomness import key


@dataclass(frozen=True)
class Known:
    """A data set known by name.

    `markers` are the files that show it is there, relative to the data folder, each with the reader of
    its layout; the reader is given the marker's folder, or what comes before the marker's first ``*``.
    `layout` tells a person what to put where. `shape` is that of one picture, `counts` are the
    publisher's numbers of training and test pictures.
    """

    about: str
    layout: str
    shape: tuple[int, int, int]
    counts: tuple[int, int]
    markers: dict[str, Callable[[Path], Dataset]]
    elsewhere: tuple[Path, ...] = ()


def data_root(data_dir: str | Path | None = None) -> Path:
    """The folder of data sets: `data_dir`, else the folder FOT_DATA names, else the user's cache."""
    chosen = data_dir or os.environ.get("FOT_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fot"


def find(name: str, data_dir: str | Path | None = None) -> tuple[Path, Callable[[Path], Dataset]] | None:
    """The folder where a data set lies and the reader of its layout, or None where it is not."""
    if name not in KNOWN:
        raise UserError(f"there is no data set {name!r}; choose one of {', '.join(KNOWN)}")
    known = KNOWN[name]
    for place in (*(data_root(data_dir) / folder for folder in ("", name)), *known.elsewhere):
        for marker, reader in known.markers.items():
            if any(place.glob(marker)):
                before, star, _ = marker.partition("*")
                return place / before if star else (place / marker).parent, reader
    return None


def located(name: str, data_dir: str | Path | None = None) -> tuple[Path, Callable[[Path], Dataset]]:
    """What `find` finds; a missing set is an error that says how to get it."""
    found = find(name, data_dir)
    if found is None:
        root = data_root(data_dir)
        remedy = f"run `fot data fetch {name} --data-dir {root}`, or " if name in SOURCES else ""
        raise UserError(f"{name} is not in {root}: {remedy}put {KNOWN[name].layout} into {root / name}")
    return found


def load(name: str, data_dir: str | Path | None = None) -> Dataset:
    """A data set by name, read from its publisher's files.

    Fewer or more samples than the publisher's are accepted and said in the notes.
    """
    folder, reader = located(name, data_dir)
    try:
        data = replace(reader(folder), name=name)  # until here its name is its folder, for the errors' sake
        for x in (data.train_x, data.test_x):
            if x.dtype != np.uint8 or x.shape[1:] != KNOWN[name].shape:
                wanted = " x ".join(map(str, KNOWN[name].shape))
                raise UserError(
                    f"{folder} holds pictures of type {x.dtype} and shape {x.shape[1:]}, where those of"
                    f" {name} are bytes, {wanted}: put the files of {name} there"
                )
    except UserError as error:
        again = (
            f", or run `fot data fetch {name} --data-dir {data_root(data_dir)}`" if name in SOURCES else ""
        )
        raise UserError(f"{error}{again}") from None
    counts = (len(data.train_y), len(data.test_y))
    if counts != KNOWN[name].counts:
        publisher = KNOWN[name].counts
        note = f"{counts[0]} + {counts[1]} samples, where the publisher's are {publisher[0]} + {publisher[1]}"
        data = replace(data, notes=(*data.notes, note))
    return data


@lru_cache(maxsize=1)
def digits() -> Dataset:
    """The 1,797 handwritten digits that scikit-learn carries: 64 values of 0 to 16; needs no download.

    A fifth of every class is the test part, the same one always.

    Examples
    --------
    >>> data = digits()
    >>> data.train_x.shape, data.test_x.shape
    ((1438, 64), (359, 64))
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits come with scikit-learn: pip install scikit-learn") from None
    x, y = load_digits(return_X_y=True)
    x, y = x.astype(np.uint8), y.astype(np.int64)
    train, test = (part.numpy() for part in stratified(torch.from_numpy(y), 0.2, key(0, "digits")))
    return Dataset("digits", x[train], y[train], x[test], y[test], 10)


def _idx_set(folder: Path) -> Dataset:
    def one(stem: str) -> np.ndarray:
        zipped = folder / f"{stem}.gz"
        return read_idx(zipped if zipped.exists() else folder / stem)

    arrays = []
    for split in ("train", "t10k"):
        x, y = one(f"{split}-images-idx3-ubyte"), one(f"{split}-labels-idx1-ubyte")
        if x.ndim != 3 or y.ndim != 1:
            raise UserError(f"{folder}: {split} pictures of shape {x.shape} and labels of shape {y.shape}")
        arrays += [x[:, None], y.astype(np.int64)]
    train_x, train_y, test_x, test_y = arrays
    return Dataset(str(folder), train_x, train_y, test_x, test_y, 10)


def _cifar10_binary(folder: Path) -> Dataset:
    train = [read_cifar_binary(folder / f"data_batch_{k}.bin", 1) for k in range(1, 6)]
    return _cifar(folder, train, read_cifar_binary(folder / "test_batch.bin", 1), 10)


def _cifar10_python(folder: Path) -> Dataset:
    train = [read_pickled_cifar(folder / f"data_batch_{k}", "labels") for k in range(1, 6)]
    return _cifar(folder, train, read_pickled_cifar(folder / "test_batch", "labels"), 10)


def _cifar100_binary(folder: Path) -> Dataset:
    data = _cifar(
        folder, [read_cifar_binary(folder / "train.bin", 2)], read_cifar_binary(folder / "test.bin", 2), 100
    )
    names = folder / "fine_label_names.txt"
    if names.exists():
        with reading(names):
            lines = tuple(names.read_text(encoding="utf-8").split())
        if len(lines) == 100:
            return replace(data, class_names=lines)
    return data


def _cifar100_python(folder: Path) -> Dataset:
    train, test = (read_pickled_cifar(folder / split, "fine_labels") for split in ("train", "test"))
    return _cifar(folder, [train], test, 100)


def _cifar(
    folder: Path,
    train: list[tuple[np.ndarray, np.ndarray]],
    test: tuple[np.ndarray, np.ndarray],
    classes: int,
) -> Dataset:
    x, y = (parts[0] if len(parts) == 1 else np.concatenate(parts) for parts in zip(*train, strict=True))
    return Dataset(str(folder), x, y, test[0], test[1], classes)


def _svhn(folder: Path) -> Dataset:
    arrays = []
    for split in ("train", "test"):
        path = folder / f"{split}_32x32.mat"
        with reading(path):
            found = read_mat(path)
            if not {"X", "y"} <= found.keys():
                raise ValueError("it holds no arrays X and y")
            x, y = found["X"], found["y"].reshape(-1).astype(np.int64)
            if x.ndim != 4 or x.shape[:3] != (32, 32, 3) or x.dtype != np.uint8:
                raise ValueError(f"X is {x.dtype} of shape {x.shape}, not bytes of 32 x 32 x 3 x N")
        y[y == 10] = 0  # SVHN writes the digit 0 as 10
        arrays += [x.transpose(3, 2, 0, 1), y]
    train_x, train_y, test_x, test_y = arrays
    return Dataset(str(folder), train_x, train_y, test_x, test_y, 10)


def _notmnist(folder: Path) -> Dataset:
    return read_classes(folder, [list_classes(folder)], (28, 28), 1, test_share=0.1, name="notmnist")


def _arrays(folder: Path) -> Dataset:
    parts = ("train_x", "train_y", "test_x", "test_y")
    return from_arrays(folder.name, {part: read_npy(folder / f"{part}.npy") for part in parts})


def _miniimagenet(folder: Path) -> Dataset:
    """A folder a class, 600 pictures each; also under train, val and test as for few-shot learning.

    There a class is in one of the three alone, so all are pooled and each is split 500 to 100.
    """
    parts = [list_classes(folder / part) for part in ("train", "val", "test") if (folder / part).is_dir()]
    if len(parts) >= 2 and set(parts[0]) & set(parts[-1]):
        return read_classes(folder, [parts[0], parts[-1]], (84, 84), 3)
    pooled = {name: paths for part in parts or [list_classes(folder)] for name, paths in part.items()}
    return read_classes(folder, [pooled], (84, 84), 3, test_share=1 / 6, name="miniimagenet")


def _tiny_imagenet(folder: Path) -> Dataset:
    """The first 100 classes of Tiny-ImageNet-200 as it is published; its validation part is the test."""
    train = dict(list(list_classes(folder / "train").items())[:100])
    test: dict[str, list[Path]] = {}
    annotations = folder / "val" / "val_annotations.txt"
    with reading(annotations):
        for line in annotations.read_text(encoding="utf-8").splitlines():
            picture, name = line.split("\t")[:2]
            if name in train:
                test.setdefault(name, []).append(folder / "val" / "images" / Path(picture).name)
    return read_classes(folder, [train, test], (64, 64), 3)


_IDX = {f"{folder}train-images-idx3-ubyte{end}": _idx_set for folder in ("", "raw/") for end in (".gz", "")}
KNOWN: dict[str, Known] = {
    "mnist": Known(
        "handwritten digits, 28 x 28 grey",
        "the four IDX files, gzipped or not,",
        (1, 28, 28),
        (60000, 10000),
        {f"{folder}/{marker}": reader for folder in ("mnist", "MNIST") for marker, reader in _IDX.items()},
    ),
    "fashion-mnist": Known(
        "pieces of clothing, 28 x 28 grey",
        "the four IDX files, gzipped or not,",
        (1, 28, 28),
        (60000, 10000),
        {
            f"{folder}/{marker}": r
            for folder in ("fashion-mnist", "FashionMNIST")
            for marker, r in _IDX.items()
        },
        (Path("/usr/share/datasets"),),  # Debian's package dataset-fashion-mnist
    ),
    "cifar10": Known(
        "photographs of 10 classes, 32 x 32",
        "cifar-10-batches-bin or cifar-10-batches-py",
        (3, 32, 32),
        (50000, 10000),
        {
            "cifar-10-batches-bin/data_batch_1.bin": _cifar10_binary,
            "cifar-10-batches-py/data_batch_1": _cifar10_python,
        },
    ),
    "cifar100": Known(
        "photographs of 100 classes, 32 x 32",
        "cifar-100-binary or cifar-100-python",
        (3, 32, 32),
        (50000, 10000),
        {"cifar-100-binary/train.bin": _cifar100_binary, "cifar-100-python/train": _cifar100_python},
    ),
    "svhn": Known(
        "house numbers, 32 x 32",
        "train_32x32.mat and test_32x32.mat",
        (3, 32, 32),
        (73257, 26032),
        {"train_32x32.mat": _svhn},
    ),
    "notmnist": Known(
        "letters A to J in many fonts, 28 x 28 grey; the small set, split 90 to 10",
        "the folder notMNIST_small",
        (1, 28, 28),
        (16854, 1870),
        {"notMNIST_small/A": _notmnist},
    ),
    "miniimagenet": Known(
        "photographs of 100 classes, 84 x 84; ImageNet's licence lets nobody offer it for download",
        "a folder a class, or {train,test}_{x,y}.npy,",
        (3, 84, 84),
        (50000, 10000),
        {"miniimagenet/train_x.npy": _arrays, "miniimagenet/*/*": _miniimagenet},
    ),
    "tinyimagenet100": Known(
        "photographs of the first 100 classes of Tiny-ImageNet-200, 64 x 64",
        "tiny-imagenet-200, or {train,test}_{x,y}.npy,",
        (3, 64, 64),
        (50000, 5000),
        {"tinyimagenet100/train_x.npy": _arrays, "tiny-imagenet-200/train": _tiny_imagenet},
    ),
}
