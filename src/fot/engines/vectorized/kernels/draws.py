"""Keys and bits of ``fot.randomness``, bit for bit, by one launch in place of fourteen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fot.randomness import _DRAW, _GOLDEN, _KEY, _MIX_1, _MIX_2

GOLDEN, MIX_1, MIX_2 = tl.constexpr(_GOLDEN), tl.constexpr(_MIX_1), tl.constexpr(_MIX_2)
DRAW, KEY = tl.constexpr(_DRAW), tl.constexpr(_KEY)
STRIDES = ("key_row", "key_column", "index_row", "index_column")
"""Of so small a kernel one form is enough."""
MOST = 2048
"""Numbers that are put in order by comparing each with each."""


def fold(parent: Tensor, index: Tensor | int) -> Tensor:
    """``fot.randomness.fold`` of int64 tensors of at most two axes, which broadcast."""
    return _drawn(parent, index if isinstance(index, Tensor) else parent.new_full((), index), False)


def bits(of: Tensor, counter: Tensor) -> Tensor:
    """``fot.randomness.bits``, likewise."""
    return _drawn(of, counter, True)


def order(numbers: Tensor) -> Tensor:
    """``argsort(dim=1, stable=True)`` of ``[C, n]``; of few numbers by counting how many come before each."""
    clients, n = numbers.shape
    if n > MOST:
        return numbers.argsort(dim=1, stable=True)
    out = torch.empty_like(numbers)
    _order[triton.cdiv(n, 32), clients](numbers, out, n, 32, 128)
    return out


def _drawn(key: Tensor, index: Tensor, draws: bool) -> Tensor:
    keys, indices = torch.broadcast_tensors(key, index)  # ``broadcast_shapes`` takes seconds to import sympy
    shape = keys.shape
    assert len(shape) <= 2
    flat = (*(1,) * (2 - len(shape)), *shape)
    keys, indices = keys.expand(flat), indices.expand(flat)
    out = torch.empty(flat, dtype=torch.int64, device=key.device)
    _draw[(triton.cdiv(out.numel(), 512),)](
        keys, indices, out, out.numel(), flat[1], *keys.stride(), *indices.stride(), draws, 512
    )
    return out.view(shape)


@triton.jit
def mixed(z):
    """SplitMix64's finaliser but for its last xor, which leaves the top bits as they are."""
    z = (z ^ (z >> 30)) * MIX_1
    return (z ^ (z >> 27)) * MIX_2


@triton.jit
def mask_key(key, call):
    """The key of a client's mask of that number: see ``fot.randomness``."""
    z = mixed((key + call).to(tl.uint64))
    return ((z ^ (z >> 31)) & KEY) ^ DRAW


@triton.jit
def drawn(key, position):
    """The top 24 bits of what is drawn for a unit."""
    return (mixed(key + (position + 1).to(tl.uint64) * GOLDEN) >> 40).to(tl.int32)


@triton.jit(do_not_specialize=["units", "columns", *STRIDES])
def _draw(
    keys, indices, out, units, columns, key_row, key_column, index_row, index_column, DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    row, column = u // columns, u % columns
    key = tl.load(keys + row * key_row + column * key_column, mask=there, other=0).to(tl.uint64)
    index = tl.load(indices + row * index_row + column * index_column, mask=there, other=0)
    walked = (index + 1).to(tl.uint64) * GOLDEN
    z = mixed(((key ^ DRAW) if DRAWS else key) + walked)
    z = z ^ (z >> 31)
    tl.store(out + u, ((z >> 32) if DRAWS else (z & KEY)).to(tl.int64), mask=there)


@triton.jit(do_not_specialize=["n"])
def _order(numbers, out, n, BLOCK: tl.constexpr, OTHERS: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers += client * n
    own = tl.load(numbers + i, mask=i < n, other=0)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for begin in range(0, n, OTHERS):
        j = begin + tl.arange(0, OTHERS)
        other = tl.load(numbers + j, mask=j < n, other=0)
        before = (other[None, :] < own[:, None]) | (
            (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        )
        place += tl.sum((before & (j < n)[None, :]).to(tl.int32), axis=1)
    tl.store(out + client * n + place, i.to(tl.int64), mask=i < n)
