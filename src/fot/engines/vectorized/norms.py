"""Normalisation layers of a folded cohort: each client's statistics and affine parameters are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fot.engines.vectorized import kernels
from fot.engines.vectorized.pending import Pending
from fot.engines.vectorized.products import maps, owned, unmapped
from fot.engines.vectorized.stacked import CannotBatch, Stacked, per_channel, raw
from fot.engines.vectorized.tail import Tail

if TYPE_CHECKING:
    from fot.engines.vectorized.folding import Fold


def batch_norm(
    fold: Fold,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch-norm on each client's own statistics, padding left out."""
    if training and running_mean is not None and not isinstance(running_mean, Stacked):
        raise CannotBatch("batch_norm would move running statistics that clients share")
    if training and fold.valid is None and running_mean is None and kernels.at_hand(x.device):
        flat = [_of_all(fold, t) for t in (weight, bias)]
        own = [t if t is None else t.view(fold.clients, -1) for t in flat]
        z = x if x.dim() in (2, 4) else x.flatten(2).unsqueeze(-1)  # kernels take maps, or what has no axes

        def normalised(tail: Tail) -> Tensor:
            y: Tensor = _Normalised.apply(z, *own, tail.other, fold.clients, eps, tail)  # type: ignore[no-untyped-call]
            return y

        result = Pending.of(z.shape, z, normalised, Tail())
        return result if z is x else result.value().view(x.shape)
    if training and fold.valid is None:
        parts = (running_mean, running_var, weight, bias)
        return _by_channels(fold, x, [_of_all(fold, t) for t in parts], momentum, eps)
    if not training:
        if running_mean is None or running_var is None:
            raise CannotBatch("batch_norm has no statistics to use")
        mean, var = (_channels(fold, t, x.dim()) for t in (running_mean, running_var))
    else:
        mean, var = _moments(fold, x)
        if isinstance(running_mean, Stacked) and isinstance(running_var, Stacked):
            _track(fold, raw(running_mean), raw(running_var), mean, var, x, momentum)
    y = (fold.split(x) - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        y = y * _channels(fold, weight, x.dim())
    if bias is not None:
        y = y + _channels(fold, bias, x.dim())
    return y.flatten(0, 1)


class _Normalised(torch.autograd.Function):
    """Batch-norm on each client's own statistics by kernels, and what follows with it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, other: Tensor | None, clients: int,
        eps: float, tail: Tail,
    ) -> Tensor:  # fmt: skip
        from fot.engines.vectorized.kernels import normal

        z = maps(x)
        weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
        known = normal.statistics(z, clients, weight, bias, eps)
        y, places = tail.forward(x, clients, gain=known.gain, shift=known.shift)
        y = owned(y)
        ctx.save_for_backward(z, y if tail.relu else None, places, *known)
        ctx.clients, ctx.tail, ctx.shape = clients, tail, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        from fot.engines.vectorized.kernels import normal

        z, y, places, *known = ctx.saved_tensors
        d = ctx.tail.backward(d, y, places, ctx.shape, ctx.clients)
        below, of_weight, of_bias = normal.backward(maps(d), z, normal.Statistics(*known))
        below = unmapped(below, ctx.shape)
        wanted = ctx.needs_input_grad
        return (
            below, of_weight if wanted[1] else None, of_bias if wanted[2] else None, d if wanted[3] else None,
            None, None, None,
        )  # fmt: skip


def _by_channels(fold: Fold, x: Tensor, parts: list[Tensor | None], momentum: float, eps: float) -> Tensor:
    """Where all rows count, the library's own batch-norm, with the clients' channels side by side."""
    mean, var, weight, bias = parts
    split = fold.split(x)
    clients, rows, channels, *size = split.shape
    beside = split.transpose(0, 1).reshape(rows, clients * channels, *size)
    y = F.batch_norm(beside, mean, var, weight, bias, True, momentum, eps)
    return y.view(rows, clients, channels, *size).transpose(0, 1).reshape(x.shape)


def _of_all(fold: Fold, tensor: Tensor | None) -> Tensor | None:
    """A parameter of every client, one after another, ``[C·F]``; of a stack a view, which can be moved."""
    if tensor is None:
        return None
    flat: Tensor = raw(tensor).view(-1) if isinstance(tensor, Stacked) else tensor.repeat(fold.clients)
    return flat


def _moments(fold: Fold, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance of each client's channels, ``[C, 1, F, 1, ...]``."""
    split = fold.split(x)
    over = [1, *range(3, split.dim())]
    _, share = _counts(fold, x)
    mean = (split * share).sum(over, keepdim=True)
    return mean, ((split - mean).square() * share).sum(over, keepdim=True)


def _counts(fold: Fold, x: Tensor) -> tuple[Tensor, Tensor]:
    """How many values of a channel count, ``[C, 1, ...]``, and the share of each, ``[C, B, 1, ...]``."""
    values = x[0, 0].numel()
    split = fold.split(x)
    assert fold.valid is not None
    valid = fold.split(fold.valid).to(x.dtype)
    counts = valid.sum(1, keepdim=True) * values
    shape = [1] * (split.dim() - 2)
    share = valid / counts.clamp(min=1)
    return counts.reshape(-1, 1, *shape), share.reshape(*share.shape, *shape)


def _track(
    fold: Fold, means: Tensor, variances: Tensor, mean: Tensor, var: Tensor, x: Tensor, rate: float
) -> None:
    """Move each client's running statistics, as torch does: the variance by its unbiased estimate."""
    counts, _ = _counts(fold, x)
    moved = rate * (counts > 0).to(x.dtype)  # a client without samples in this step stays where it is
    unbiased = var * counts / (counts - 1).clamp(min=1)
    with torch.no_grad():
        for running, now in ((means, mean), (variances, unbiased)):
            running.add_((moved * (now - running.view_as(now))).view_as(running))


def _channels(fold: Fold, tensor: Tensor, rank: int) -> Tensor:
    stack = raw(tensor) if isinstance(tensor, Stacked) else tensor.unsqueeze(0)
    return stack.reshape(stack.shape[0], 1, -1, *[1] * (rank - 2))


def layer_norm(
    fold: Fold,
    x: Tensor,
    shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer-norm of each sample, then each client's own scale and shift."""
    return _affine(fold, F.layer_norm(x, shape, eps=eps), weight, bias)


def rms_norm(
    fold: Fold, x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMS-norm of each sample, then each client's own scale."""
    return _affine(fold, F.rms_norm(x, shape, eps=eps), weight, None)


def group_norm(
    fold: Fold,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Group-norm of each sample, then each client's own scale and shift."""
    weight, bias = (None if t is None else per_channel(t, x.dim() - 2) for t in (weight, bias))
    return _affine(fold, F.group_norm(x, groups, eps=eps), weight, bias)


def instance_norm(
    fold: Fold, x: Tensor, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Instance-norm of each sample, then each client's own scale and shift."""
    weight, bias = (None if t is None else per_channel(t, x.dim() - 2) for t in (weight, bias))
    if running_mean is not None or running_var is not None:
        raise CannotBatch("instance_norm with running statistics has no rule")
    y = F.instance_norm(x, running_mean, running_var, None, None, use_input_stats, momentum, eps)
    return _affine(fold, y, weight, bias)


def _affine(fold: Fold, y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else fold.elementwise(torch.mul, (y, weight), {})
    return y if bias is None else fold.elementwise(torch.add, (y, bias), {})
