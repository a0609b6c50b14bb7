"""A user's own data: a folder of classes, ``.npy`` or ``.npz`` arrays, a ``.csv`` table, or tensors."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fot.benchmarks.dataset import Dataset
from fot.benchmarks.formats import Array, broken, list_classes, read_npy, read_pictures, reading
from fot.benchmarks.partition import stratified
from fot.errors import UserError
from fot.randomness import key

LARGEST_SIDE = 4096  # pixels that pictures may be resized to
_NAMES = ("train_x", "train_y", "test_x", "test_y")


def read(
    path: str | Path, *, label: str = "label", owner: str = "", size: int = 0, test_share: float = 0.2
) -> Dataset:
    """The data set at `path`, whatever kind it is.

    Parameters
    ----------
    path
        A folder with a folder of pictures for each class (or ``train`` and ``test`` folders of such), a
        folder with ``{train,test}_{x,y}.npy``, a ``.npz`` file with arrays of these names, or a ``.csv``
        table with a header, all columns but `label`, `owner` and ``split`` being numbers.
    label
        The table's column of classes.
    owner
        The table's column that says which client holds a row, for the natural partition. Arrays say so
        in ``train_owner``.
    size
        Pictures of a folder are resized to size x size, up to 4096; 0: they must all be of one size.
    test_share
        The share of each class that is held back for testing where the data are not already split.
    """
    path = Path(path)
    if not 0 <= size <= LARGEST_SIDE:
        raise UserError(f"size = {size}: give 1 to {LARGEST_SIDE} pixels, or 0 for pictures of one size")
    if not path.exists():
        raise UserError(f"{path} does not exist: give a folder, or a .npz or .csv file")
    if path.suffix.lower() == ".csv":
        return _table(path, label, owner, test_share)
    if path.suffix.lower() == ".npz":
        return _npz(path)
    if not path.is_dir():
        raise UserError(f"{path} is neither a folder nor a .npz or .csv file: give one of these")
    if (path / "train_x.npy").exists():
        arrays = {name: read_npy(path / f"{name}.npy") for name in _NAMES}
        if (path / "train_owner.npy").exists():
            arrays["train_owner"] = read_npy(path / "train_owner.npy")
        return from_arrays(path.name, arrays)
    return read_folder(path, (size, size) if size else None, test_share=test_share)


def from_tensors(
    name: str,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor] | None = None,
    owners: Tensor | None = None,
    test_share: float = 0.2,
) -> Dataset:
    """A data set of tensors: (inputs, labels) to train on and to test on.

    Without the latter, `test_share` of each class of the former is held back.

    Examples
    --------
    >>> x, y = torch.randn(8, 3), torch.arange(8) % 2
    >>> from_tensors("mine", (x, y), test_share=0.25).test_y
    array([0, 1])
    """
    for x, y in (train,) if test is None else (train, test):
        if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
            raise UserError(
                f"{name}: inputs of shape {tuple(x.shape)} and labels of shape {tuple(y.shape)};"
                " give a row of inputs and one label a sample"
            )
    if owners is not None and owners.shape != train[1].shape:
        raise UserError(f"{name}: {owners.numel()} owners for {len(train[1])} training samples")
    if test is None:
        x, y = train
        kept, held = stratified(y.detach().cpu(), test_share, key(0, "tensors"))
        owners = None if owners is None else owners[kept.to(owners.device)]
        train, test = ((x[part.to(x.device)], y[part.to(y.device)]) for part in (kept, held))
    arrays = dict(zip(_NAMES, map(_array, (*train, *test)), strict=True))
    return from_arrays(name, arrays if owners is None else arrays | {"train_owner": _array(owners)})


def _array(values: Tensor) -> Array:
    """As numpy has it, which knows no bfloat16."""
    values = values.detach().cpu()
    array: Array = (values.float() if values.is_floating_point() else values).numpy()
    return array


def from_arrays(name: str, arrays: dict[str, Array]) -> Dataset:
    """A data set of arrays called ``train_x``, ``train_y``, ``test_x``, ``test_y`` and maybe ``train_owner``.

    Bytes of three or four axes are pictures: (N, H, W), (N, H, W, C) or (N, C, H, W). Everything else is
    used as float32, as it is.
    """
    missing = [part for part in _NAMES if part not in arrays]
    if missing:
        raise UserError(f"{name}: there is no array {missing[0]}; the four are {', '.join(_NAMES)}")
    train_y, test_y, names = _classes(name, arrays["train_y"], arrays["test_y"])
    owners = arrays.get("train_owner")
    if owners is not None:
        if owners.shape != train_y.shape:
            raise UserError(f"{name}: {owners.size} owners for {train_y.size} training samples")
        if owners.dtype.kind not in "buiU":
            raise UserError(f"{name}: owners of type {owners.dtype}; give one whole number or name a sample")
        owners = np.unique(owners, return_inverse=True)[1].astype(np.int64)
    train_x, test_x = (_inputs(name, arrays[part]) for part in ("train_x", "test_x"))
    return Dataset(name, train_x, train_y, test_x, test_y, len(names), names, owners)


def read_folder(path: Path, size: tuple[int, int] | None = None, test_share: float = 0.2) -> Dataset:
    """A folder with a folder a class, or ``train`` and ``test`` (or ``val``) folders of such."""
    test = next((path / part for part in ("test", "val") if (path / part).is_dir()), None)
    splits = [path / "train", test] if test and (path / "train").is_dir() else [path]
    return read_classes(path, [list_classes(split) for split in splits], size, test_share=test_share)


def read_classes(
    path: Path,
    splits: Sequence[dict[str, list[Path]]],
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    test_share: float = 0.2,
    name: str = "",
) -> Dataset:
    """The pictures of each class: of training and of test, or of both together, which are then split.

    A picture that cannot be opened is counted and named in the notes, and is not fatal.
    """
    names = tuple(sorted(splits[0]))
    if len(names) < 2:
        folders = "1 folder" if len(names) == 1 else f"{len(names)} folders"
        raise UserError(
            f"{path} holds {folders} with pictures: two classes or more, a folder each, are needed"
        )
    read: list[tuple[Array, Array]] = []
    notes: list[str] = []
    for classes in splits:
        unknown = sorted(set(classes) - set(names))
        if unknown:
            raise UserError(f"{path}: the class {unknown[0]!r} is tested but has no training pictures")
        paths = [picture for c in names for picture in classes.get(c, [])]
        labels = np.repeat(np.arange(len(names)), [len(classes.get(c, [])) for c in names])
        x, good, failures = read_pictures(paths, size, channels)
        missing = np.setdiff1d(labels, labels[good])
        if len(missing):
            raise UserError(f"{path}: not one picture of the class {names[missing[0]]!r} can be read")
        read.append((x, labels[good]))
        notes += failures
        channels = x.shape[1]
        size = size or (x.shape[2], x.shape[3])
    if len(read) == 1:
        x, y = read[0]
        parts = stratified(torch.from_numpy(y), test_share, key(0, name or "folder"))
        read = [(x[part.numpy()], y[part.numpy()]) for part in parts]
    if notes:
        count = (
            "1 picture cannot be read and is"
            if len(notes) == 1
            else f"{len(notes)} pictures cannot be read and are"
        )
        more = f"; and {len(notes) - 20} more" if len(notes) > 20 else ""
        notes = [f"{count} left out: {'; '.join(notes[:20])}{more}"]
    (train_x, train_y), (test_x, test_y) = read
    return Dataset(name or path.name, train_x, train_y, test_x, test_y, len(names), names, notes=tuple(notes))


def _npz(path: Path) -> Dataset:
    with reading(path), np.load(path, allow_pickle=False) as stored:
        arrays = {part: stored[part] for part in (*_NAMES, "train_owner") if part in stored.files}
    return from_arrays(path.stem, arrays)


def _inputs(name: str, x: Array) -> Array:
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        if x.ndim == 3:
            return x[:, None]
        if x.shape[3] in (1, 3):
            return x.transpose(0, 3, 1, 2)
        if x.shape[1] in (1, 3):
            return x
        raise UserError(f"{name}: pictures of shape {x.shape[1:]} have neither 1 nor 3 channels")
    if x.dtype.kind not in "buif" or x.ndim < 2:
        raise UserError(f"{name}: inputs of type {x.dtype} and shape {x.shape}; give numbers, a row a sample")
    x = np.asarray(x, np.float32)
    if not np.isfinite(x).all():
        raise UserError(f"{name}: an input is not a finite number; remove or mend that sample")
    return x


def _classes(name: str, train: Array, test: Array) -> tuple[Array, Array, tuple[str, ...]]:
    """Labels as 0, 1, ... in the sorted order of the training labels, and what they were called."""
    for y in (train, test):
        if y.ndim != 1 or y.dtype.kind not in "buiU":
            raise UserError(
                f"{name}: labels of type {y.dtype} and shape {y.shape}; give one whole number a sample"
            )
        if y.dtype.kind == "i" and y.size and y.min() < 0:
            raise UserError(
                f"{name}: a label is {y.min()}; number the classes from 0, and leave out the rest"
            )
    names, train_y = np.unique(train, return_inverse=True)
    unknown = np.setdiff1d(test, names)
    if len(unknown):
        raise UserError(f"{name}: the class {unknown[0]} is tested but has no training samples")
    return train_y.astype(np.int64), np.searchsorted(names, test).astype(np.int64), tuple(map(str, names))


def _table(path: Path, label: str, owner: str, test_share: float) -> Dataset:
    with reading(path), path.open(newline="", encoding="utf-8-sig") as file:
        try:
            table = csv.DictReader(file, strict=True)
            rows = [(table.line_num, row) for row in table]
        except csv.Error as error:
            raise broken(path, str(error)) from None
    if not rows:
        raise UserError(f"{path} has no rows under its header")
    header = list(table.fieldnames or ())
    twice = next((column for column in header if header.count(column) > 1), None)
    if twice is not None:
        raise UserError(f"{path} has two columns {twice!r}: rename or remove one")
    for column in (label, owner):
        if column and column not in header:
            raise UserError(f"{path} has no column {column!r}; it has {', '.join(header)}")
    columns = [c for c in header if c not in (label, owner, "split")]
    if not columns:
        raise UserError(f"{path} has no columns of numbers beside {label!r}")
    for line, row in rows:
        if None in row:  # where DictReader puts what the header has no name for
            raise UserError(f"{path}, line {line}: too many columns; the header has {len(header)}")
        for column in filter(None, (label, owner)):
            if not (row[column] or "").strip():
                raise UserError(f"{path}, line {line}: {column} is empty; fill it in, or remove the row")
    x = np.array([[_number(path, line, c, row[c]) for c in columns] for line, row in rows])
    y = np.array([row[label] for _, row in rows])
    if "split" in header:
        for line, row in rows:
            if row["split"] not in ("train", "test"):
                raise UserError(f"{path}, line {line}: split = {row['split']!r}; it may hold train and test")
        split = np.array([row["split"] for _, row in rows])
        train, test = (split == "train").nonzero()[0], (split == "test").nonzero()[0]
    else:
        numbers = torch.from_numpy(np.unique(y, return_inverse=True)[1])
        train, test = (part.numpy() for part in stratified(numbers, test_share, key(0, "table")))
    if not (len(train) and len(test)):
        raise UserError(
            f"{path} has {len(train)} rows to train on and {len(test)} to test on: give more rows"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = x[train].mean(0), x[train].std(0)
    wild = (~np.isfinite(mean + std)).nonzero()[0]
    if len(wild):
        raise UserError(
            f"{path}: {columns[wild[0]]} has values too large for a mean and deviation; rescale it"
        )
    x = (x - mean) / np.where(std > 0, std, 1)  # a constant column says nothing, and stays at 0
    arrays: dict[str, Any] = dict(zip(_NAMES, (x[train], y[train], x[test], y[test]), strict=True))
    if owner:
        arrays["train_owner"] = np.array([row[owner] for _, row in rows])[train]
    return from_arrays(path.stem, arrays)


def _number(path: Path, line: int, column: str, text: Any) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise UserError(f"{path}, line {line}: {column} = {text!r} is not a number") from None
    if not np.isfinite(value):
        raise UserError(f"{path}, line {line}: {column} = {text!r} is not a finite number")
    return value
