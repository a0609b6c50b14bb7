"""The two products in which nearly all of a network's arithmetic lies, for a stack of weights.

Each is bilinear in samples and weights, and so is described by three maps: forward, the adjoint to the
samples, and the adjoint to the weights. ``x`` is folded, ``[C·B, ...]``; ``w`` is a stack, ``[C, ...]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product as every
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Adjoint = tuple[Tensor | None, Tensor | None]
"""Gradients at the samples and at the weights, those that were asked for."""


class Linear:
    """y = x Wᵀ, one batched matrix product for the whole cohort."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(rows(x, w), w.mT).view(*x.shape[:-1], w.shape[1])

    def adjoint(self, d: Tensor, x: Tensor, w: Tensor, samples: bool, weights: bool) -> Adjoint:
        """The gradients d W, at the samples, and dᵀ x, at the weights."""
        return (
            torch.bmm(rows(d, w), w).view(x.shape) if samples else None,
            torch.bmm(rows(d, w).mT, rows(x, w)) if weights else None,
        )

    def step(self, d: Tensor, x: Tensor, w: Tensor, keep: float, lr: float, in_place: bool) -> Tensor:
        """keep·W - lr·dᵀx, without forming the gradient."""
        add = w.baddbmm_ if in_place else w.baddbmm
        return add(rows(d, w).mT, rows(x, w), beta=keep, alpha=-lr)


def rows(x: Tensor, w: Tensor) -> Tensor:
    """A folded tensor as one matrix a client."""
    return x.reshape(w.shape[0], -1, x.shape[-1])


class Convolution:
    """A convolution with each client's own filters.

    On a GPU a batched matrix product over patches (``patches``, channels last) is several times faster
    than a grouped convolution. On a CPU the library's own convolution, client by client, is faster.
    """

    def __init__(
        self, kernel: Sequence[int], stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
        by_patches: bool | None = None,
    ) -> None:  # fmt: skip
        axes = len(kernel) - 1  # the kernel's own axes come after its input channels
        self.kernel = tuple(kernel[1:])
        self.stride, self.dilation = _each(stride, axes), _each(dilation, axes)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            self.before, self.after = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        else:
            self.before = self.after = _each(0 if padding == "valid" else padding, axes)
        self.groups = groups
        self.by_patches = by_patches

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        if not self._patches(x):
            padding, x = self._symmetric(x)
            clients = zip(x.chunk(w.shape[0]), w, strict=True)
            return _joined([self._native(one, filters, padding) for one, filters in clients])
        columns, size = self.columns(x, w.shape[0])
        y = torch.bmm(columns, self.matrix(w).transpose(1, 2))
        return y.view(x.shape[0], *size, w.shape[1]).movedim(-1, 1)

    def adjoint(self, d: Tensor, x: Tensor, w: Tensor, samples: bool, weights: bool) -> Adjoint:
        """The gradients at the samples and at the filters."""
        if not self._patches(x):
            return self._native_adjoint(d, x, w, samples, weights)
        by_client = d.movedim(1, -1).reshape(len(w), -1, d.shape[1])
        at_samples = None
        if samples and set(self.stride) == {1}:
            at_samples = self._turned().forward(d, w.transpose(1, 2).flip(*range(3, w.dim())))
        elif samples:
            at_samples = self._spread(torch.bmm(by_client, self.matrix(w)), x, d)
        if not weights:
            return at_samples, None
        gradient = torch.bmm(by_client.mT, self.columns(x, len(w))[0])
        return at_samples, gradient.view(*w.shape[:2], *self.kernel, w.shape[2]).movedim(-1, 2)

    def _turned(self) -> Convolution:
        """The convolution that is the adjoint of this one where the stride is 1, with the filters mirrored.

        Spreading windows out takes a launch for each offset within them; gathering them, a few in all.
        """
        turned = Convolution((0, *self.kernel), 1, 0, self.dilation, by_patches=True)
        reach = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
        turned.before = tuple(r - b for r, b in zip(reach, self.before, strict=True))
        turned.after = tuple(r - a for r, a in zip(reach, self.after, strict=True))
        return turned

    def _spread(self, columns: Tensor, x: Tensor, d: Tensor) -> Tensor:
        """Add the gradients of all windows up where the windows came from: the adjoint of ``columns``."""
        size = d.shape[2:]
        columns = columns.view(x.shape[0], *size, *self.kernel, x.shape[1]).movedim(-1, 1)
        lengths = [n + a + b for n, a, b in zip(x.shape[2:], self.before, self.after, strict=True)]
        padded = columns.new_zeros(x.shape[0], *lengths, x.shape[1]).movedim(-1, 1)
        # Each offset within the window meets each input at most once.
        for offset in every(*map(range, self.kernel)):
            where = [
                slice(o * by, o * by + (n - 1) * s + 1, s)
                for o, by, s, n in zip(offset, self.dilation, self.stride, size, strict=True)
            ]
            padded[(slice(None), slice(None), *where)].add_(columns[(..., *offset)])  # type: ignore[index]
        return padded[self._inside(x)]

    def _inside(self, x: Tensor) -> tuple[slice, ...]:
        inner = (slice(b, b + n) for b, n in zip(self.before, x.shape[2:], strict=True))
        return (slice(None), slice(None), *inner)

    def columns(self, x: Tensor, clients: int) -> tuple[Tensor, tuple[int, ...]]:
        """The windows of each client's samples as the rows of one matrix, and the size of the maps."""
        x = x.contiguous(memory_format=_CHANNELS_LAST.get(x.dim(), torch.contiguous_format))
        pads = [p for pair in reversed(list(zip(self.before, self.after, strict=True))) for p in pair]
        x = F.pad(x, pads) if any(pads) else x
        size = tuple(
            (n - d * (k - 1) - 1) // s + 1
            for n, k, s, d in zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        )
        strides = x.stride()
        moves = [s * by for s, by in zip(strides[2:], self.stride, strict=True)]
        within = [s * by for s, by in zip(strides[2:], self.dilation, strict=True)]
        windows = x.as_strided(
            (x.shape[0], *size, *self.kernel, x.shape[1]), (strides[0], *moves, *within, strides[1])
        )
        return windows.reshape(clients, -1, math.prod(self.kernel) * x.shape[1]), size

    def matrix(self, w: Tensor) -> Tensor:
        """Filters ``[C, out, in, *k]`` as matrices ``[C, out, *k·in]``, in the order of the windows."""
        return w.movedim(2, -1).flatten(2)

    def _patches(self, x: Tensor) -> bool:
        return self.groups == 1 and (x.is_cuda if self.by_patches is None else self.by_patches)

    def _symmetric(self, x: Tensor) -> tuple[tuple[int, ...], Tensor]:
        """Padding that the library's convolution can do itself, or none and an input padded beforehand."""
        if self.before == self.after:
            return self.before, x
        pads = [p for pair in reversed(list(zip(self.before, self.after, strict=True))) for p in pair]
        return (0,) * len(self.before), F.pad(x, pads)

    def _native(self, x: Tensor, w: Tensor, padding: Sequence[int]) -> Tensor:
        return torch.convolution(
            x, w, None, self.stride, padding, self.dilation, False, (0,) * len(padding), self.groups
        )

    def _native_adjoint(self, d: Tensor, x: Tensor, w: Tensor, samples: bool, weights: bool) -> Adjoint:
        padding, padded = self._symmetric(x)
        both = [
            torch.ops.aten.convolution_backward(
                one_d, one_x, filters, None, self.stride, padding, self.dilation, False,
                (0,) * len(padding), self.groups, [samples, weights, False],
            )
            for one_d, one_x, filters in zip(d.chunk(len(w)), padded.chunk(len(w)), w, strict=True)
        ]  # fmt: skip
        at_samples = _joined([found[0] for found in both]) if samples else None
        if at_samples is not None and padded is not x:
            at_samples = at_samples[self._inside(x)]
        return at_samples, torch.stack([found[1] for found in both]) if weights else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def product(operation: Linear | Convolution, x: Tensor, w: Tensor) -> Tensor:
    """The operation on folded samples and a stack of weights; gradients flow to both."""
    result: Tensor = _Product.apply(lowered(x), lowered(w), operation)  # type: ignore[no-untyped-call]
    return result


def lowered(tensor: Tensor) -> Tensor:
    """In the precision that autocast wants for products, where it is on."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, operation: Linear | Convolution) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.operation = operation
        return operation.forward(x, w)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        return (*ctx.operation.adjoint(d, x, w, *ctx.needs_input_grad[:2]), None)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) * (axes // len(value)) if isinstance(value, (tuple, list)) else (int(value),) * axes
