"""The masks of ``keyed_dropout`` for a whole cohort, bit for bit, at a cost that a round can bear.

A unit is kept where the top 24 bits of SplitMix64(key, position) reach p·2**24. Two shortcuts: the last
xor of the finaliser leaves these bits alone, and a comparison needs no conversion to floats. On a CPU
the integers are worked through in pieces that stay in its cache; on a GPU one compiled kernel does all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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

    def _dropout(
        self,
        func: Callable[..., Any],
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        maps = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        self.layout = torch.channels_last if maps else torch.contiguous_format
        if x.device.type == "cpu" or func is not functional.dropout or inplace or not training or p == 0:
            return super()._dropout(func, x, p, training, inplace)
        mask = self.mask(x.shape, p, x.device)
        kept: Tensor = _Kept.apply(x, mask, 1 / (1 - p) if p < 1 else 0.0)  # type: ignore[no-untyped-call]
        return kept

    def mask(self, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """The next mask: True where a unit is kept."""
        assert isinstance(self.keys, Tensor)
        make = _by_pieces if device.type == "cpu" else _at_once
        mask = make(self.keys, self.calls, shape.numel() // len(self.keys), _threshold(p)).view(shape)
        self.calls += 1
        # Laid out as the maps are: turning bytes around is cheaper than reading across them as floats.
        return mask.contiguous(memory_format=self.layout) if len(shape) == 4 else mask


class _Kept(torch.autograd.Function):
    """x·mask·scale, forward and backward one kernel each, which reads a byte for each unit of the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, mask, scale)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(d, mask, ctx.scale), None, None


def _threshold(p: float) -> int:
    """What 64 unsigned bits must reach to be kept, as the signed number that compares alike."""
    # uniform >= p compares float32 numbers k·2**-24: k, the top 24 bits, must reach this.
    least = math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24)
    return _signed(min(least << 40, (1 << 64) - 1)) ^ _LOWEST


def _by_pieces(keys: Tensor, call: int, units: int, least: int) -> Tensor:
    keys = fold(keys, call)
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


def _whole(keys: Tensor, call: Tensor, counter: Tensor, least: Tensor) -> Tensor:
    # The counter is given: of a range made here the compiler takes products that do not wrap around.
    z = (fold(keys, call) ^ _DRAW) + (counter + 1) * _signed(_GOLDEN)
    for by, factor in ((30, _MIX_1), (27, _MIX_2)):
        z = (z ^ ((z >> by) & ((1 << (64 - by)) - 1))) * _signed(factor)
    return (z ^ _LOWEST) >= least


def _at_once(keys: Tensor, call: int, units: int, least: int) -> Tensor:
    counter = torch.arange(units, device=keys.device)
    return _kernel(keys.device)(keys, _number(call, keys.device), counter, _number(least, keys.device))


@cache
def _number(value: int, device: torch.device) -> Tensor:
    """A number on the device, for a kernel that is compiled for any: made once, in no graph."""
    return torch.full((), value, device=device)


@cache
def _kernel(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """One kernel for the whole mask where a compiler is at hand and right; torch's operations where not."""
    reason = "there is no triton"
    if find_spec("triton"):
        compiled = torch.compile(_whole, dynamic=True)
        keys, counter = torch.arange(3, device=device)[:, None] << 55, torch.arange(99, device=device)
        given = (keys, torch.full((), 5, device=device), counter, torch.full((), 1 << 61, device=device))
        try:
            if torch.equal(compiled(*given), _whole(*given)):
                return compiled
            reason = "the compiled kernel is wrong"
        except Exception as error:  # a compiler can fail in many ways, and none of them matters here
            reason = str(error).partition("\n")[0]
    warnings.warn(f"dropout's masks are made in many launches: {reason}", stacklevel=2)
    return _whole
