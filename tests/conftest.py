from __future__ import annotations

import hashlib
import os

import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter. It wants to be told before Triton is imported, and
# here is before any test imports anything.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_make_parametrize_id(config: object, val: object, argname: str) -> str | None:
    """Bytes do not name a test: packed ones hold the time of day, other in each process."""
    return argname if isinstance(val, bytes) else None


class SeededEntropy:
    """Bytes that look random and are the same every time."""

    def __init__(self, seed: int) -> None:
        self.seed, self.drawn = seed, 0

    def __call__(self, count: int) -> bytes:
        self.drawn += 1
        return hashlib.shake_256(f"{self.seed} {self.drawn}".encode()).digest(count)


@pytest.fixture
def seeded():
    return SeededEntropy
