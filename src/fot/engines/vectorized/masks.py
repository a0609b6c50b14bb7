"""The masks of ``keyed_dropout`` for a whole cohort, bit for bit, at a cost that a round can bear.

A unit is kept where the top 24 bits of SplitMix64(key, position) reach p·2**24. Two shortcuts: the last
xor of the finaliser leaves these bits alone, and a comparison needs no conversion to floats. On a CPU
the integers are worked through in pieces that stay in its cache; on a GPU a kernel draws and drops, in one
with the product before where there is one (``tail``), and draws again on the way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fot.dropout import keyed_dropout
from fot.engines.vectorized import kernels
from fot.engines.vectorized.pending import Pending, settled
from fot.engines.vectorized.products import maps, owned, unmapped
from fot.engines.vectorized.tail import Dropped
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

    def _dropout(
        self,
        func: Callable[..., Any],
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return x
        if func is not functional.dropout or inplace or not kernels.at_hand(x.device):
            return super()._dropout(func, settled(x), p, training, inplace)
        assert isinstance(self.keys, Tensor)
        dropped = Dropped(self.keys, self.calls, p)
        self.calls += 1
        if isinstance(x, Pending) and x.takes_dropout():
            return x.joined(dropped=dropped)
        alone: Tensor = _Dropped.apply(settled(x), dropped)  # type: ignore[no-untyped-call]
        return alone

    def mask(self, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """The next mask: True where a unit is kept."""
        if device.type != "cpu":
            return super().mask(shape, p, device)
        assert isinstance(self.keys, Tensor)
        mask = _by_pieces(self.keys, self.calls, shape.numel() // len(self.keys), _threshold(p)).view(shape)
        self.calls += 1
        return mask


class _Dropped(torch.autograd.Function):
    """A dropout by kernel; what is linear is its own way back, with the same masks drawn again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Dropped) -> Tensor:
        ctx.dropped = dropped
        return owned(_dropped(x, dropped))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return _dropped(d, ctx.dropped), None


def _dropped(x: Tensor, dropped: Dropped) -> Tensor:
    from fot.engines.vectorized.kernels import tails

    keys, call, p = dropped
    y, _ = tails.forward(maps(x), len(keys), keys=keys, call=call, p=p)
    return unmapped(y, x.shape)


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
