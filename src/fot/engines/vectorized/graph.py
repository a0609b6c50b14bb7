"""A round recorded once on a GPU and replayed: no launch waits for Python."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fot.network import Tree


class GraphedRound:
    """A function of tensors, recorded as a CUDA graph for inputs of fixed shapes.

    Inputs are copied into the tensors the graph was recorded with; outputs are overwritten by the next
    call, so a caller uses them before it. A function that cannot be recorded runs as it is.
    """

    def __init__(self, function: Callable[[Tree], Tree], inputs: Tree) -> None:
        self.function = function
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
        # Libraries choose their algorithms and workspaces on first use, which a graph cannot hold.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        try:
            with torch.cuda.graph(self.graph):
                self.outputs = function(self.inputs)
        except RuntimeError:
            self.graph = None

    def __call__(self, inputs: Tree) -> Tree:
        """The function's value; its tensors are good until the next call."""
        if self.graph is None:
            return self.function(inputs)
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        return self.outputs
