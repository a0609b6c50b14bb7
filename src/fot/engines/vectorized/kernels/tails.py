"""What follows a product of a cohort, in one kernel each way: bias, addition, ReLU, dropout, pooling.

Maps lie with their channels last, ``[C·B, OH, OW, O]``; a linear layer's output is a map of one pixel.
Nothing but the result is kept for the way back: behind a ReLU its sign tells which units the ReLU and the
dropout let through, and under a pooling a byte a unit tells where the largest was.

Dropout draws what ``fot.dropout`` draws, bit for bit: the top 24 bits of SplitMix64 of (key, position).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fot.engines.vectorized.kernels.draws import drawn, mask_key
from fot.randomness import _step

BLOCK = 1024
NOWHERE = tl.constexpr(255)
"""Where the largest of a window is that the ReLU or the dropout stopped."""


def forward(
    z: Tensor, clients: int, *, gain: Tensor | None = None, bias: Tensor | None = None,
    other: Tensor | None = None, relu: bool = False, keys: Tensor | None = None, call: int = 0,
    p: float = 0.0, pool: int = 1,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """pool(dropout(relu(gain·z + bias + other))), and for a pooling where in its windows the largest were.

    Parameters
    ----------
    z, other
        Maps ``[C·B, OH, OW, O]``.
    gain, bias
        ``[C, O]``; a gain goes with a bias.
    keys, call, p
        ``[C]``, each client's key of its masks, the number of the mask, and the probability to drop a unit.
    pool
        The side of the windows of a max-pooling, which is their stride too.
    """
    images, high, wide, channels = z.shape
    y = z.new_empty(images, high // pool, wide // pool, channels)
    places = torch.empty_like(y, dtype=torch.uint8) if pool > 1 else None
    units = y.numel() // clients
    _forward[triton.cdiv(units, BLOCK), clients](
        z, y, places, gain, bias, other, keys, _step(call), units, images // clients,
        channels, high, wide, pool, relu, least(p), scale(p),
        gain is not None, bias is not None, other is not None, keys is not None, BLOCK,
    )  # fmt: skip
    return y, places


def backward(
    d: Tensor, y: Tensor | None, places: Tensor | None, size: tuple[int, int], clients: int, *,
    p: float = 0.0, pool: int = 1, bias: tuple[Tensor, float, float] | None = None,
) -> Tensor:  # fmt: skip
    """The gradient ``[C·B, *size, O]`` at z of one at the result y; where ``y`` is None, there was no ReLU.

    With it goes the step of a bias, (b, keep, lr): b <- keep·b - lr·(the sum over a client's rows), in place.
    """
    dz = d if y is None else d.new_empty(len(d), *size, d.shape[-1])
    if bias is not None:
        values, keep, lr = bias
        columns = min(64, triton.next_power_of_2(d.shape[-1]))
        _stepped_bias[triton.cdiv(d.shape[-1], columns), clients](
            d, y, dz, values, d[..., 0].numel() // clients, scale(p), keep, lr, d.shape[-1], y is not None,
            64, columns,
        )  # fmt: skip
    elif y is not None:
        units = dz.numel() // clients
        _backward[triton.cdiv(units, BLOCK), clients](
            d, y, places, dz, units, d.shape[-1], *size, pool, scale(p), BLOCK
        )
    return dz


@triton.jit(do_not_specialize=["call"])
def _forward(
    z, y, places, gain, bias, other, keys, call, units, images,
    O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr, RELU: tl.constexpr,
    LEAST: tl.constexpr, SCALE: tl.constexpr, GAIN: tl.constexpr, BIAS: tl.constexpr, OTHER: tl.constexpr,
    DROP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    PH: tl.constexpr = OH // POOL
    PW: tl.constexpr = OW // POOL
    o, pixel = u % O, u // O
    pw, ph, image = pixel % PW, pixel // PW % PH, pixel // (PW * PH)
    y += client * units
    z += client * images * OH * OW * O
    if OTHER:
        other += client * images * OH * OW * O
    if BIAS:
        shift = tl.load(bias + client * O + o, mask=there, other=0.0)
    if GAIN:
        factor = tl.load(gain + client * O + o, mask=there, other=0.0)
    if DROP:
        key = mask_key(tl.load(keys + client), call)
    kind = tl.float64 if z.dtype.element_ty == tl.float64 else tl.float32
    best = tl.zeros((BLOCK,), dtype=kind)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for window in tl.static_range(POOL * POOL):
        oh, ow = ph * POOL + window // POOL, pw * POOL + window % POOL
        at = ((image * OH + oh) * OW + ow) * O + o
        v = tl.load(z + at, mask=there, other=0.0).to(kind)
        if GAIN:
            v *= factor
        if BIAS:
            v += shift
        if OTHER:
            v += tl.load(other + at, mask=there, other=0.0)
        if RELU:
            v = tl.where(v <= 0, 0.0, v)  # NaN stays
        if DROP:
            position = ((image * O + o) * OH + oh) * OW + ow  # as the samples lie elsewhere: channels first
            v = tl.where(drawn(key, position) >= LEAST, v * SCALE, v * 0.0)  # of NaN and infinity comes NaN
        if window == 0:
            best = v
        else:
            larger = (v > best) | (v != v)
            best = tl.where(larger, v, best)
            place = tl.where(larger, window, place)
    tl.store(y + u, best.to(y.dtype.element_ty), mask=there)
    if POOL > 1:
        if RELU:
            place = tl.where(best <= 0, NOWHERE, place)
        tl.store(places + client * units + u, place.to(tl.uint8), mask=there)


@triton.jit
def _backward(
    d, y, places, dz, units, O: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    kind = tl.float64 if d.dtype.element_ty == tl.float64 else tl.float32
    dz += client * units
    if POOL == 1:
        at = client * units + u
        passed = tl.load(y + at, mask=there, other=0.0).to(kind)
        value = tl.where(passed <= 0, 0.0, tl.load(d + at, mask=there, other=0.0).to(kind) * SCALE)
    else:
        PH: tl.constexpr = OH // POOL
        PW: tl.constexpr = OW // POOL
        images = units // (O * OH * OW)
        o, pixel = u % O, u // O
        ow, oh, image = pixel % OW, pixel // OW % OH, pixel // (OW * OH)
        inside = there & (oh // POOL < PH) & (ow // POOL < PW)
        at = ((client * images + image) * PH + oh // POOL) * PW * O + (ow // POOL) * O + o
        own = oh % POOL * POOL + ow % POOL
        value = tl.where(
            tl.load(places + at, mask=inside, other=NOWHERE).to(tl.int32) == own,
            tl.load(d + at, mask=inside, other=0.0).to(kind) * SCALE, 0.0,
        )  # fmt: skip
    tl.store(dz + u, value.to(dz.dtype.element_ty), mask=there)


@triton.jit
def _stepped_bias(
    d, y, dz, values, rows, SCALE: tl.constexpr, KEEP: tl.constexpr, LR: tl.constexpr, O: tl.constexpr,
    RELU: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=values.dtype.element_ty)
    for begin in range(0, rows, BM):
        m = begin + tl.arange(0, BM)
        there = (m < rows)[:, None] & (o < O)[None, :]
        at = (client * rows + m)[:, None] * O + o[None, :]
        v = tl.load(d + at, mask=there, other=0.0).to(total.dtype)
        if RELU:
            v = tl.where(tl.load(y + at, mask=there, other=0.0).to(total.dtype) <= 0, 0.0, v * SCALE)
            tl.store(dz + at, v.to(dz.dtype.element_ty), mask=there)
        total += v
    at = values + client * O + o
    new = KEEP * tl.load(at, mask=o < O, other=0.0) - LR * tl.sum(total, axis=0)
    tl.store(at, new, mask=o < O)


def total_change(stack: Tensor, sent: Tensor) -> Tensor:
    """The sum over each model's clients of what they changed, in float64: ``[C, ...]`` to ``[R, ...]``."""
    models, units = len(sent), sent[0].numel()
    change = torch.empty(sent.shape, dtype=torch.float64, device=sent.device)
    _total_change[triton.cdiv(units, 64), models](
        stack, sent, change, units, sent.stride(0), len(stack) // models, 32, 64, num_warps=2
    )
    return change


@triton.jit
def _total_change(
    stack, sent, change, units, of_model, clients, SOME: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < units
    base = tl.load(sent + model * of_model + u, mask=there, other=0.0).to(tl.float64)
    total = tl.zeros((SOME, BLOCK), dtype=tl.float64)
    for begin in range(0, clients, SOME):  # so many at once, or each would wait for the one before
        client = begin + tl.arange(0, SOME)
        at = stack + (model * clients + client)[:, None] * units + u[None, :]
        inside = (client < clients)[:, None] & there[None, :]
        own = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        total += tl.where(inside, own - base[None, :], 0.0)
    tl.store(change + model * units + u, tl.sum(total, axis=0), mask=there)


def least(p: float) -> int:
    """What the top 24 bits of a draw must reach for its unit to be kept."""
    return math.ceil(torch.tensor(p, dtype=torch.float32).item() * 2**24)  # fot.dropout compares float32


def scale(p: float) -> float:
    """By what a unit that is kept is multiplied."""
    return 1 / (1 - p) if p < 1 else 0.0
