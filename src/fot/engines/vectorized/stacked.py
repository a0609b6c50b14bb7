"""Stacks of clients' parameters, as a module sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fot.engines.vectorized.steps import LocalWeight
from fot.engines.vectorized.tail import LocalBias


class CannotBatch(Exception):
    """The cohort cannot be trained at once; the message says why."""


class Stacked(Tensor):
    """A parameter or buffer of C clients, ``[C, *shape]``, which a module sees as one of that shape."""

    local: LocalWeight | LocalBias | None
    """What steps it during the backward pass, where autograd does not see it."""

    @classmethod
    def of(cls, stack: Tensor, local: LocalWeight | LocalBias | None = None) -> Stacked:
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
