"""Keyed randomness: every draw of the package is a pure function of a key.

A key names what is drawn: (seed, purpose, task, round, client, ...). Nothing else enters, so a draw
does not depend on the engine, on the number of processes, on the device or on a restart. Keys are
folded, and bits are drawn, with the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) on 64-bit
integers that wrap around; Python integers, CPU tensors and GPU tensors give the same results.

>>> key(0, "cohort", 3, 7) == fold(key(0, "cohort", 3), 7)
True
>>> permutation(key(0, "example"), 6).tolist()
[2, 5, 0, 1, 3, 4]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import overload
from zlib import crc32

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_DRAW = 0x5851F42D4C957F2D  # keeps the bits drawn from a key apart from the keys folded from it
_WORD = (1 << 64) - 1
_KEY = (1 << 63) - 1
_TWISTER = slice(24, 24 + 624 * 8)  # where a CPU generator's state holds the words, 8 bytes each


def key(seed: int, purpose: str, *path: int) -> int:
    """The key of a draw, a non-negative 63-bit integer."""
    result = fold(_mix_int(seed & _WORD) & _KEY, crc32(purpose.encode()))
    for index in path:
        result = fold(result, index)
    return result


@overload
def fold(parent: int, index: int) -> int: ...
@overload
def fold(parent: int | Tensor, index: Tensor) -> Tensor: ...
@overload
def fold(parent: Tensor, index: int | Tensor) -> Tensor: ...
def fold(parent: int | Tensor, index: int | Tensor) -> int | Tensor:
    """The key one step further down the path; integers, or int64 tensors that broadcast."""
    child = parent + _step(index)
    return (_mix(child) if isinstance(child, Tensor) else _mix_int(child & _WORD)) & _KEY


def bits(of: int | Tensor, counter: Tensor) -> Tensor:
    """Random integers in [0, 2**32), one for each counter; a key tensor broadcasts against them."""
    return (_mix((of ^ _DRAW) + (counter + 1) * _signed(_GOLDEN)) >> 32) & 0xFFFFFFFF


def uniform(of: int | Tensor, counter: Tensor) -> Tensor:
    """Random float32 numbers in [0, 1), one for each counter."""
    return (bits(of, counter) >> 8).to(torch.float32) * 2.0**-24


def permutation(of: int, n: int, device: torch.device | str | None = None) -> Tensor:
    """A random order of 0, ..., n - 1."""
    return bits(of, torch.arange(n, device=device)).argsort(stable=True)


def generator(of: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator for large Gaussian draws; these are the same on one kind of device only.

    torch seeds the Mersenne twister of its CPU from 32 bits, so that some of the many keys of a run would
    draw the same numbers. Here all 624 words of the twister's state come from the key.
    """
    made = torch.Generator(device).manual_seed(of)
    if made.device.type == "cpu":
        state = made.get_state()
        state[_TWISTER] = bits(of, torch.arange(624)).view(torch.uint8)
        made.set_state(state)
    return made


@contextmanager
def seeded(of: int, device: torch.device) -> Iterator[None]:
    """Where torch's own generators draw from a key: what a module draws by itself is repeatable too."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(of)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(of)
        yield


def _step(index: int | Tensor) -> int | Tensor:
    if isinstance(index, int):
        return _signed(((index + 1) * _GOLDEN) & _WORD)
    return (index + 1) * _signed(_GOLDEN)


def _mix_int(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_2) & _WORD
    return z ^ (z >> 31)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX_2)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # int64 shifts keep the sign; this one does not


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
