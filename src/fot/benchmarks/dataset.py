"""A labelled data set as it was read, before it becomes a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fot.errors import UserError


@dataclass(frozen=True)
class Dataset:
    """Training and test samples as they were read: pictures as uint8 (N, C, H, W), tables as float32 (N, d).

    Labels are 0, ..., `classes` - 1. `owners` numbers who holds each training sample, where the data say
    so. `notes` are lines the reader wants seen, such as pictures that it could not open.
    """

    name: str
    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    classes: int
    class_names: tuple[str, ...] = ()
    owners: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for split, x, y in (("training", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if len(x) != len(y):
                raise UserError(f"{self.name}: {len(x)} {split} samples but {len(y)} labels")
            if len(y) == 0:
                raise UserError(f"{self.name}: there are no {split} samples")
            if y.min() < 0 or y.max() >= self.classes:
                raise UserError(
                    f"{self.name}: {split} labels from {y.min()} to {y.max()},"
                    f" but classes are 0 to {self.classes - 1}"
                )
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise UserError(
                f"{self.name}: training samples of shape {self.train_x.shape[1:]},"
                f" test samples of {self.test_x.shape[1:]}"
            )

    def only(self, classes: Sequence[int]) -> Dataset:
        """The samples of these classes, relabelled 0, 1, ... in the order given."""
        new = np.full(self.classes, -1)
        new[list(classes)] = np.arange(len(classes))
        train, test = new[self.train_y] >= 0, new[self.test_y] >= 0
        return Dataset(
            self.name,
            self.train_x[train],
            new[self.train_y[train]],
            self.test_x[test],
            new[self.test_y[test]],
            len(classes),
            tuple(self.class_names[c] for c in classes) if self.class_names else (),
            None if self.owners is None else self.owners[train],
        )
