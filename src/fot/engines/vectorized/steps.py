"""Local SGD as a part of the backward pass.

Plain SGD needs a weight's gradient once, to subtract it. So the backward pass of a layer can step the
layer's weights itself, and the gradient of C clients' weights is never stored: a third of the memory
traffic of "form the gradients, then step". Two forms, both exact:

- dense: each client's W is stepped in place, W <- keep·W - lr·DᵀX, one batched product;
- factored: in one round a client takes S steps of n rows, so its update has rank <= S·n. Where that is
  small against W, all clients share the W they were sent, and each keeps the rows X_h and output
  gradients D_h of its steps: its weights are s·(W - lr·Σ D_hᵀX_h), with s the product of the decays.

Clients of several runs may train at once: R models, the same number of clients from each, run after run.
Where only sums are wanted, ``total`` forms them without the clients' own weights: of factored ones, by
one product over the rows of all clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fot.aggregation.plain import sum_rows
from fot.engines.vectorized.products import Convolution, Linear, lowered


class NeedsAutograd(Exception):
    """A weight is used more than once, or otherwise than by its layer, and cannot be stepped backward."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass
class Pace:
    """How far the current step goes: the same for all layers."""

    lr: float
    steps: int
    """Steps in the round: what a factored history must hold."""
    keep: float | Tensor = 1.0
    """1 - lr·(weight decay); ``[C]`` where some clients have no samples in this step and stay put."""


class LocalWeight:
    """The clients' own weights of one linear or convolutional layer, through one round.

    Examples
    --------
    Two clients, one step each on their own sample; the layer starts at zero and D is 1 everywhere.

    >>> local = LocalWeight("fc", torch.zeros(1, 1, 2), clients=2, pace=Pace(lr=0.5, steps=1))
    >>> x, tick = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), local.tick
    >>> _ = torch.autograd.grad(local.apply(Linear(), x).sum(), tick, allow_unused=True)
    >>> local.stack().tolist(), local.total().tolist()
    ([[[-0.5, -1.0]], [[-1.5, -2.0]]], [[[-2.0, -3.0]]])
    """

    def __init__(
        self, name: str, weight: Tensor, clients: int, pace: Pace, tick: Tensor | None = None
    ) -> None:
        self.name = name
        self.sent = weight
        """What the clients were sent, ``[R, *shape]``."""
        self.clients = clients
        self.pace = pace
        # Autograd visits what leads to a tensor it was asked about: every layer hangs on this one.
        self.tick = torch.zeros((), device=weight.device, requires_grad=True) if tick is None else tick
        self.form: _Dense | _Factored | None = None
        self.waiting = False

    def apply(self, operation: Linear | Convolution, x: Tensor, bias: LocalBias | None = None) -> Tensor:
        """The layer's output; its backward pass steps the weights, and the bias where it is given."""
        if self.waiting:
            self.refuse()
        if bias is not None and bias.waiting:
            bias.refuse()
        if self.form is None:
            self.form = self._choose(operation, x)
        self.waiting = torch.is_grad_enabled()
        if bias is not None:
            bias.waiting = self.waiting
        y: Tensor = _Stepped.apply(lowered(x), self.tick, self, operation, bias)  # type: ignore[no-untyped-call]
        return y

    def refuse(self) -> None:
        """Say that this weight must be left to autograd."""
        raise NeedsAutograd(self.name)

    def stack(self) -> Tensor:
        """The clients' weights now, ``[C, *shape]``."""
        if self.form is None:  # a layer that was not used
            return spread(self.sent, self.clients).clone()
        return self.form.stack()

    def total(self) -> Tensor:
        """The sum of the clients' changes, ``[R, *shape]``, in float64."""
        if self.form is None:
            return torch.zeros_like(self.sent, dtype=torch.float64)
        return self.form.total()

    def _choose(self, operation: Linear | Convolution, x: Tensor) -> _Dense | _Factored:
        if isinstance(operation, Linear):
            outputs, inputs = self.sent.shape[1:]
            rows = x.numel() // inputs // self.clients * self.pace.steps
            if 2 * rows * (inputs + outputs) < inputs * outputs:
                return _Factored(self.sent, self.clients, rows)
        return _Dense(self.sent, self.clients)


class LocalBias:
    """The clients' own biases of a linear layer whose weights are stepped during the backward pass."""

    def __init__(self, name: str, bias: Tensor, clients: int, pace: Pace) -> None:
        self.name = name
        self.pace = pace
        self.sent = bias
        self.values = spread(bias, clients).clone()
        self.waiting = False

    def refuse(self) -> None:
        """Say that this bias must be left to autograd."""
        raise NeedsAutograd(self.name)

    def step(self, d: Tensor) -> None:
        """b <- keep·b - lr·Σ d, the sum over a client's rows ``[C, n, out]``."""
        keep = self.pace.keep
        self.values.mul_(keep[:, None] if isinstance(keep, Tensor) else keep).sub_(
            d.sum(1), alpha=self.pace.lr
        )
        self.waiting = False

    def stack(self) -> Tensor:
        """The clients' biases now, ``[C, out]``."""
        return self.values

    def total(self) -> Tensor:
        """The sum of the clients' changes, ``[R, out]``, in float64."""
        return total_change(self.values, self.sent)


def spread(sent: Tensor, clients: int) -> Tensor:
    """What each client was sent, ``[C, *shape]``, of the R models ``[R, *shape]``; of one model a view."""
    if len(sent) == 1:
        return sent.expand(clients, *sent.shape[1:])
    return sent.repeat_interleave(clients // len(sent), dim=0)


def total_change(stack: Tensor, sent: Tensor) -> Tensor:
    """The sum over each model's clients of what they changed, in float64: ``[C, ...]`` to ``[R, ...]``."""
    clients = len(stack) // len(sent)
    held = torch.stack([sum_rows(own) for own in torch.split(stack, clients)])
    return held.sub_(sent, alpha=clients)


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tick: Tensor, local: LocalWeight, operation: Any, bias: LocalBias | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.local, ctx.operation, ctx.bias = local, operation, bias
        assert local.form is not None
        y = local.form.forward(operation, x, local.pace)
        if bias is not None:
            y.view(local.clients, -1, y.shape[-1]).add_(bias.values.unsqueeze(1))
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (x,), local = ctx.saved_tensors, ctx.local
        below = local.form.backward(ctx.operation, d, x, local.pace, ctx.needs_input_grad[0])
        local.waiting = False
        if ctx.bias is not None:
            ctx.bias.step(d.reshape(local.clients, -1, d.shape[-1]).to(ctx.bias.values.dtype))
        return below, None, None, None, None


class _Dense:
    def __init__(self, sent: Tensor, clients: int) -> None:
        self.sent = sent
        self.weight = spread(sent, clients)
        self.own = len(sent) > 1
        """Whether clients have weights of their own yet: before the first step one model serves all."""

    def forward(self, operation: Linear | Convolution, x: Tensor, pace: Pace) -> Tensor:
        return operation.forward(x, self.weight.to(x.dtype))

    def backward(
        self, operation: Linear | Convolution, d: Tensor, x: Tensor, pace: Pace, samples: bool
    ) -> Tensor | None:
        fused = isinstance(operation, Linear)
        below, gradient = operation.adjoint(d, x, self.weight.to(d.dtype), samples, weights=not fused)
        keep, kind = pace.keep, self.weight.dtype
        if isinstance(keep, Tensor):
            self.weight = self.weight * keep.reshape(-1, *[1] * (self.weight.dim() - 1))
            keep, self.own = 1.0, True
        if isinstance(operation, Linear):
            self.weight = operation.step(
                d.to(kind), x.to(kind), self.weight, keep, pace.lr, in_place=self.own
            )
        elif gradient is not None:
            kept = self.weight.mul_(keep) if self.own else self.weight * keep
            self.weight = kept.sub_(gradient, alpha=pace.lr)
        self.own = True
        return below

    def stack(self) -> Tensor:
        return self.weight

    def total(self) -> Tensor:
        return total_change(self.weight, self.sent)


class _Factored:
    def __init__(self, sent: Tensor, clients: int, rows: int) -> None:
        self.sent = sent
        self.x = sent.new_empty(clients, rows, sent.shape[2])
        self.d = sent.new_empty(clients, rows, sent.shape[1])
        self.scale = sent.new_ones(clients, 1, 1)
        self.filled = 0
        self.lr = 0.0

    def forward(self, operation: Linear, x: Tensor, pace: Pace) -> Tensor:
        return self._corrected(x, self.sent.mT, self.x, self.d, pace)

    def backward(self, operation: Linear, d: Tensor, x: Tensor, pace: Pace, samples: bool) -> Tensor | None:
        below = self._corrected(d, self.sent, self.d, self.x, pace) if samples else None
        keep, clients = pace.keep, len(self.scale)
        self.scale = self.scale * (keep.reshape(-1, 1, 1) if isinstance(keep, Tensor) else keep)
        n = x.numel() // x.shape[-1] // clients
        here = slice(self.filled, self.filled + n)
        self.x[:, here] = x.reshape(clients, n, -1)
        self.d[:, here] = d.reshape(clients, n, -1) / self.scale
        self.filled += n
        self.lr = pace.lr
        return below

    def _corrected(self, rows: Tensor, models: Tensor, first: Tensor, second: Tensor, pace: Pace) -> Tensor:
        """s·(rows·M - lr·(rows·firstᵀ)·second): forward with (X_h, D_h), backward with (D_h, X_h)."""
        shape, clients, kind = (*rows.shape[:-1], models.shape[-1]), len(self.scale), rows.dtype
        # Clients of one model share it: their rows make one large product.
        shared = rows.reshape(len(models), -1, rows.shape[-1]) @ models.to(kind)
        result = shared.view(clients, -1, models.shape[-1])
        if self.filled:
            met = torch.bmm(rows.reshape(clients, -1, rows.shape[-1]), first[:, : self.filled].mT.to(kind))
            result = result.baddbmm_(met, second[:, : self.filled].to(kind), alpha=-pace.lr)
        return result.mul_(self.scale).view(shape)

    def stack(self) -> Tensor:
        x, d = self.x[:, : self.filled], self.d[:, : self.filled]
        whole = spread(self.sent, len(x))
        return torch.baddbmm(whole, d.mT, x, alpha=-self.lr).mul_(self.scale)

    def total(self) -> Tensor:
        """Σ s·(W - lr·Σ D_hᵀX_h) - W over each model's clients: one product over all their rows."""
        models = len(self.sent)
        x = self.x[:, : self.filled].reshape(models, -1, self.x.shape[-1])
        d = (self.d[:, : self.filled] * self.scale).reshape(models, -1, self.d.shape[-1])
        scale = self.scale.view(models, -1, 1)
        decayed = self.sent.double() * (scale.sum(1, keepdim=True, dtype=torch.float64) - scale.shape[1])
        return decayed.sub_(torch.bmm(d.mT, x), alpha=self.lr)
