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


class Linear:
    """y = x Wᵀ, one batched matrix product for the whole cohort."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(self.rows(x, w), w.transpose(1, 2)).view(*x.shape[:-1], w.shape[1])

    def to_samples(self, d: Tensor, w: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(self.rows(d, w), w).view(x.shape)

    def to_weights(self, d: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return torch.bmm(self.rows(d, w).transpose(1, 2), self.rows(x, w))

    def step(self, d: Tensor, x: Tensor, w: Tensor, keep: float, lr: float, in_place: bool) -> Tensor:
        """keep·W - lr·(gradient), without forming the gradient."""
        d, x = self.rows(d, w).transpose(1, 2), self.rows(x, w)
        if in_place:
            return w.baddbmm_(d, x, beta=keep, alpha=-lr)
        return torch.baddbmm(w, d, x, beta=keep, alpha=-lr)

    @staticmethod
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
            return torch.cat([self._native(one, filters, padding) for one, filters in clients])
        columns, size = self.columns(x, w.shape[0])
        y = torch.bmm(columns, self.matrix(w).transpose(1, 2))
        return y.view(x.shape[0], *size, w.shape[1]).movedim(-1, 1)

    def to_samples(self, d: Tensor, w: Tensor, x: Tensor) -> Tensor:
        if not self._patches(x):
            return self._adjoint(d, w, x, samples=True)
        size = d.shape[2:]
        columns = torch.bmm(self._by_client(d, w.shape[0]), self.matrix(w))
        columns = columns.view(x.shape[0], *size, *self.kernel, x.shape[1]).movedim(-1, 1)
        lengths = [n + a + b for n, a, b in zip(x.shape[2:], self.before, self.after, strict=True)]
        padded = x.new_zeros(x.shape[0], *lengths, x.shape[1]).movedim(-1, 1)
        # Each offset of the window meets each input at most once: the sum over offsets is the adjoint.
        for offset in every(*map(range, self.kernel)):
            where = [
                slice(o * d, o * d + (n - 1) * s + 1, s)
                for o, d, s, n in zip(offset, self.dilation, self.stride, size, strict=True)
            ]
            padded[(slice(None), slice(None), *where)] += columns[(..., *offset)]
        inside = [slice(b, b + n) for b, n in zip(self.before, x.shape[2:], strict=True)]
        return padded[(slice(None), slice(None), *inside)]

    def to_weights(self, d: Tensor, x: Tensor, w: Tensor) -> Tensor:
        if not self._patches(x):
            return self._adjoint(d, w, x, samples=False)
        columns, _ = self.columns(x, w.shape[0])
        gradient = torch.bmm(self._by_client(d, w.shape[0]).transpose(1, 2), columns)
        return gradient.view(*w.shape[:2], *self.kernel, w.shape[2]).movedim(-1, 2)

    def step(self, d: Tensor, x: Tensor, w: Tensor, keep: float, lr: float, in_place: bool) -> Tensor:
        """keep·W - lr·(gradient)."""
        gradient = self.to_weights(d, x, w)
        return (w.mul_(keep) if in_place else w * keep).sub_(gradient, alpha=lr)

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

    def _by_client(self, d: Tensor, clients: int) -> Tensor:
        return d.movedim(1, -1).reshape(clients, -1, d.shape[1])

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

    def _adjoint(self, d: Tensor, w: Tensor, x: Tensor, *, samples: bool) -> Tensor:
        padding, padded = self._symmetric(x)
        found = []
        for one_d, one_x, filters in zip(d.chunk(w.shape[0]), padded.chunk(w.shape[0]), w, strict=True):
            both = torch.ops.aten.convolution_backward(
                one_d, one_x, filters, None, self.stride, padding, self.dilation, False,
                (0,) * len(padding), self.groups, [samples, not samples, False],
            )  # fmt: skip
            found.append(both[0] if samples else both[1])
        if not samples:
            return torch.stack(found)
        whole = torch.cat(found)
        inside = [slice(b, b + n) for b, n in zip(self.before, x.shape[2:], strict=True)]
        return whole if padded is x else whole[(slice(None), slice(None), *inside)]


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def product(operation: Linear | Convolution, x: Tensor, w: Tensor) -> Tensor:
    """The operation on folded samples and a stack of weights; gradients flow to both."""
    result: Tensor = _Product.apply(lowered(x), lowered(w), operation)
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
        to_samples, to_weights, _ = ctx.needs_input_grad
        return (
            ctx.operation.to_samples(d, w, x) if to_samples else None,
            ctx.operation.to_weights(d, x, w) if to_weights else None,
            None,
        )


def _each(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) * (axes // len(value)) if isinstance(value, (tuple, list)) else (int(value),) * axes
