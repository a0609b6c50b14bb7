from __future__ import annotations

import hashlib

import pytest


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
