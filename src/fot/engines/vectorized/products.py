"""The two products in which nearly all of a network's arithmetic lies, for a stack of weights.

Each is bilinear in samples and weights, and so is described by three maps: forward, the adjoint to the
samples, and the adjoint to the weights. ``x`` is folded, ``[C·B, ...]``; ``w`` is a stack, ``[C, ...]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fot.engines.vectorized import kernels

MOST_ROWS = 64
"""Rows of a client with which a kernel goes back through a linear layer: a tile must hold them."""

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

    def backward(
        self, d: Tensor, x: Tensor, w: Tensor, samples: bool, keep: float, lr: float, in_place: bool
    ) -> tuple[Tensor | None, Tensor]:
        """The gradient at the samples, and keep·W - lr·dᵀx without a gradient of the weights in between."""
        own_d, own_x = rows(d, w), rows(x, w)
        if kernels.at_hand(d.device) and own_d.shape[1] <= MOST_ROWS:
            from fot.engines.vectorized.kernels import linear

            out = w if in_place else torch.empty_like(w, memory_format=torch.contiguous_format)
            below = linear.backward(own_d.contiguous(), own_x.contiguous(), w, keep, lr, out, samples)
            return None if below is None else below.view(x.shape), out
        below = torch.bmm(own_d, w.to(d.dtype)).view(x.shape) if samples else None
        add = w.baddbmm_ if in_place else w.baddbmm
        return below, add(own_d.to(w.dtype).mT, own_x.to(w.dtype), beta=keep, alpha=-lr)


def rows(x: Tensor, w: Tensor) -> Tensor:
    """A folded tensor as one matrix a client."""
    return x.reshape(w.shape[0], -1, x.shape[-1])


class Convolution:
    """A convolution with each client's own filters.

    On a GPU kernels of our own do it for the whole cohort (``kernels/convolve.py``). Elsewhere, and for what
    they do not know (one axis or three, groups, dilation), the library convolves, client by client.
    """

    def __init__(
        self, kernel: Sequence[int], stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> None:
        axes = len(kernel) - 1  # the kernel's own axes come after its input channels
        self.kernel = tuple(kernel[1:])
        self.stride, self.dilation = _each(stride, axes), _each(dilation, axes)
        if padding == "same":
            total = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            self.before, self.after = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
        else:
            self.before = self.after = _each(0 if padding == "valid" else padding, axes)
        self.groups = groups

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        if self.by_kernels(x):
            return self.maps(x, w.movedim(2, -1).contiguous())
        padding, x = self._symmetric(x)
        clients = zip(x.chunk(w.shape[0]), w, strict=True)
        return _joined([self._native(one, filters, padding) for one, filters in clients])

    def adjoint(self, d: Tensor, x: Tensor, w: Tensor, samples: bool, weights: bool) -> Adjoint:
        """The gradients at the samples and at the filters."""
        if not self.by_kernels(x):
            return self._native_adjoint(d, x, w, samples, weights)
        at_samples = self.samples_gradient(d, x, w.permute(0, 2, 3, 4, 1).contiguous()) if samples else None
        if not weights:
            return at_samples, None
        filters = w.movedim(2, -1).contiguous()
        gradient = torch.empty_like(filters)
        self.step(d, x, filters, 0.0, -1.0, gradient, None)
        return at_samples, gradient.movedim(-1, 2)

    def by_kernels(self, x: Tensor) -> bool:
        """Whether the kernels do this convolution, on these samples."""
        plain = len(self.kernel) == 2 and self.groups == 1 and set(self.dilation) == {1}
        return plain and kernels.at_hand(x.device)

    def size(self, x: Tensor) -> tuple[int, ...]:
        """The size of the maps."""
        sides = zip(
            x.shape[2:], self.before, self.after, self.kernel, self.stride, self.dilation, strict=True
        )
        return tuple((n + b + a - d * (k - 1) - 1) // s + 1 for n, b, a, k, s, d in sides)

    def maps(self, x: Tensor, filters: Tensor) -> Tensor:
        """The maps by kernel; ``filters`` are ``[C, O, kh, kw, I]``."""
        from fot.engines.vectorized.kernels import convolve

        high, wide = self.size(x)
        y = convolve.forward(maps(x), filters, self._window(), (high, wide))
        return unmapped(y, x.shape)

    def samples_gradient(self, d: Tensor, x: Tensor, turned: Tensor) -> Tensor:
        """The gradient at the samples by kernel; ``turned`` are filters ``[C, I, kh, kw, O]``."""
        from fot.engines.vectorized.kernels import convolve

        size = (x.shape[2], x.shape[3])
        below = convolve.samples_gradient(maps(d), turned, self._window(), size)
        return unmapped(below, x.shape)

    def step(
        self, d: Tensor, x: Tensor, w: Tensor, keep: float, lr: float, out: Tensor, turned: Tensor | None
    ) -> None:
        """keep·W - lr·(the gradient at the filters) by kernel, as ``convolve.step`` says."""
        from fot.engines.vectorized.kernels import convolve

        convolve.step(maps(d), maps(x), w, self._window(), keep, lr, out, turned)

    def _window(self) -> kernels.Window:
        (kh, kw), (sh, sw), (above, left) = self.kernel, self.stride, self.before
        return kernels.Window((kh, kw), (sh, sw), (above, left))

    def _inside(self, x: Tensor) -> tuple[slice, ...]:
        inner = (slice(b, b + n) for b, n in zip(self.before, x.shape[2:], strict=True))
        return (slice(None), slice(None), *inner)

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
        return at_samples, _joined([found[1].unsqueeze(0) for found in both]) if weights else None


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unmapped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """What kernels give, as the module expects it: of a shape like that one, up to the sizes of its maps."""
    return y.permute(0, 3, 1, 2) if len(shape) == 4 else y.view(shape)


def owned(y: Tensor) -> Tensor:
    """The same numbers, as a tensor of its own and no view.

    Only such a one may be changed in place (``nn.ReLU(inplace=True)``) where a ``Function`` has made it.
    """
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def maps(x: Tensor) -> Tensor:
    """As kernels read them, channels last; what a linear layer gives are maps of one pixel."""
    if x.dim() == 4:
        return x.permute(0, 2, 3, 1).contiguous()
    # Rows that are a slice of wider ones could be reshaped as they lie, and kernels read them side by side.
    return x.reshape(-1, 1, 1, x.shape[-1] if x.dim() > 1 else 1).contiguous()


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
        return owned(operation.forward(x, w))

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        return (*ctx.operation.adjoint(d, x, w, *ctx.needs_input_grad[:2]), None)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) * (axes // len(value)) if isinstance(value, (tuple, list)) else (int(value),) * axes
