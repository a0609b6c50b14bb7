"""Batch-norm of a cohort on each client's own statistics.

The maps are read for sums over a client's rows, and once more with the factor and the summand of each channel
that follow from these (``tails.forward``); so, too, on the way back. Sums are taken in float64: memory hides
its cost, and a variance is then the plain difference of two sums.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 32, 32
"""The tile of the maps that a program sums at a time."""
SOME, BLOCK = 64, 32
"""The tile of those programs' sums."""
PROGRAMS = 1024
"""Programs among which the rows are split."""


class Statistics(NamedTuple):
    """Of each client's channels, ``[C, F]``."""

    mean: Tensor
    """In float64, as the next."""
    inverse: Tensor
    """1 / √(variance + ε)."""
    gain: Tensor
    """The normalised maps are gain·z + shift."""
    shift: Tensor


def statistics(z: Tensor, clients: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Statistics:
    """The statistics of maps ``[C·B, H, W, F]``; weight and bias are each client's own, ``[C, F]``."""
    sums, rows = _sums(z, None, clients)
    shape = (clients, z.shape[-1])
    mean, inverse = sums.new_empty(shape), sums.new_empty(shape)
    exact = torch.promote_types(z.dtype, torch.float32)
    gain, shift = z.new_empty(shape, dtype=exact), z.new_empty(shape, dtype=exact)
    units = mean.numel()
    _statistics[(triton.cdiv(units, BLOCK),)](
        sums, weight, bias, mean, inverse, gain, shift, units, len(sums), 1 / rows, eps,
        weight is not None, bias is not None, SOME, BLOCK,
    )  # fmt: skip
    return Statistics(mean, inverse, gain, shift)


def backward(d: Tensor, z: Tensor, known: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients at z, the weight and the bias of one at gain·z + shift."""
    clients, channels = known.gain.shape
    sums, rows = _sums(z, d, clients)
    of_weight, of_bias, of_z, rest = (torch.empty_like(known.gain) for _ in range(4))
    units = of_z.numel()
    _factors[(triton.cdiv(units, BLOCK),)](
        sums, known.mean, known.inverse, known.gain, of_weight, of_bias, of_z, rest, units, len(sums),
        1 / rows, SOME, BLOCK,
    )  # fmt: skip
    below, units = torch.empty_like(d), d.numel() // clients
    _below[triton.cdiv(units, 1024), clients](d, z, known.gain, of_z, rest, below, units, channels, 1024)
    return below, of_weight, of_bias


def _sums(z: Tensor, d: Tensor | None, clients: int) -> tuple[Tensor, int]:
    """Σ z and Σ z², or Σ d and Σ d·z, in parts ``[parts, 2, C, F]``; and how many rows a client has."""
    channels = z.shape[-1]
    rows = z[..., 0].numel() // clients
    across = triton.cdiv(channels, COLUMNS)
    share = triton.cdiv(triton.cdiv(rows, max(1, PROGRAMS // (across * clients))), ROWS) * ROWS
    parts = triton.cdiv(rows, share)
    sums = torch.empty(parts, 2, clients, channels, dtype=torch.float64, device=z.device)
    _summed[across, clients, parts](z, d, sums, rows, share, channels, d is not None, ROWS, COLUMNS)
    return sums, rows


@triton.jit
def _summed(z, d, sums, rows, share, channels, OF_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    client, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    f = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.zeros((BM, BN), dtype=tl.float64)
    second = tl.zeros((BM, BN), dtype=tl.float64)
    for begin in range(part * share, min(rows, part * share + share), BM):
        m = begin + tl.arange(0, BM)
        there = (m < rows)[:, None] & (f < channels)[None, :]
        at = (client * rows + m)[:, None] * channels + f[None, :]
        v = tl.load(z + at, mask=there, other=0.0).to(tl.float64)
        g = tl.load(d + at, mask=there, other=0.0).to(tl.float64) if OF_D else v
        first += g
        second += g * v
    clients = tl.num_programs(1)
    at = sums + (part * 2 * clients + client) * channels + f
    tl.store(at, tl.sum(first, axis=0), mask=f < channels)
    tl.store(at + clients * channels, tl.sum(second, axis=0), mask=f < channels)


@triton.jit
def _added(sums, u, there, units, parts, SOME: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.zeros((SOME, BLOCK), dtype=tl.float64)
    second = tl.zeros((SOME, BLOCK), dtype=tl.float64)
    for begin in range(0, parts, SOME):  # so many at once, or each would wait for the one before
        part = begin + tl.arange(0, SOME)
        at = sums + (part * 2 * units)[:, None] + u[None, :]
        inside = (part < parts)[:, None] & there[None, :]
        first += tl.load(at, mask=inside, other=0.0)
        second += tl.load(at + units, mask=inside, other=0.0)
    return tl.sum(first, axis=0), tl.sum(second, axis=0)


@triton.jit
def _statistics(
    sums, weight, bias, mean, inverse, gain, shift, units, parts, SHARE: tl.constexpr, EPS: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    first, second = _added(sums, u, there, units, parts, SOME, BLOCK)
    centre = first * SHARE
    variance = second * SHARE - centre * centre
    factor = 1.0 / tl.sqrt(tl.where(variance < 0, 0.0, variance) + EPS)  # NaN stays
    tl.store(mean + u, centre, mask=there)
    tl.store(inverse + u, factor, mask=there)
    if WEIGHT:
        factor *= tl.load(weight + u, mask=there, other=0.0)
    summand = -centre * factor
    if BIAS:
        summand += tl.load(bias + u, mask=there, other=0.0)
    tl.store(gain + u, factor, mask=there)
    tl.store(shift + u, summand, mask=there)


@triton.jit
def _factors(
    sums, mean, inverse, gain, of_weight, of_bias, of_z, rest, units, parts, SHARE: tl.constexpr,
    SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    first, second = _added(sums, u, there, units, parts, SOME, BLOCK)
    centre, factor = tl.load(mean + u, mask=there, other=0.0), tl.load(inverse + u, mask=there, other=0.0)
    along = factor * (second - centre * first)  # Σ d·(z - mean)·inverse
    own = tl.load(gain + u, mask=there, other=0.0).to(tl.float64)
    slope = -own * factor * along * SHARE
    tl.store(of_weight + u, along, mask=there)
    tl.store(of_bias + u, first, mask=there)
    tl.store(of_z + u, slope, mask=there)
    tl.store(rest + u, -own * first * SHARE - centre * slope, mask=there)


@triton.jit
def _below(d, z, of_d, of_z, rest, below, units, F: tl.constexpr, BLOCK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    own, at = client * F + u % F, client * units + u
    value = tl.load(rest + own, mask=there, other=0.0)
    value += tl.load(of_d + own, mask=there, other=0.0) * tl.load(d + at, mask=there, other=0.0).to(
        value.dtype
    )
    value += tl.load(of_z + own, mask=there, other=0.0) * tl.load(z + at, mask=there, other=0.0).to(
        value.dtype
    )
    tl.store(below + at, value.to(below.dtype.element_ty), mask=there)
