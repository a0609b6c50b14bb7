"""A CUDA device that is not there, to see what a recording on one would refuse.

Tensors on it have shapes and no values: they are torch's meta tensors, which pass for CUDA ones. Every
operation on them is looked at.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fot.benchmarks import transforms
from fot.engines.vectorized import engine, kernels, local
from fot.engines.vectorized.aside import Aside
from fot.network import Tree

CUDA = torch.device("cuda", 0)
_DEVICE = torch._C.TensorBase.device
_NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "detach")
_FROM_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default}


class Refused(Exception):
    """What a graph would not record."""


@dataclass
class Launch:
    """An operation that starts a kernel, and the bytes that it reads and writes at least."""

    name: str
    bytes: int
    shape: tuple[int, ...]


@dataclass
class StandIn(TorchDispatchMode):
    """Lets tensors be made on a CUDA device that is not there; refuses what a recording would."""

    # The place of torch's own fake mode: where it is taken, torch does not try to start CUDA.
    _mode_key: ClassVar[Any] = torch._C._TorchDispatchModeKey.FAKE
    recording: bool = False
    between: bool = False
    """Whether it is no recording but what lies between two: there pinned memory may be copied from."""
    inside: bool = False
    """Whether an operation is at work: torch itself is not to be fooled."""
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if self.recording:
            self.refuse_waiting(func, args, given)
            if not (self.between and kwargs.get("non_blocking")):
                self.refuse_copies(func, given, kwargs.get("device"))
        self.inside = True
        try:
            result = func(*tree_map(_meta_for_cuda, args), **tree_map(_meta_for_cuda, kwargs))
        finally:
            self.inside = False
        if self.recording:
            self.note(func, given, [t for t in tree_leaves(result) if isinstance(t, Tensor)])
        return result

    def refuse_waiting(self, func: Any, args: Any, given: list[Tensor]) -> None:
        if not any(t.is_meta for t in given) or not _FROM_VALUES & set(func.tags):
            return
        if func not in _INDEXING or any(
            t.dtype in (torch.bool, torch.uint8) for t in args[1] if t is not None
        ):
            raise Refused(f"{func} makes the host wait for the device")

    def refuse_copies(self, func: Any, given: list[Tensor], to: torch.device | None) -> None:
        there = {t.device.type for t in given} | ({to.type} if to else set())
        # A kernel takes a single number as its argument; only a copy of one waits for the host.
        numbers = all(t.dim() == 0 for t in given if not t.is_meta) and func not in _COPIES
        if len(there) > 1 and not numbers:
            raise Refused(f"{func} copies between host and device")

    def note(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        name = func._schema.name.removeprefix("aten::")
        returned = [r.alias_info for r in func._schema.returns]
        view = func.is_view or any(a is not None and not a.is_write for a in returned)
        if view or name.startswith(_NO_KERNEL) or not any(t.is_meta for t in [*given, *made]):
            return
        if name in ("index", "fill_") or name.startswith("new_"):  # these do not read all that they are given
            given = given[1:]
        moved = sum(map(_bytes, [*given, *made]))  # what is changed in place is both: read and written
        self.launches.append(Launch(name, moved, tuple(made[0].shape) if made else ()))


def _meta_for_cuda(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


def _bytes(tensor: Tensor) -> int:
    """What of it lies in memory: an axis of stride 0 is there once, and windows that overlap are too."""
    apart = math.prod(n for n, step in zip(tensor.shape, tensor.stride(), strict=True) if step)
    reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return min(apart, reach) * tensor.element_size() if tensor.numel() else 0


@contextmanager
def stand_in(patch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Tensors without values pass for CUDA tensors, and a graph's recording is watched, not made."""

    mode = StandIn()

    def seen(tensor: Tensor) -> torch.device:
        found: torch.device = _DEVICE.__get__(tensor)
        return CUDA if found.type == "meta" and not mode.inside else found

    patch.setattr(torch.Tensor, "device", property(seen), raising=False)
    patch.setattr(torch.Tensor, "is_cuda", property(lambda t: seen(t).type == "cuda"), raising=False)
    patch.setattr(transforms, "_constant", cache(transforms._constant.__wrapped__))
    # The kernels are tested with values; torch's own operations launch the same in more pieces.
    patch.setattr(kernels, "at_hand", lambda device: False)

    class Recording:
        """In the place of ``GraphedRound``: once to warm up, once as the graph would see it."""

        def __init__(self, function: Callable[[Tree], Tree], inputs: Tree, beside: Any = ()) -> None:
            function(inputs)
            mode.recording = True
            try:
                self.outputs = function(inputs)
            finally:
                mode.recording = False

        def __call__(self, inputs: Tree) -> Tree:
            return self.outputs

    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    patch.setattr(torch.backends.cudnn, "is_acceptable", lambda tensor: tensor.is_cuda)
    patch.setattr(engine, "GraphedRound", Recording)
    patch.setattr(local, "Aside", lambda device: Aside(torch.device("cpu")))  # no second stream
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...) shows its copy to the mode
    try:
        with mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
