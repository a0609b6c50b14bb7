"""A cohort's convolutions as three kernels: the maps, the samples' gradient, the filters' step.

Each is one matrix product a client whose left factor is never formed: a program reads the windows of its tile
straight from the maps (an implicit product). Maps lie with their channels last, ``[C·B, H, W, I]``, and
filters likewise, ``[C, O, kh, kw, I]``. So the I numbers under one tap of a window lie side by side in both,
and a sum over a window is taken tap by tap; of few channels, row by row, kw·I numbers at a time.

Sums are taken in an order that shapes alone fix, so that a run gives the same numbers each time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fot.engines.vectorized.kernels import Window

FEW = 16
"""Channels below which the taps of a window's row are taken together: a product has a least depth."""
PROGRAMS, MANY = 1024, 300
"""Programs among which a sum over rows is split, where a layer has not so many tiles that they fill a GPU."""
SPLIT_ROWS = 512
"""Rows that a part of such a sum has at least."""
PROCESSORS = 132
"""Multiprocessors of a GPU: an H200's."""


class Tiles(NamedTuple):
    """How a product is cut: rows, columns and depth of a tile, and who works on it."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3


SMALL = Tiles(32, 32, 16, 4, 2)
"""Where factors keep all digits: a GPU multiplies number by number then, and large tiles compile slowly."""


def forward(
    x: Tensor, w: Tensor, window: Window, size: tuple[int, int], tiles: Tiles | None = None
) -> Tensor:
    """The maps ``[C·B, *size, O]`` of samples ``[C·B, H, W, I]`` under each client's own filters."""
    clients, outputs, kh, kw, inputs = w.shape
    rows = len(x) // clients * size[0] * size[1]
    y = x.new_empty(len(x), *size, outputs)
    t = tiles or _tiles(x, clients, rows, outputs, kw * inputs if inputs < FEW else inputs)
    _forward[_cells(rows, t.rows) * _cells(outputs, t.columns), clients](
        x, w, y, rows, w.stride(0), *x.shape[1:3], *size, *window.before,
        inputs, outputs, kh, kw, *window.stride, inputs < FEW, _reaches_out(x, window, size), precision(x),
        *t[:3], num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def samples_gradient(
    d: Tensor, turned: Tensor, window: Window, size: tuple[int, int], tiles: Tiles | None = None
) -> Tensor:
    """The gradient ``[C·B, *size, I]`` at the samples of one at the maps; ``turned`` are filters with their
    outputs last, ``[C, I, kh, kw, O]``."""
    clients, inputs, kh, kw, outputs = turned.shape
    sh, sw = window.stride
    x = d.new_empty(len(d), *size, inputs)
    # Pixels that windows meet alike, every stride-th one, are taken together.
    rows = len(d) // clients * _cells(size[0], sh) * _cells(size[1], sw)
    t = tiles or _tiles(d, clients * sh * sw, rows, inputs, outputs)
    _samples_gradient[_cells(rows, t.rows) * _cells(inputs, t.columns), clients, sh * sw](
        d, turned, x, rows, turned.stride(0), *size, *d.shape[1:3], *window.before,
        inputs, outputs, kh, kw, sh, sw, precision(d), *t[:3], num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return x


def step(
    d: Tensor,
    x: Tensor,
    w: Tensor,
    window: Window,
    keep: float,
    lr: float,
    out: Tensor,
    turned: Tensor | None = None,
    tiles: Tiles | None = None,
    splits: int | None = None,
) -> None:
    """Write keep·W - lr·(the gradient at the filters) to ``out``, which may be ``w``, and to ``turned``."""
    clients, outputs, kh, kw, inputs = w.shape
    rows, columns = len(x) // clients * d.shape[1] * d.shape[2], kh * kw * inputs
    t = tiles or _step_tiles(x, clients, outputs, columns)
    cells = _cells(outputs, t.rows) * _cells(columns, t.columns)
    if splits is None:
        few = cells * clients < MANY
        splits = max(1, min(PROGRAMS // (cells * clients), rows // SPLIT_ROWS)) if few else 1
    share = _cells(_cells(rows, splits), t.depth) * t.depth
    splits = _cells(rows, share)
    target = x.new_empty(splits, *out.shape, dtype=out.dtype) if splits > 1 else out
    _step[cells, clients, splits](
        d, x, w, target, out if turned is None else turned, rows, share, w.stride(0),
        keep, lr, *x.shape[1:3], *d.shape[1:3], *window.before, inputs, outputs, kh, kw, *window.stride,
        _reaches_out(x, window, (d.shape[1], d.shape[2])), splits > 1, turned is not None, precision(x),
        *t[:3], num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    if splits > 1:
        _settled[triton.cdiv(outputs * columns, 256), clients](
            target, w, out, out if turned is None else turned, w.stride(0), splits, keep, lr, outputs,
            columns, kh * kw, turned is not None, 8, 256,
        )  # fmt: skip


@triton.jit
def _forward(
    x, w, y, rows, of_client, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    ABOVE: tl.constexpr, LEFT: tl.constexpr,  # constants: to divide by a number that is passed takes long
    I: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    BY_ROW: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (O + BN - 1) // BN
    run: tl.constexpr = KW * I if BY_ROW else I
    taps: tl.constexpr = 1 if BY_ROW else KW
    pieces: tl.constexpr = (run + BK - 1) // BK
    m = tile // across * BM + tl.arange(0, BM)
    n = tile % across * BN + tl.arange(0, BN)
    top, start, image = m // OW % OH * SH - ABOVE, m % OW * SW - LEFT, m // (OW * OH)
    x += client * (rows // (OH * OW)) * H * W * I
    w += client * of_client
    begin = ((image * H + top) * W + start) * I
    acc = tl.zeros((BM, BN), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for piece in range(KH * taps * pieces):
        tap, j = piece // pieces, piece % pieces * BK + tl.arange(0, BK)
        kh, kw = tap // taps, tap % taps
        here = (m < rows)[:, None] & (j < run)[None, :]
        if PADDED:
            here &= ((top + kh >= 0) & (top + kh < H))[:, None]
            if BY_ROW:
                column = start[:, None] + (j // I)[None, :]
                here &= (column >= 0) & (column < W)
            else:
                here &= ((start + kw >= 0) & (start + kw < W))[:, None]
        a = tl.load(x + (begin + (kh * W + kw) * I)[:, None] + j[None, :], mask=here, other=0.0)
        b = tl.load(
            w + (n * (KH * KW * I))[None, :] + ((kh * KW + kw) * I + j)[:, None],
            mask=(n < O)[None, :] & (j < run)[:, None], other=0.0,
        )  # fmt: skip
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    at = (client * rows + m)[:, None] * O + n[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=(m < rows)[:, None] & (n < O)[None, :])


@triton.jit
def _samples_gradient(
    d, turned, x, rows, of_client, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    ABOVE: tl.constexpr, LEFT: tl.constexpr,
    I: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    qh, qw = tl.program_id(2) // SW, tl.program_id(2) % SW
    across: tl.constexpr = (I + BN - 1) // BN
    pieces: tl.constexpr = (O + BK - 1) // BK
    UH, UW = tl.cdiv(H, SH), tl.cdiv(W, SW)
    m = tile // across * BM + tl.arange(0, BM)
    n = tile % across * BN + tl.arange(0, BN)
    image, u, v = m // (UW * UH), m // UW % UH, m % UW
    # Pixel qh + SH·u lies under row kh of the window at oh where SH·oh + kh = qh + SH·u + ABOVE.
    kh0, kw0 = (qh + ABOVE) % SH, (qw + LEFT) % SW
    oh0, ow0 = u + (qh + ABOVE) // SH, v + (qw + LEFT) // SW
    high, wide = (KH - kh0 + SH - 1) // SH, (KW - kw0 + SW - 1) // SW
    d += client * (rows // (UH * UW)) * OH * OW * O
    turned += client * of_client
    acc = tl.zeros((BM, BN), dtype=tl.float64 if d.dtype.element_ty == tl.float64 else tl.float32)
    for piece in range(high * wide * pieces):
        tap, j = piece // pieces, piece % pieces * BK + tl.arange(0, BK)
        oh, ow = oh0 - tap // wide, ow0 - tap % wide
        here = ((m < rows) & (oh >= 0) & (oh < OH) & (ow >= 0) & (ow < OW))[:, None] & (j < O)[None, :]
        a = tl.load(d + (((image * OH + oh) * OW + ow) * O)[:, None] + j[None, :], mask=here, other=0.0)
        kh, kw = kh0 + SH * (tap // wide), kw0 + SW * (tap % wide)
        b = tl.load(
            turned + (n * (KH * KW * O))[None, :] + ((kh * KW + kw) * O + j)[:, None],
            mask=(n < I)[None, :] & (j < O)[:, None], other=0.0,
        )  # fmt: skip
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    ih, iw = qh + SH * u, qw + SW * v
    at = (((client * (rows // (UH * UW)) + image) * H + ih) * W + iw)[:, None] * I + n[None, :]
    good = ((m < rows) & (ih < H) & (iw < W))[:, None] & (n < I)[None, :]
    tl.store(x + at, acc.to(x.dtype.element_ty), mask=good)


@triton.jit
def _step(
    d, x, w, out, turned, rows, share, of_client,
    KEEP: tl.constexpr, LR: tl.constexpr,  # constants: numbers that are passed lose half of their digits
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, ABOVE: tl.constexpr,
    LEFT: tl.constexpr,
    I: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PADDED: tl.constexpr, PARTIAL: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile, client, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    columns: tl.constexpr = KH * KW * I
    across: tl.constexpr = (columns + BN - 1) // BN
    o = tile // across * BM + tl.arange(0, BM)
    n = tile % across * BN + tl.arange(0, BN)
    kh, kw, i = n // (KW * I), n // I % KW, n % I
    d += client * rows * O
    x += client * (rows // (OH * OW)) * H * W * I
    acc = tl.zeros((BM, BN), dtype=tl.float64 if d.dtype.element_ty == tl.float64 else tl.float32)
    for begin in range(split * share, min(rows, split * share + share), BK):
        m = begin + tl.arange(0, BK)
        top, start, image = m // OW % OH * SH - ABOVE, m % OW * SW - LEFT, m // (OW * OH)
        good = (m < rows)[None, :] & (o < O)[:, None]
        a = tl.load(d + (m * O)[None, :] + o[:, None], mask=good, other=0.0)
        here = (m < rows)[:, None] & (n < columns)[None, :]
        if PADDED:
            row, column = top[:, None] + kh[None, :], start[:, None] + kw[None, :]
            here &= (row >= 0) & (row < H) & (column >= 0) & (column < W)
        at = (((image * H + top) * W + start) * I)[:, None] + ((kh * W + kw) * I + i)[None, :]
        b = tl.load(x + at, mask=here, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    at = o[:, None] * columns + n[None, :]
    good = (o < O)[:, None] & (n < columns)[None, :]
    if PARTIAL:
        tl.store(out + (split * tl.num_programs(1) + client) * O * columns + at, acc, mask=good)
    else:
        new = KEEP * tl.load(w + client * of_client + at, mask=good, other=0.0) - LR * acc
        tl.store(out + client * O * columns + at, new, mask=good)
        if TURNED:
            at = (i * (KH * KW * O) + (kh * KW + kw) * O)[None, :] + o[:, None]
            tl.store(turned + client * O * columns + at, new, mask=good)


@triton.jit
def _settled(
    parts, w, out, turned, of_client, splits, KEEP: tl.constexpr, LR: tl.constexpr, O: tl.constexpr,
    COLUMNS: tl.constexpr, TAPS: tl.constexpr, TURNED: tl.constexpr, SOME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    client = tl.program_id(1).to(tl.int64)
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = u < O * COLUMNS
    gradient = tl.zeros((SOME, BLOCK), dtype=tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32)
    for begin in range(0, splits, SOME):
        split = begin + tl.arange(0, SOME)
        at = ((split * tl.num_programs(1) + client) * (O * COLUMNS))[:, None] + u[None, :]
        gradient += tl.load(parts + at, mask=(split < splits)[:, None] & there[None, :], other=0.0)
    old = tl.load(w + client * of_client + u, mask=there, other=0.0)
    new = KEEP * old - LR * tl.sum(gradient, axis=0)
    tl.store(out + client * (O * COLUMNS) + u, new, mask=there)
    if TURNED:
        I: tl.constexpr = COLUMNS // TAPS
        o, tap, i = u // COLUMNS, u // I % TAPS, u % I
        tl.store(turned + client * (O * COLUMNS) + (i * TAPS + tap) * O + o, new, mask=there)


def _tiles(x: Tensor, clients: int, rows: int, columns: int, run: int) -> Tiles:
    """A fixed rule: what is chosen by measuring would round otherwise from run to run."""
    if precision(x) == "ieee" and x.dtype != torch.bfloat16:
        return SMALL
    wide = 16 if columns <= 16 else 32 if columns <= 32 else 64 if columns <= 64 else 128
    high = 32 if rows <= 32 else 64 if rows <= 64 else 128
    if (high, wide) == (128, 128):
        # A multiprocessor holds two such tiles, or three of half the height: which way takes less time?
        tall, low = (_cells(rows, side) * _cells(columns, wide) * clients for side in (128, 64))
        if 0.75 * _cells(low, 3 * PROCESSORS) < _cells(tall, 2 * PROCESSORS):
            return Tiles(64, 128, 32, 4, 3)
    deep = 16 if run <= 48 and run % 32 in range(1, 17) else 32
    return Tiles(high, wide, deep, 8 if wide == 128 else 4, 4 if deep == 16 else 3)


def _step_tiles(x: Tensor, clients: int, outputs: int, columns: int) -> Tiles:
    """Two warps a tile: with four a GPU takes another way to multiply, which loses where rows are summed."""
    if precision(x) == "ieee" and x.dtype != torch.bfloat16:
        return SMALL
    if outputs > 96 and _cells(outputs, 128) * _cells(columns, 64) * clients >= MANY:
        return Tiles(128, 64, 16, 2, 4)
    if outputs > 64:  # small tiles cost less than sums that are split
        return Tiles(64, 64, 32, 2, 3)
    if outputs > 32:
        return Tiles(64, 64, 16, 2, 4)
    return Tiles(32 if outputs > 16 else 16, 32 if columns <= 32 else 64, 32, 2, 3)


def _reaches_out(x: Tensor, window: Window, size: tuple[int, int]) -> bool:
    """Whether some windows reach past the maps' borders."""
    return window.before != (0, 0) or any(
        (n - 1) * s + k > have
        for n, s, k, have in zip(size, window.stride, window.size, x.shape[1:3], strict=True)
    )


def precision(x: Tensor) -> str:
    """How a product may round its factors: as the user's settings of this GPU say."""
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _cells(n: int, size: int) -> int:
    return -(-n // size)
