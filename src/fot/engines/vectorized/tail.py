"""What follows a product, done together with it: a bias, an addition, a ReLU, dropout, a pooling.

With kernels at hand a tail is one of them each way, or goes with the product's. Without, it is a bias at
most, and torch's own operations do the rest, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fot.engines.vectorized import kernels
from fot.engines.vectorized.pace import NeedsAutograd, Pace, spread, total_change
from fot.engines.vectorized.products import maps, rows, unmapped


class LocalBias:
    """The clients' own biases of a linear layer whose weights are stepped during the backward pass."""

    def __init__(self, name: str, bias: Tensor, clients: int, pace: Pace) -> None:
        self.name = name
        self.pace = pace
        self.sent = bias
        self.values = spread(bias, clients).clone()
        self.waiting = False

    def refuse(self) -> None:
        """Say that this bias must be left to autograd."""
        raise NeedsAutograd(self.name)

    def step(self, d: Tensor) -> None:
        """b <- keep·b - lr·Σ d, the sum over a client's rows ``[C, n, out]``."""
        self.values.mul_(self.kept()).sub_(d.sum(1), alpha=self.pace.lr)

    def kept(self) -> float:
        """What the step keeps of the values; where this is each client's own, it is done here already."""
        keep = self.pace.keep
        if not isinstance(keep, Tensor):
            return keep
        self.values.mul_(keep[:, None])
        return 1.0

    def stack(self) -> Tensor:
        """The clients' biases now, ``[C, out]``."""
        return self.values

    def total(self) -> Tensor:
        """The sum of the clients' changes, ``[R, out]``, in float64."""
        return total_change(self.values, self.sent)


class Dropped(NamedTuple):
    """A dropout: the clients' keys, the number of the mask, and the probability."""

    keys: Tensor
    call: int
    p: float


@dataclass(frozen=True)
class Tail:
    """pool(dropout(relu(z + bias + other))), where each part may be missing; dropout follows a ReLU."""

    bias: LocalBias | None = None
    other: Tensor | None = None
    relu: bool = False
    dropped: Dropped | None = None
    pool: int = 1
    """The side of the windows of a max-pooling, which is their stride too."""

    def forward(
        self, z: Tensor, clients: int, gain: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The result, and where in the windows of a pooling the largest were.

        With a gain and a shift, ``[C, channels]``, it is the result for gain·z + shift.
        """
        if self == Tail() and gain is None:
            return z, None
        values = shift if self.bias is None else self.bias.values
        if not kernels.at_hand(z.device):
            assert values is not None and gain is None
            z.view(clients, -1, z.shape[-1]).add_(values.unsqueeze(1))
            return z, None
        from fot.engines.vectorized.kernels import tails

        keys, call, p = self.dropped or (None, 0, 0.0)
        y, places = tails.forward(
            maps(z), clients, gain=gain, bias=values, other=None if self.other is None else maps(self.other),
            relu=self.relu, keys=keys, call=call, p=p, pool=self.pool,
        )  # fmt: skip
        return unmapped(y, z.shape), places

    def of_product(
        self, x: Tensor, w: Tensor, base: Tensor | None = None, factor: Tensor | None = None
    ) -> tuple[Tensor, Tail]:
        """The result for z = factor·(base + x Wᵀ), by one kernel, and what is left of the tail.

        Of a tail with an addition all is left.
        """
        from fot.engines.vectorized.kernels import linear

        mine, rest = (self, Tail()) if self.other is None else (Tail(), self)
        keys, call, p = mine.dropped or (None, 0, 0.0)
        y = linear.forward(
            rows(x, w).contiguous(), w, base=base, factor=factor,
            bias=None if mine.bias is None else mine.bias.values, relu=mine.relu, keys=keys, call=call, p=p,
        )  # fmt: skip
        return y.view(*x.shape[:-1], w.shape[1]), rest

    def backward(
        self, d: Tensor, y: Tensor | None, places: Tensor | None, shape: torch.Size, clients: int
    ) -> Tensor:
        """The gradient at z, of that shape, of one at the result; steps the bias on the way.

        ``y`` is the result, which tells what a ReLU let through.
        """
        if self.bias is None and not self.relu:
            return d
        if not kernels.at_hand(d.device):
            assert self.bias is not None
            self.bias.step(d.reshape(clients, -1, d.shape[-1]))
            return d
        from fot.engines.vectorized.kernels import tails

        dz = tails.backward(
            maps(d), None if y is None else maps(y), places,
            (shape[2], shape[3]) if len(shape) == 4 else (1, 1), clients,
            p=self.dropped.p if self.dropped else 0.0, pool=self.pool,
            bias=None if self.bias is None else (self.bias.values, self.bias.kept(), self.bias.pace.lr),
        )  # fmt: skip
        return unmapped(dz, shape)


def fused(x: Tensor) -> bool:
    """Whether a linear layer and its tail are better done by one kernel: not in full float32."""
    if not kernels.at_hand(x.device):
        return False
    from fot.engines.vectorized.kernels.convolve import precision

    return x.dtype != torch.float32 or precision(x) == "tf32"
