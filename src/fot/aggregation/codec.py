"""Named arrays of floats as integers modulo 2**bits, and back.

A client's entry x becomes q = round(2**f x), clipped to |q| <= limit, with f and limit public and the same
on every client of the cohort. With limit = floor((2**(bits-1) - 1) / n) the sum of n such integers never
leaves the signed range of the ring, so nothing wraps around, and the decoded sum errs by at most
n 2**-(f+1) beyond what was clipped and the rounding to the output's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fot.aggregation.interface import Kind
from fot.errors import UserError

Words = NDArray[np.uint32] | NDArray[np.uint64]
Segment = tuple[int, int]  # (bits of the ring, number of entries)


@dataclass(frozen=True)
class Coding:
    """How one array is carried: the ring's `bits`, the `fraction` bits f and the integer `limit`.

    Examples
    --------
    >>> coding = Coding.of(bits=32, clip=4.0, clients=64)
    >>> coding.fraction, coding.limit
    (23, 33554431)
    >>> q, clipped = coding.encode(torch.tensor([0.5, -9.0]))
    >>> q.tolist(), clipped
    ([4194304, -33554431], 1)
    """

    bits: int
    fraction: int
    limit: int

    @classmethod
    def of(cls, *, bits: int, clip: float, clients: int) -> Coding:
        """The finest coding of values in [-clip, clip] whose sum over `clients` fits the ring.

        To use the ring to its last bit, the ends of the range may lie one step 2**-f inside the clip.
        """
        if not 2 <= bits <= 64:
            raise UserError(f"a ring of {bits} bits: choose from 2 to 64")
        if not 1e-30 <= clip <= 1e30:  # what float32 can tell from nothing, and hold
            raise UserError(f"a clip of {clip:g} for the ring: choose from 1e-30 to 1e30")
        limit = (2 ** (bits - 1) - 1) // clients
        if limit == 0:
            raise UserError(f"{clients} clients do not fit a ring of {bits} bits: use a wider ring")
        fraction = math.floor(math.log2((limit + 1) / clip))
        return cls(bits=bits, fraction=fraction, limit=min(limit, math.floor(math.ldexp(clip, fraction))))

    @property
    def step(self) -> float:
        """The distance of two neighbouring values, 2**-f."""
        return math.ldexp(1.0, -self.fraction)

    def encode(self, values: Tensor) -> tuple[Tensor, int]:
        """The integers of `values` (int64), and how many entries were clipped."""
        scaled = values.to(torch.float64, copy=True).mul_(2.0**self.fraction).round_()
        limit = float(self.limit)
        if int(limit) > self.limit:  # past 2**53 a float may round up, and out of the ring
            limit = math.nextafter(limit, 0.0)
        largest = max(abs(end.item()) for end in scaled.aminmax()) if scaled.numel() else 0.0
        if largest <= limit:  # the usual case, told in one pass; a NaN fails it
            return scaled.to(torch.int64), 0
        if not bool(torch.isfinite(values).all()):
            raise UserError("an array holds values that are not finite: the ring cannot carry them")
        clipped = int((scaled.abs() > limit).sum())
        return scaled.clamp_(-limit, limit).to(torch.int64), clipped

    def decode(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        """The real sum of an integer sum."""
        value = total.to(torch.float64).mul_(self.step)
        return value.round_().to(dtype) if not dtype.is_floating_point else value.to(dtype)


@dataclass(frozen=True)
class Codec:
    """The public clips and ring widths of every sum of a run.

    Updates travel in `update_bits`, statistics in `statistics_bits`; a scalar (a count, a loss, an energy)
    always counts as a statistic. `clips` overrides the clip of arrays by a pattern on their names.

    Examples
    --------
    >>> Codec().coding("update", "conv.weight", (64, 3, 3, 3), clients=25).bits
    32
    >>> Codec().coding("update", "samples", (), clients=25).bits
    64
    """

    update_bits: int = 32
    update_clip: float = 4.0
    statistics_bits: int = 64
    statistics_clip: float = 2.0**32
    clips: Mapping[str, float] | None = None
    used: set[str] = field(default_factory=set, compare=False, repr=False)
    """The patterns of `clips` that some array had."""

    def __post_init__(self) -> None:
        clips = (self.update_clip, self.statistics_clip, *(self.clips or {}).values())
        for bits in (self.update_bits, self.statistics_bits):
            for clip in clips:
                Coding.of(bits=bits, clip=clip, clients=1)  # says what is wrong

    def coding(self, kind: Kind, name: str, shape: tuple[int, ...], clients: int) -> Coding:
        """The coding of one array in a sum over `clients`."""
        update = kind == "update" and len(shape) > 0
        clip = self.update_clip if update else self.statistics_clip
        for pattern, own in (self.clips or {}).items():
            if fnmatchcase(name, pattern):
                self.used.add(pattern)
                clip = own
                break
        bits = self.update_bits if update else self.statistics_bits
        return Coding.of(bits=bits, clip=clip, clients=clients)

    def codings(self, kind: Kind, shapes: Mapping[str, tuple[int, ...]], clients: int) -> dict[str, Coding]:
        """The codings of all arrays of a sum, by name."""
        return {name: self.coding(kind, name, shape, clients) for name, shape in shapes.items()}

    def notes(self) -> list[str]:
        """Patterns of `clips` that no array of any sum had."""
        unused = sorted((self.clips or {}).keys() - self.used)
        return [f"aggregation.clips: no array is called {name!r}; that clip was not used" for name in unused]


def to_words(integers: Tensor, bits: int) -> Words:
    """Signed integers as words of the ring, flat: uint32 up to 32 bits, uint64 above."""
    flat = integers.reshape(-1).cpu().numpy()
    return flat.astype(np.uint32) if bits <= 32 else flat.view(np.uint64)


def from_words(words: Words, bits: int) -> NDArray[np.int64]:
    """The signed integers of words modulo 2**bits."""
    width = words.dtype.itemsize * 8
    signed = words.view(np.int32 if width == 32 else np.int64)
    shift = width - bits
    return (np.right_shift(np.left_shift(signed, shift), shift) if shift else signed).astype(np.int64)


def packed_size(segment: Segment) -> int:
    """Bytes of a packed segment."""
    bits, length = segment
    return (bits * length + 7) // 8


def pack(words: Words, bits: int) -> bytes:
    """The low `bits` of every word, most significant first and with no gaps; whole words little-endian.

    Examples
    --------
    >>> pack(np.array([1, 2, 3], np.uint32), 4).hex()
    '1230'
    """
    width = words.dtype.itemsize * 8
    if bits == width:
        return words.astype(f"<u{width // 8}", copy=False).tobytes()
    raw = words.astype(f">u{width // 8}").view(np.uint8).reshape(-1, width // 8)
    return np.packbits(np.unpackbits(raw, axis=1)[:, width - bits :]).tobytes()


def unpack(data: bytes | memoryview, segment: Segment) -> Words:
    """The words that `pack` wrote."""
    bits, length = segment
    width = 32 if bits <= 32 else 64
    if bits == width:
        plain = np.frombuffer(data, f"<u{width // 8}")
        return plain.astype(np.uint32, copy=False) if width == 32 else plain.astype(np.uint64, copy=False)
    raw = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * length).reshape(length, bits)
    whole = np.zeros((length, width), np.uint8)
    whole[:, width - bits :] = raw
    packed = np.packbits(whole, axis=1).view(f">u{width // 8}").reshape(-1)
    return packed.astype(np.uint32) if width == 32 else packed.astype(np.uint64)
