"""A product that waits for what follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fot.engines.vectorized.tail import Tail

_RELU = {F.relu, torch.relu, Tensor.relu}
_RELU_IN_PLACE = {torch.relu_, Tensor.relu_}
_ADD = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_ADD_IN_PLACE = {Tensor.add_, Tensor.__iadd__}
_METADATA = {"size", "dim", "ndimension", "numel", "is_floating_point"}
_ATTRIBUTES = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda")}


class Pending(Tensor):
    """The result of a product that is not made yet, so that its tail can be made with it.

    What may be a part of the tail is added to it (``joined``); for anything else the result is made first.
    """

    make: Callable[[Tail], Tensor]
    tail: Tail
    made: Tensor | None

    @classmethod
    def of(cls, shape: Sequence[int], like: Tensor, make: Callable[[Tail], Tensor], tail: Tail) -> Pending:
        """A result of this shape; ``make`` makes it, with a tail."""
        empty = Tensor._make_wrapper_subclass  # a tensor of that shape, without numbers
        pending: Pending = empty(cls, tuple(shape), dtype=like.dtype, device=like.device)
        pending.make, pending.tail, pending.made = make, tail, None
        return pending

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if asks_for_shape(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*settled(args), **settled(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*settled(args), **settled(kwargs or {}))

    def value(self) -> Tensor:
        """The result, made now where it was not yet."""
        if self.made is None:
            with torch._C.DisableTorchFunction():
                self.made = self.make(self.tail)
        return self.made

    def takes_dropout(self) -> bool:
        """Whether a dropout can be a part of the tail: behind a ReLU, whose result tells what passed both."""
        return self.made is None and self.tail.relu and self.tail.pool == 1 and self.tail.dropped is None

    def joined(self, in_place: bool = False, shape: Sequence[int] | None = None, **parts: Any) -> Pending:
        """With more of a tail; ``in_place`` this result itself is changed, as whoever holds it expects."""
        tail = replace(self.tail, **parts)
        if in_place:
            self.tail = tail
            return self
        with torch._C.DisableTorchFunction():
            return Pending.of(self.shape if shape is None else shape, self, self.make, tail)


def joined(func: Callable[..., Any], args: Any, kwargs: Any) -> Pending | None:
    """The function's value where it can be a part of the tail of what it is given, or None."""
    with torch._C.DisableTorchFunction():
        x = args[0] if args else None
        if not isinstance(x, Pending) or x.made is not None or x.tail.dropped or x.tail.pool > 1:
            x = None
        if x is not None and func in _RELU | _RELU_IN_PLACE and not x.tail.relu:
            in_place = func in _RELU_IN_PLACE or kwargs.get("inplace", False) or args[1:] == (True,)
            return x.joined(in_place, relu=True)
        if func in _ADD | _ADD_IN_PLACE and len(args) == 2 and not kwargs:
            return _added(args[0], args[1], func in _ADD_IN_PLACE)
    return None


def pooled(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
           ceil_mode: bool = False, return_indices: bool = False) -> Pending | None:  # fmt: skip
    """A max-pooling of a result that waits, where its windows are squares side by side; or None."""
    with torch._C.DisableTorchFunction():
        if not isinstance(x, Pending) or x.made is not None or x.tail.pool > 1 or x.dim() != 4:
            return None
        sides, strides = _both(kernel_size), _both(kernel_size if stride is None else stride)
        plain = (_both(padding), _both(dilation), ceil_mode, return_indices) == ((0, 0), (1, 1), False, False)
        (side, other), (images, channels, high, wide) = sides, x.shape
        if not plain or side != other or strides != sides or not 1 < side <= min(high, wide, 4):
            return None
        if not x.tail.relu:  # the way back reads from the result what a ReLU let through
            return None
        return x.joined(shape=(images, channels, high // side, wide // side), pool=side)


def _added(x: Any, other: Any, in_place: bool) -> Pending | None:
    if not (isinstance(x, Pending) and x.made is None) and not in_place:
        x, other = other, x
    if not isinstance(x, Pending) or x.made is not None or not isinstance(other, Tensor):
        return None
    tail = x.tail
    if tail.relu or tail.dropped or tail.pool > 1 or tail.other is not None:
        return None
    other = other.value() if isinstance(other, Pending) else other
    if type(other) is not Tensor or other.shape != x.shape or other.dtype != x.dtype:
        return None
    return x.joined(in_place, other=other)


def asks_for_shape(func: Callable[..., Any]) -> bool:
    """Whether a function needs no numbers of a result."""
    return func in _ATTRIBUTES or getattr(func, "__name__", "") in _METADATA


def settled(tree: Any) -> Any:
    """With every result in it made."""
    if isinstance(tree, Pending):
        return tree.value()
    if isinstance(tree, (tuple, list)):
        return type(tree)(settled(item) for item in tree)
    if isinstance(tree, dict):
        return {name: settled(item) for name, item in tree.items()}
    return tree


def _both(value: Any) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return (int(pair[0]), int(pair[-1]))
