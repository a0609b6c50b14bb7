"""What the tests of single kernels draw, compare, and expect."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fot.dropout import keyed_dropout

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
KEYS = (5, 1 << 62, 2**63 - 1)
"""Keys of three clients' masks, for which sums of keys and calls overflow too."""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draw).to(DEVICE)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def last(maps: Tensor) -> Tensor:
    """Channels last, as the kernels read maps; of filters, inputs last."""
    return maps.detach().movedim(-3, -1).contiguous()


def first(maps: Tensor) -> Tensor:
    return maps.movedim(-1, -3)


def tail_of_torch(
    z: Tensor, clients: int, bias: Tensor | None, other: Tensor | None, relu: bool, p: float, call: int,
    pool: int,
) -> Tensor:  # fmt: skip
    """pool(dropout(relu(z + bias + other))), as a network on one client after another would have it."""
    if bias is not None:
        z = z + bias.repeat_interleave(len(z) // clients, 0)[:, :, None, None]
    if other is not None:
        z = z + other
    if relu:
        z = F.relu(z)
    if p:
        parts = []
        for part, key in zip(z.chunk(clients), KEYS, strict=False):
            alone = keyed_dropout(key)
            alone.calls = call
            with alone:
                parts.append(F.dropout(part, p))
        z = torch.cat(parts)
    return F.max_pool2d(z, pool) if pool > 1 else z
