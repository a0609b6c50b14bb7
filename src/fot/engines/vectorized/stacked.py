"""Stacks of clients' parameters, as a module sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fot.engines.vectorized.products import Convolution, Linear


class CannotBatch(Exception):
    """The cohort cannot be trained at once; the message says why."""


class Local(Protocol):
    """Clients' own weights of a layer that are stepped during the backward pass (see ``steps``)."""

    def apply(self, operation: Linear | Convolution, x: Tensor) -> Tensor:
        """The operation on x, each client with its own weights."""
        ...

    def refuse(self) -> None:
        """Say that this weight must be left to autograd."""


class Stacked(Tensor):
    """A parameter or buffer of C clients, ``[C, *shape]``, which a module sees as one of that shape."""

    local: Local | None

    @classmethod
    def of(cls, stack: Tensor, local: Local | None = None) -> Stacked:
        """Mark a tensor as a stack."""
        marked: Stacked = stack.as_subclass(cls)
        marked.local = local
        return marked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        raise CannotBatch(f"{name_of(func)} has no rule for a stack of clients' parameters")


def raw(tensor: Any) -> Any:
    """A stack as a plain tensor with its client axis; anything else as it is."""
    if not isinstance(tensor, Stacked):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def per_channel(parameter: Tensor, axes: int) -> Tensor:
    """A parameter ``[F]`` as ``[F, 1, ...]``, to be laid over maps of that many axes."""
    if not isinstance(parameter, Stacked):
        return parameter.reshape(-1, *[1] * axes)
    stack = raw(parameter)
    return Stacked.of(stack.reshape(*stack.shape, *[1] * axes))


def name_of(func: Callable[..., Any]) -> str:
    """A function's name, as a message shows it."""
    return getattr(func, "__name__", str(func))
