"""Local SGD as a part of the backward pass.

Plain SGD needs a weight's gradient once, to subtract it. So the backward pass of a layer can step the
layer's weights itself, and the gradient of C clients' weights is never stored: a third of the memory
traffic of "form the gradients, then step". Two forms, both exact:

- dense: each client's W is stepped in place, W <- keep·W - lr·DᵀX, one batched product;
- factored: in one round a client takes S steps of n rows, so its update has rank <= S·n. Where that is
  small against W, all clients share the W they were sent, and each keeps the rows X_h of its steps and
  D_h, the gradients at the outputs times -lr/s: its weights are s·(W + Σ D_hᵀX_h), with s the product of
  the decays so far.

Clients of several runs may train at once: R models, the same number of clients from each, run after run.
Where only sums are wanted, ``total`` forms them without the clients' own weights: of factored ones, by
a product over the rows of many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fot.engines.vectorized import kernels
from fot.engines.vectorized.aside import nothing
from fot.engines.vectorized.pace import NeedsAutograd, Pace, spread, total_change
from fot.engines.vectorized.products import Convolution, Linear, lowered, owned
from fot.engines.vectorized.tail import Tail, fused

TILE, ENOUGH = 128, 200
"""The side of a product's tile on a GPU, and how many of them fill one."""


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
        self.form: _Dense | _Filters | _Factored | None = None
        self.waiting = False

    def apply(self, operation: Linear | Convolution, x: Tensor, tail: Tail = Tail()) -> Tensor:  # noqa: B008
        """The layer's output and what follows; its backward pass steps the weights, and the tail's bias."""
        if self.waiting:
            self.refuse()
        if tail.bias is not None and tail.bias.waiting:
            tail.bias.refuse()
        if self.form is None:
            self.form = self._choose(operation, x)
        self.waiting = torch.is_grad_enabled()
        if tail.bias is not None:
            tail.bias.waiting = self.waiting
        y: Tensor = _Stepped.apply(lowered(x), self.tick, tail.other, self, operation, tail)  # type: ignore[no-untyped-call]
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

    def _choose(self, operation: Linear | Convolution, x: Tensor) -> _Dense | _Filters | _Factored:
        if isinstance(operation, Convolution):
            form = _Filters if operation.by_kernels(x) else _Dense
            return form(self.sent, self.clients)
        outputs, inputs = self.sent.shape[1:]
        rows = round(x.numel() / inputs / self.clients * self.pace.steps)
        dense, factored = inputs * outputs, rows * (inputs + outputs)
        if kernels.at_hand(x.device):
            # A GPU waits for memory. Dense weights are read twice a step and written once. Of the factors
            # half is there on average, and is read once, or twice for the samples' gradient too: where that
            # is half as much, more calls pay.
            fewer = factored * (1 + x.requires_grad) < 3 * dense
        else:
            fewer = 2 * factored < dense
        keep = self.pace.keep
        if isinstance(keep, float) and keep == 0:  # by which factors would be divided
            fewer = False
        return _Factored(self.sent, self.clients, rows) if fewer else _Dense(self.sent, self.clients)


class _Stepped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tick: Tensor, other: Tensor | None, local: LocalWeight, operation: Any,
        tail: Tail,
    ) -> Tensor:  # fmt: skip
        assert local.form is not None
        z, rest = local.form.forward(operation, x, tail)
        y, places = rest.forward(z, local.clients)
        y = owned(y)
        ctx.save_for_backward(x, y if tail.relu else None, places)
        ctx.local, ctx.operation, ctx.tail, ctx.shape = local, operation, tail, z.shape
        return y

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (x, y, places), local, tail = ctx.saved_tensors, ctx.local, ctx.tail
        d = tail.backward(d, y, places, ctx.shape, local.clients)
        below = local.form.backward(ctx.operation, d, x, local.pace, ctx.needs_input_grad[0])
        local.waiting = False
        if tail.bias is not None:
            tail.bias.waiting = False
        return below, None, d if ctx.needs_input_grad[2] else None, None, None, None


class _Dense:
    def __init__(self, sent: Tensor, clients: int) -> None:
        self.sent = sent
        self.weight = spread(sent, clients)
        self.own = len(sent) > 1
        """Whether clients have weights of their own yet: before the first step one model serves all."""

    def forward(self, operation: Linear | Convolution, x: Tensor, tail: Tail) -> tuple[Tensor, Tail]:
        """The layer's output with as much of its tail as goes with it, and the rest of the tail."""
        if isinstance(operation, Linear) and fused(x):
            return tail.of_product(x, self.weight)
        return operation.forward(x, self.weight.to(x.dtype)), tail

    def backward(
        self, operation: Linear | Convolution, d: Tensor, x: Tensor, pace: Pace, samples: bool
    ) -> Tensor | None:
        if isinstance(operation, Linear) and not isinstance(pace.keep, Tensor):
            below, self.weight = operation.backward(
                d, x, self.weight, samples, pace.keep, pace.lr, in_place=self.own
            )
        else:
            below, gradient = operation.adjoint(d, x, self.weight.to(d.dtype), samples, weights=True)
            assert gradient is not None
            keep = self.kept(pace)
            kept = self.weight.mul_(keep) if self.own else self.weight * keep
            self.weight = kept.sub_(gradient, alpha=pace.lr)
        self.own = True
        return below

    def kept(self, pace: Pace) -> float:
        """What the step keeps of the weights; where this is each client's own, it is done here already."""
        if not isinstance(pace.keep, Tensor):
            return pace.keep
        self.weight = self.weight * pace.keep.reshape(-1, *[1] * (self.weight.dim() - 1))
        self.own = True
        return 1.0

    def stack(self) -> Tensor:
        return self.weight

    def total(self) -> Tensor:
        return total_change(self.weight, self.sent)


class _Filters(_Dense):
    """Dense filters of a convolution, as its kernels want them: inputs last, and outputs last besides."""

    def __init__(self, sent: Tensor, clients: int) -> None:
        super().__init__(sent.movedim(2, -1).contiguous(), clients)
        self.clients = clients
        self.turned: Tensor | None = None
        self.stepped: Callable[[], None] = nothing
        """Waits for the last step."""

    def forward(self, operation: Linear | Convolution, x: Tensor, tail: Tail) -> tuple[Tensor, Tail]:
        assert isinstance(operation, Convolution)
        self.stepped()
        return operation.maps(x, self.weight.to(x.dtype)), tail

    def backward(
        self, operation: Linear | Convolution, d: Tensor, x: Tensor, pace: Pace, samples: bool
    ) -> Tensor | None:
        assert isinstance(operation, Convolution)
        below, shared = None, not self.own
        if samples:
            if self.turned is None:
                turned = (self.sent if shared else self.weight).transpose(1, 4).contiguous()
                self.turned = spread(turned, self.clients) if shared else turned
            below = operation.samples_gradient(d, x, self.turned.to(d.dtype))
        keep = self.kept(pace)
        old = self.weight
        if not self.own:
            self.weight, self.own = torch.empty_like(old, memory_format=torch.contiguous_format), True
        if shared and self.turned is not None:  # what all were sent is not written to
            self.turned = torch.empty_like(self.turned, memory_format=torch.contiguous_format)
        self.stepped = pace.aside.do(operation.step, d, x, old, keep, pace.lr, self.weight, self.turned)
        return below

    def stack(self) -> Tensor:
        self.stepped()
        return self.weight.movedim(-1, 2)

    def total(self) -> Tensor:
        self.stepped()
        return total_change(self.weight, self.sent).movedim(-1, 2)


class _Factored:
    def __init__(self, sent: Tensor, clients: int, rows: int) -> None:
        self.sent = sent
        self.clients = clients
        self.x = sent.new_empty(clients, rows, sent.shape[2])
        self.d = sent.new_empty(clients, rows, sent.shape[1])
        self.scale: float | Tensor = 1.0
        """s, or ``[C, 1, 1]`` where some clients stayed put in a step."""
        self.filled = 0

    def forward(self, operation: Linear, x: Tensor, tail: Tail) -> tuple[Tensor, Tail]:
        return self._corrected(x, self.sent.mT, self.x, self.d, tail)

    def backward(self, operation: Linear, d: Tensor, x: Tensor, pace: Pace, samples: bool) -> Tensor | None:
        below = self._corrected(d, self.sent, self.d, self.x, Tail())[0] if samples else None
        keep = pace.keep
        self.scale = self.scale * (keep.reshape(-1, 1, 1) if isinstance(keep, Tensor) else keep)
        factor = -pace.lr / self.scale
        x, d = (rows.reshape(self.clients, -1, rows.shape[-1]) for rows in (x, d))
        here = slice(self.filled, self.filled + x.shape[1])
        if kernels.at_hand(x.device):  # torch copies into a part of a table number by number
            from fot.engines.vectorized.kernels import linear

            linear.append(x, self.x, self.filled)
            linear.append(d, self.d, self.filled, self._of_each(factor))
        else:
            self.x[:, here] = x
            torch.mul(d, factor, out=self.d[:, here])
        self.filled = here.stop
        return below

    def _corrected(
        self, rows: Tensor, models: Tensor, first: Tensor, second: Tensor, tail: Tail
    ) -> tuple[Tensor, Tail]:
        """s·(rows·M + (rows·firstᵀ)·second): forward with (X_h, D_h), backward with (D_h, X_h)."""
        shape, kind = (*rows.shape[:-1], models.shape[-1]), rows.dtype
        # Clients of one model share it: their rows make one large product.
        shared = rows.reshape(len(models), -1, rows.shape[-1]) @ models.to(kind)
        result = shared.view(self.clients, -1, models.shape[-1])
        if not self.filled:  # and no step was taken: s is 1
            return result.view(shape), tail
        own = rows.reshape(self.clients, -1, rows.shape[-1])
        first, second = (table[:, : self.filled] for table in (first, second))
        if fused(rows):
            met, _ = Tail().of_product(own, first)
            result, tail = tail.of_product(met, second.mT, result, self._of_each(self.scale))
            return result.view(shape), tail
        met = torch.bmm(own, first.mT.to(kind))
        if isinstance(self.scale, Tensor):
            result.baddbmm_(met, second.to(kind)).mul_(self.scale)
        else:
            result.baddbmm_(met, second.to(kind), beta=self.scale, alpha=self.scale)
        return result.view(shape), tail

    def _of_each(self, factor: float | Tensor) -> Tensor | None:
        """A factor as kernels read it, ``[C, 1, 1]``; None for 1."""
        if isinstance(factor, Tensor):
            return factor
        return None if factor == 1 else self.sent.new_full((self.clients, 1, 1), factor)

    def stack(self) -> Tensor:
        x, d = self.x[:, : self.filled], self.d[:, : self.filled]
        return torch.baddbmm(spread(self.sent, len(x)), d.mT, x).mul_(self.scale)

    def total(self) -> Tensor:
        """Σ s·(W + Σ D_hᵀX_h) - W over each model's clients: one product over the rows of many."""
        models, parts = len(self.sent), self._parts()
        x, d = self.x[:, : self.filled], self.d[:, : self.filled]
        factor = 1.0
        if isinstance(self.scale, Tensor):
            d = d * self.scale
        else:
            factor = self.scale
        products = torch.bmm(
            d.reshape(models * parts, -1, d.shape[-1]).mT, x.reshape(models * parts, -1, x.shape[-1])
        )
        along = total_change(products, torch.zeros_like(self.sent)) if parts > 1 else products.double()
        scale = x.new_ones(self.clients, 1, 1, dtype=torch.float64) * self.scale
        scale = scale.view(models, -1, 1)
        decayed = self.sent.double() * (scale.sum(1, keepdim=True) - scale.shape[1])
        return decayed.add_(along, alpha=factor)

    def _parts(self) -> int:
        """Parts of a model's clients that are summed on their own: a GPU has room for many tiles at once."""
        models, outputs, inputs = self.sent.shape
        clients = self.clients // models
        if not kernels.at_hand(self.sent.device):
            return 1
        tiles = models * -(-outputs // TILE) * -(-inputs // TILE)
        return next((n for n in range(1, clients) if clients % n == 0 and tiles * n >= ENOUGH), clients)
