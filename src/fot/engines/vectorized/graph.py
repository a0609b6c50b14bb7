"""A round recorded once on a GPU and replayed: no launch waits for Python."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from fot.network import Tree


class GraphedRound:
    """A function of tensors, recorded as a CUDA graph for inputs of fixed shapes.

    Inputs are copied into the tensors the graph was recorded with; outputs are overwritten by the next
    call, so a caller uses them before it. A function that cannot be recorded runs as it is, with a warning.

    Recordings ``beside`` which it is made lend it the memory that they work in: of all of them, too, the next
    call overwrites what the last one gave.
    """

    def __init__(
        self, function: Callable[[Tree], Tree], inputs: Tree, beside: Iterable[GraphedRound] = ()
    ) -> None:
        self.function = function
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        # Libraries choose their algorithms and workspaces on first use, which a graph cannot hold.
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            function(self.inputs)
        current.wait_stream(stream)
        try:
            # What other threads ask of the device meanwhile is their own affair, and does not spoil this.
            pool = next((other.graph.pool() for other in beside if other.graph), None)
            with uncollected(), torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                self.outputs = function(self.inputs)
        except RuntimeError as error:
            self.graph = None
            torch.cuda.set_stream(current)  # a recording that fails leaves its own stream behind
            cause = error.__context__ or error  # the end of such a recording fails too, and hides why
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            reason = str(cause).partition("\n")[0]
            warnings.warn(f"rounds are not recorded, and so slow: {reason}", stacklevel=2)

    def __call__(self, inputs: Tree) -> Tree:
        """The function's value; its tensors are good until the next call."""
        if self.graph is None:
            return self.function(inputs)
        for dtype in {tensor.dtype for tensor in inputs.values()}:  # one launch for all of a type
            names = [name for name, tensor in inputs.items() if tensor.dtype == dtype]
            torch._foreach_copy_([self.inputs[name] for name in names], [inputs[name] for name in names])
        self.graph.replay()
        return dict(self.outputs)


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector from its work: an old recording that it frees would spoil one being made."""
    works = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if works:
            gc.enable()
