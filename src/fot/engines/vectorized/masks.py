"""The masks of ``keyed_dropout`` for a whole cohort, bit for bit, at a cost that a round can bear.

A unit is kept where the top 24 bits of SplitMix64(key, position) reach p·2**24. Two shortcuts: the last
xor of the finaliser leaves these bits alone, and a comparison needs no conversion to floats. On a CPU
the integers are worked through in pieces that stay in its cache; on a GPU one compiled kernel does all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fot.dropout import keyed_dropout
from fot.randomness import _DRAW, _GOLDEN, _MIX_1, _MIX_2, _signed, fold

_PIECE = 1 << 15
_LOWEST = -(1 << 63)


class cohort_dropout(keyed_dropout):
    """``keyed_dropout`` with one key a client.

    Examples
    --------
    >>> x, keys = torch.ones(4, 3), torch.tensor([5, 7])
    >>> with keyed_dropout(keys):
    ...     one = torch.nn.functional.dropout(x, 0.4)
    >>> with cohort_dropout(keys):
    ...     other = torch.nn.functional.dropout(x, 0.4)
    >>> torch.equal(one, other)
    True
    """

    layout = torch.contiguous_format

    def _dropout(self, func: Callable[..., Any], x: Tensor, *options: Any, **more: Any) -> Tensor:
        maps = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        self.layout = torch.channels_last if maps else torch.contiguous_format
        return super()._dropout(func, x, *options, **more)

    def mask(self, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """The next mask: True where a unit is kept."""
        keys = fold(self.keys, self.calls)
        assert isinstance(keys, Tensor)
        self.calls += 1
        make = _by_pieces if device.type == "cpu" else _at_once
        mask = make(keys, shape.numel() // len(keys), _threshold(p)).view(shape)
        # Laid out as the maps are: turning bytes around is cheaper than reading across them as floats.
        return mask.contiguous(memory_format=self.layout) if len(shape) == 4 else mask


def _threshold(p: float) -> int:
    """What 64 unsigned bits must reach to be kept, as the signed number that compares alike."""
    # uniform >= p compares float32 numbers k·2**-24: k, the top 24 bits, must reach this.
    least = math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24)
    return _signed(min(least << 40, (1 << 64) - 1)) ^ _LOWEST


def _by_pieces(keys: Tensor, units: int, least: int) -> Tensor:
    kept = torch.empty(len(keys), units, dtype=torch.bool)
    starts = ((keys.flatten() ^ _DRAW) + _signed(_GOLDEN)).tolist()
    walk = torch.arange(min(units, _PIECE)) * _signed(_GOLDEN)
    z, shifted = torch.empty_like(walk), torch.empty_like(walk)
    for row, start in zip(kept, starts, strict=True):
        for begin in range(0, units, _PIECE):
            out = row[begin : begin + _PIECE]
            n = len(out)
            offset = (start + begin * _GOLDEN) & ((1 << 64) - 1)
            _reaches(torch.add(walk[:n], _signed(offset), out=z[:n]), shifted[:n], least, out)
    return kept


def _reaches(z: Tensor, shifted: Tensor, least: int, out: Tensor) -> None:
    """Whether the top bits of mix(z) reach ``least``, in place: see ``fot.randomness``."""
    for by, factor in ((30, _MIX_1), (27, _MIX_2)):
        torch.bitwise_right_shift(z, by, out=shifted)
        shifted.bitwise_and_((1 << (64 - by)) - 1)
        z.bitwise_xor_(shifted).mul_(_signed(factor))
    torch.ge(z.bitwise_xor_(_LOWEST), least, out=out)  # as unsigned numbers


def _whole(keys: Tensor, counter: Tensor, least: Tensor) -> Tensor:
    z = (keys ^ _DRAW) + (counter + 1) * _signed(_GOLDEN)
    for by, factor in ((30, _MIX_1), (27, _MIX_2)):
        z = (z ^ ((z >> by) & ((1 << (64 - by)) - 1))) * _signed(factor)
    return (z ^ _LOWEST) >= least


def _at_once(keys: Tensor, units: int, least: int) -> Tensor:
    counter = torch.arange(units, device=keys.device)
    # The threshold is filled in on the device: a copy from the host could not be recorded in a graph.
    return _kernel(keys.device)(keys, counter, torch.full((), least, device=keys.device))


@cache
def _kernel(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """One kernel for the whole mask where a compiler is at hand and right; torch's operations where not."""
    if find_spec("triton"):
        compiled = torch.compile(_whole, dynamic=True)
        keys, counter = torch.arange(3, device=device)[:, None] << 55, torch.arange(99, device=device)
        with suppress(Exception):  # a compiler can fail in many ways, and none of them matters here
            least = torch.full((), 1 << 61, device=device)
            if torch.equal(compiled(keys, counter, least), _whole(keys, counter, least)):
                return compiled
    return _whole
