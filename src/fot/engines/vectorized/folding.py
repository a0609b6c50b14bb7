"""Folding: one forward pass of a module serves a whole cohort.

The C clients of a cohort hold B samples each. Their samples are folded into one batch of C·B rows,
client after client, and each parameter becomes a stack ``[C, *shape]``, one slice a client. Whatever
works on samples alone (activations, pooling, reshaping) then runs as it stands. Only operations that
meet a parameter must know that slice c belongs to rows cB, ..., cB + B - 1; the mode ``Fold`` catches
these and gives each its rule. An operation without a rule raises ``CannotBatch``: a cohort is never
trained on a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fot.composed import COMPOSED, NotComposed
from fot.engines.vectorized import kernels, norms
from fot.engines.vectorized.pending import Pending, asks_for_shape, joined, pooled, settled
from fot.engines.vectorized.products import Convolution, Linear, lowered, product
from fot.engines.vectorized.stacked import CannotBatch, Stacked, name_of, per_channel, raw
from fot.engines.vectorized.steps import LocalWeight
from fot.engines.vectorized.tail import LocalBias, Tail


class Fold(TorchFunctionMode):
    """Within this context a module's forward pass serves a folded cohort.

    Parameters
    ----------
    clients
        C, the number of clients.
    valid
        ``[C·B]``, 1 for rows that count and 0 for padding; None where all rows count. Only statistics
        over the batch (batch-norm) need it: everything else treats rows apart.

    Examples
    --------
    >>> layer = torch.nn.Linear(3, 2, bias=False)
    >>> weights = torch.stack([torch.zeros(2, 3), torch.ones(2, 3)])  # two clients
    >>> with Fold(clients=2):
    ...     y = torch.func.functional_call(layer, {"weight": Stacked.of(weights)}, (torch.ones(4, 3),))
    >>> y[:, 0].tolist()
    [0.0, 0.0, 3.0, 3.0]
    """

    def __init__(self, clients: int, valid: Tensor | None = None) -> None:
        super().__init__()
        self.clients = clients
        self.valid = valid

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if Pending in types:
            if func is F.dropout:  # who draws the masks knows what to do
                return func(*args, **kwargs)
            if asks_for_shape(func):
                return func(*args, **kwargs)
            tied = pooled(*args, **kwargs) if func is F.max_pool2d else joined(func, args, kwargs)
            if tied is not None:
                return tied
            args, kwargs = settled(args), settled(kwargs)
        if func is Tensor.view and isinstance(args[-1], (int, tuple)) and not kwargs:
            func = Tensor.reshape  # kernels leave maps with their channels last, where a view may not reach
        # Batch-norm mixes samples even where it has no parameters.
        if Stacked not in types and func is not F.batch_norm:
            return func(*args, **kwargs)
        if func in COMPOSED:
            try:
                with self:
                    return COMPOSED[func](*args, **kwargs)
            except NotComposed as case:
                raise CannotBatch(f"{case} has no rule") from None
        with torch._C.DisableTorchFunction():  # within a rule there are only plain tensors
            return self.rule(func, args, kwargs)

    def rule(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a function that meets parameters, or CannotBatch."""
        if func is Tensor.data_ptr:
            return 0  # recurrent layers ask on a GPU: weights at one place are not moved together for cuDNN
        rule = _RULES.get(func)
        if rule not in (Fold.linear, Fold.convolution):
            self.use_only_by_layers(func, args, kwargs)
        if rule is not None:
            return rule(self, *args, **kwargs)
        tensors = [a for a in _leaves((args, kwargs)) if isinstance(a, Tensor)]
        if all(isinstance(t, Stacked) or t.dim() == 0 for t in tensors):
            return self.parameters_only(func, args, kwargs)
        if name_of(func) in _ELEMENTWISE:
            return self.elementwise(func, args, kwargs)
        raise CannotBatch(f"{name_of(func)} mixes parameters and samples in a way that has no rule")

    def use_only_by_layers(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Weights that their layer's backward pass steps must not be used in any other way."""
        for leaf in _leaves((args, kwargs)):
            if isinstance(leaf, Stacked) and leaf.local and name_of(func) not in _METADATA | {"__get__"}:
                leaf.local.refuse()

    def split(self, x: Tensor) -> Tensor:
        """``[C·B, ...]`` as ``[C, B, ...]``."""
        if x.dim() == 0 or x.shape[0] % self.clients:
            raise CannotBatch(
                f"a tensor of shape {tuple(x.shape)} has no axis of {self.clients} clients' samples"
            )
        return x.reshape(self.clients, -1, *x.shape[1:])

    def parameters_only(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Any function of parameters alone: each client's on its own slice."""
        stacks = [a for a in _leaves((args, kwargs)) if isinstance(a, Stacked)]
        if name_of(func) in _METADATA:
            return func(*_replace(args, {id(s): raw(s)[0] for s in stacks}), **kwargs)

        def single(slices: list[Tensor]) -> Any:
            known = {id(s): piece for s, piece in zip(stacks, slices, strict=True)}
            return func(*_replace(args, known), **_replace(kwargs, known))

        if name_of(func) == "__get__":
            with torch.no_grad():
                value = single([raw(s)[0] for s in stacks])
            if not isinstance(value, Tensor):
                return value
        try:
            return Stacked.of(torch.vmap(single)([raw(s) for s in stacks]))
        except (RuntimeError, ValueError) as error:
            raise CannotBatch(f"{name_of(func)} of parameters cannot be taken client by client") from error

    def elementwise(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        """Samples and parameters element by element, broadcast over each client's B rows."""
        leaves = [a for a in _leaves((args, kwargs)) if isinstance(a, Tensor)]
        rank = max(t.dim() for t in leaves if not isinstance(t, Stacked))
        known: dict[int, Tensor] = {}
        for t in leaves:
            if isinstance(t, Stacked):
                stack = raw(t)
                if stack.dim() - 1 > rank or (stack.dim() - 1 == rank and stack.shape[1] != 1):
                    raise CannotBatch(
                        f"{name_of(func)} lays a parameter of shape {tuple(stack.shape[1:])} over samples"
                    )
                shape = stack.shape[1:] if stack.dim() - 1 < rank else stack.shape[2:]
                known[id(t)] = stack.reshape(self.clients, *[1] * (rank - len(shape)), *shape)
            elif t.dim() == rank and t.shape[0] != 1:
                known[id(t)] = self.split(t)
        result: Tensor = func(*_replace(args, known), **_replace(kwargs, known))
        return result.flatten(0, 1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """y = x Wᵀ + b, W and b each client's own."""
        own_bias = bias.local if isinstance(bias, Stacked) else None
        if isinstance(weight, Stacked) and isinstance(weight.local, LocalWeight):
            self.split(x)
            assert own_bias is None or isinstance(own_bias, LocalBias)
            flat = x if x.dim() < 4 else x.flatten(1, -2)  # what follows would take four axes for maps
            shape, tail = (*flat.shape[:-1], weight.shape[-2]), Tail(own_bias)
            y = self.product(weight.local, Linear(), flat, shape, tail)
            y = y if flat is x else settled(y).view(*x.shape[:-1], -1)
            if own_bias is not None or bias is None:
                return y
            y = settled(y)
        else:
            if own_bias is not None:
                own_bias.refuse()
            self.split(x)
            y = product(Linear(), x, raw(weight)) if isinstance(weight, Stacked) else F.linear(x, weight)
        if bias is None:
            return y
        if not isinstance(bias, Stacked):
            return y + bias
        shifted: Tensor = y.view(self.clients, -1, y.shape[-1]) + raw(bias).unsqueeze(1)
        return shifted.view(y.shape)

    def convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        """A convolution of 1, 2 or 3 axes with each client's own filters."""
        if not isinstance(weight, Stacked):
            raise CannotBatch("a convolution has shared filters and a bias for each client")
        self.split(x)
        axes = raw(weight).dim() - 3
        if x.dim() != axes + 2:
            raise CannotBatch("a convolution of a single sample without a batch axis")
        operation = Convolution(raw(weight).shape[2:], stride, padding, dilation, groups)
        local = weight.local
        if isinstance(local, LocalWeight):
            y = self.product(local, operation, x, (len(x), raw(weight).shape[1], *operation.size(x)), Tail())
        else:
            y = product(operation, x, raw(weight))
        if bias is None:
            return y
        return self.elementwise(torch.add, (settled(y), per_channel(bias, axes)), {})

    def product(
        self, local: LocalWeight, operation: Linear | Convolution, x: Tensor, shape: Sequence[int], tail: Tail
    ) -> Tensor:
        """A layer's output; with kernels at hand, it waits for what follows."""
        if not kernels.at_hand(x.device):
            return local.apply(operation, x, tail)
        x = lowered(x)
        return Pending.of(shape, x, lambda whole: local.apply(operation, x, whole), tail)

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """X W with a matrix of parameters on the right."""
        if isinstance(x, Stacked) or raw(weight).dim() != 3:
            raise CannotBatch("matmul has a rule only for samples times a matrix of parameters")
        return product(Linear(), x, raw(weight).transpose(1, 2))

    @staticmethod
    def by_vmap(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The rule of a function of samples, weights, perhaps biases, and settings, that vmap knows."""

        def rule(self: Fold, x: Tensor, weight: Tensor, bias: Tensor | None = None, *settings: Any) -> Tensor:
            own = [0 if isinstance(t, Stacked) else None for t in (weight, bias)]
            single = torch.vmap(lambda x, w, b: func(x, w, b, *settings), in_dims=(0, *own))
            y: Tensor = single(self.split(x), raw(weight), raw(bias))
            return y.flatten(0, 1)

        return rule

    def prelu(self, x: Tensor, weight: Tensor) -> Tensor:
        """max(0, x) + a·min(0, x), one a for all channels or one for each."""
        slope = per_channel(weight, max(x.dim() - 2, 0)) if raw(weight).shape[1] > 1 else weight
        return x.clamp(min=0) + self.elementwise(torch.mul, (x.clamp(max=0), slope), {})

    def embedding(
        self,
        rows: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Each client looks up its own table."""
        if max_norm is not None or scale_grad_by_freq or sparse:
            raise CannotBatch("embedding with max_norm, scale_grad_by_freq or sparse has no rule")
        if isinstance(rows, Stacked):
            raise CannotBatch("embedding of a parameter")
        stack = raw(weight)
        if padding_idx is not None:
            frozen = torch.arange(stack.shape[1], device=stack.device) == padding_idx % stack.shape[1]
            stack = torch.where(frozen[:, None], stack.detach(), stack)
        own = torch.arange(self.clients, device=rows.device) * stack.shape[1]
        split = self.split(rows)
        return F.embedding(
            (split + own.reshape(-1, *[1] * (split.dim() - 1))).flatten(0, 1), stack.flatten(0, 1)
        )


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: Fold.linear,
    F.conv1d: Fold.convolution,
    F.conv2d: Fold.convolution,
    F.conv3d: Fold.convolution,
    **{func: Fold.by_vmap(func) for func in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)},
    F.batch_norm: norms.batch_norm,
    F.layer_norm: norms.layer_norm,
    F.rms_norm: norms.rms_norm,
    F.group_norm: norms.group_norm,
    F.instance_norm: norms.instance_norm,
    F.prelu: Fold.prelu,
    F.embedding: Fold.embedding,
    torch.matmul: Fold.matmul,
    torch.mm: Fold.matmul,
    Tensor.matmul: Fold.matmul,
    Tensor.mm: Fold.matmul,
    Tensor.__matmul__: Fold.matmul,
}
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "pow", "maximum", "minimum", "where", "lerp", "rsub"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__div__", "__rdiv__", "__pow__", "__rpow__", "addcmul", "clamp", "sub_", "add_", "mul_", "div_"),
    *("__iadd__", "__isub__", "__imul__", "__itruediv__"),
}
_METADATA = {
    "dim",
    "size",
    "numel",
    "is_floating_point",
    "is_complex",
    "__len__",
    "stride",
    "nelement",
    "ndimension",
}


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _leaves(item)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def _replace(tree: Any, known: dict[int, Any]) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)(_replace(item, known) for item in tree)
    if isinstance(tree, dict):
        return {name: _replace(item, known) for name, item in tree.items()}
    return known.get(id(tree), tree)
