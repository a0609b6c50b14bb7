"""A linear layer and what follows it, the way back, and the loss: each in one reading of what it needs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fot.engines.vectorized.kernels.convolve import PROCESSORS, SMALL, Tiles, precision
from fot.engines.vectorized.kernels.draws import drawn, mask_key
from fot.engines.vectorized.kernels.tails import least, scale
from fot.randomness import _step


def forward(
    x: Tensor, w: Tensor, *, base: Tensor | None = None, factor: Tensor | None = None,
    bias: Tensor | None = None, relu: bool = False, keys: Tensor | None = None, call: int = 0, p: float = 0.0,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """dropout(relu(factor·(base + x Wᵀ) + bias)), of ``x`` ``[C, n, I]`` and ``w`` ``[C, O, I]``.

    Each part may be missing. A factor is one number a client; ``w`` may lie in any strides; the others are as
    in ``tails.forward``.
    """
    clients, rows, inputs = x.shape
    outputs = w.shape[1]
    y = x.new_empty(clients, rows, outputs)
    t = tiles or _tiles(x, w, rows)
    _forward[triton.cdiv(outputs, t.columns), triton.cdiv(rows, t.rows), clients](
        x, w, y, base, factor, bias, keys, _step(call), *w.stride(), rows, outputs, inputs, relu, least(p),
        scale(p), base is not None, factor is not None, bias is not None, keys is not None, precision(x),
        *t[:3], num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def _tiles(x: Tensor, w: Tensor, rows: int) -> Tiles:
    if x.dtype != torch.bfloat16 and precision(x) == "ieee":
        return SMALL
    clients, outputs, _ = w.shape
    high, wide = (max(16, min(most, triton.next_power_of_2(n))) for n, most in ((rows, 64), (outputs, 128)))
    if w.stride(2) != 1:  # of such factors, four warps on 64 rows would turn each tile before they multiply
        return Tiles(high, min(wide, 4096 // high), 32, 2 if high == 64 else 4, 4)
    while wide > 16 and triton.cdiv(outputs, wide) * triton.cdiv(rows, high) * clients < PROCESSORS:
        wide //= 2
    deep = 1 << (8192 // (high + wide)).bit_length() - 1  # a small tile reads further ahead
    return Tiles(high, wide, deep, 4, 3 if wide > 32 else 4)


@triton.jit(do_not_specialize=["call"])
def _forward(
    x, w, y, base, factor, bias, keys, call, of_client, of_output, of_input, rows, O, I,
    RELU: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr, BASE: tl.constexpr, FACTOR: tl.constexpr,
    BIAS: tl.constexpr, DROP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(2).to(tl.int64)
    m, o = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    x += client * rows * I
    w += client * of_client
    acc = tl.zeros((BM, BN), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for begin in range(0, I, BK):
        i = begin + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * I + i[None, :], mask=(m < rows)[:, None] & (i < I)[None, :], other=0.0)
        there = (o < O)[None, :] & (i < I)[:, None]
        b = tl.load(w + o[None, :] * of_output + i[:, None] * of_input, mask=there, other=0.0)
        acc = tl.dot(a, b.to(a.dtype), acc, input_precision=PRECISION, out_dtype=acc.dtype)
    inside = (m < rows)[:, None] & (o < O)[None, :]
    at = client * rows * O + m[:, None] * O + o[None, :]
    if BASE:
        acc += tl.load(base + at, mask=inside, other=0.0)
    if FACTOR:
        acc *= tl.load(factor + client)
    if BIAS:
        acc += tl.load(bias + client * O + o, mask=o < O, other=0.0)[None, :]
    if RELU:
        acc = tl.where(acc <= 0, 0.0, acc)  # NaN stays
    if DROP:
        kept = drawn(mask_key(tl.load(keys + client), call), m[:, None] * O + o[None, :]) >= LEAST
        acc = tl.where(kept, acc * SCALE, acc * 0.0)  # of NaN and infinity comes NaN
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)


def backward(
    d: Tensor,
    x: Tensor,
    w: Tensor,
    keep: float,
    lr: float,
    out: Tensor,
    samples: bool,
    tiles: Tiles | None = None,
) -> Tensor | None:
    """Write keep·W - lr·dᵀx to ``out``, which may be ``w``; and return d W where it is wanted.

    ``d`` is ``[C, n, O]``, ``x`` ``[C, n, I]``, ``w`` ``[C, O, I]``, with n few: a tile holds them all.
    """
    clients, rows, outputs = d.shape
    inputs = x.shape[2]
    below = torch.empty_like(x) if samples else None
    # As deep that the registers suffice, and so narrow that the layers of a hundred clients fill a GPU once.
    t = tiles or Tiles(max(16, triton.next_power_of_2(rows)), 64, 16, 2, 3)
    _backward[triton.cdiv(inputs, t.columns), clients](
        d, x, w, out, below, w.stride(0), rows, outputs, inputs, keep, lr, samples, precision(d),
        *t[:3], num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return below


@triton.jit
def _backward(
    d, x, w, out, below, of_client, rows, O, I, KEEP: tl.constexpr, LR: tl.constexpr, SAMPLES: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    m, i = tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    d += client * rows * O
    x += client * rows * I
    w += client * of_client
    out += client * O * I
    kind = tl.float64 if d.dtype.element_ty == tl.float64 else tl.float32
    inside = (m < rows)[:, None] & (i < I)[None, :]
    own = tl.load(x + m[:, None] * I + i[None, :], mask=inside, other=0.0)
    acc = tl.zeros((BM, BN), dtype=kind)
    for begin in range(0, O, BK):
        o = begin + tl.arange(0, BK)
        at = o[:, None] * I + i[None, :]
        there = (o < O)[:, None] & (i < I)[None, :]
        old = tl.load(w + at, mask=there, other=0.0)
        # Read both ways round: what two products want in different orders is not read ahead.
        turned = tl.load(
            d + m[None, :] * O + o[:, None], mask=(m < rows)[None, :] & (o < O)[:, None], other=0.0
        )
        if SAMPLES:
            along = tl.load(
                d + m[:, None] * O + o[None, :], mask=(m < rows)[:, None] & (o < O)[None, :], other=0.0
            )
            acc = tl.dot(along, old.to(along.dtype), acc, input_precision=PRECISION, out_dtype=kind)
        change = tl.dot(turned, own, input_precision=PRECISION, out_dtype=kind)
        tl.store(out + at, KEEP * old - LR * change, mask=there)
    if SAMPLES:
        at = client * rows * I + m[:, None] * I + i[None, :]
        tl.store(below + at, acc.to(below.dtype.element_ty), mask=inside)


def cross_entropy(logits: Tensor, y: Tensor, weight: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """Each client's weighted loss ``[C]``, and the gradient of their sum at the logits ``[C·B, classes]``."""
    # The rows of a step are columns of a table, and one column alone lies in strides.
    logits, y, weight = logits.contiguous(), y.contiguous(), weight.contiguous()
    d, losses = torch.empty_like(logits), logits.new_empty(clients)
    classes = logits.shape[1]
    wide = triton.next_power_of_2(classes)
    _cross_entropy[(clients,)](
        logits,
        y,
        weight,
        d,
        losses,
        len(logits) // clients,
        classes,
        max(1, min(32, 4096 // wide)),
        wide,
        num_warps=8,
    )
    return losses, d


@triton.jit
def _cross_entropy(
    logits, y, weight, d, losses, rows, classes, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    client, k = tl.program_id(0).to(tl.int64), tl.arange(0, BN)
    total = tl.zeros((BM,), dtype=losses.dtype.element_ty)
    for begin in range(0, rows, BM):
        m = begin + tl.arange(0, BM)
        at = client * rows + m
        share = tl.load(weight + at, mask=m < rows, other=0.0)
        label = tl.load(y + at, mask=m < rows, other=0)
        there = (m < rows)[:, None] & (k < classes)[None, :]
        z = tl.load(logits + at[:, None] * classes + k[None, :], mask=there, other=float("-inf"))
        z = tl.where((m < rows)[:, None], z, 0.0)
        z = z - tl.max(z, axis=1)[:, None]
        e = tl.exp(z)
        whole = tl.sum(e, axis=1)
        right = k[None, :] == label[:, None]
        chosen = tl.sum(tl.where(right, z, 0.0), axis=1)
        total += share * (tl.log(whole) - chosen)
        change = (e / whole[:, None] - tl.where(right, 1.0, 0.0)) * share[:, None]
        tl.store(d + at[:, None] * classes + k[None, :], change, mask=there)
    tl.store(losses + client, tl.sum(total, axis=0))


def append(rows: Tensor, table: Tensor, begin: int, scale: Tensor | None = None) -> None:
    """Write ``[C, n, I]``, times each client's scale, to the rows of a table from ``begin`` on."""
    clients, units = len(rows), rows[0].numel()
    rows = rows.contiguous()
    _append[triton.cdiv(units, 2048), clients](
        rows, table, scale, units, table.stride(0), begin * rows.shape[-1], scale is not None, 2048
    )


@triton.jit
def _append(rows, table, scale, units, of_client, begin, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    client = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(rows + client * units + u, mask=u < units, other=0.0).to(table.dtype.element_ty)
    if SCALED:
        v *= tl.load(scale + client)
    tl.store(table + client * of_client + begin + u, v, mask=u < units)
