"""A model as a pure function of its parameters.

Engines and methods never write into a module: they hold its parameters and buffers as a tree
(name -> tensor) and call the module with whichever tree they mean, the server's or a client's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fot.files import write_whole
from fot.layers.find import has_heads, is_head
from fot.randomness import key

Tree = dict[str, Tensor]
Found = TypeVar("Found")


class Network:
    """A module, called with a tree of its parameters and buffers.

    A model with one head is any module ``forward(x)``. A multi-head model has ``forward(x, task)``
    and a method ``add_task(classes)`` that appends a head to its ``nn.ModuleList`` named ``heads``;
    the number of tasks need not be known in advance.

    Examples
    --------
    >>> network = Network(nn.Linear(3, 2))
    >>> network(network.tree(), torch.zeros(5, 3), task=0).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
        tf32: bool = False,
    ) -> None:
        self.module = copy.deepcopy(module).to(device=device, dtype=dtype)
        self.device = torch.device(device)
        self.dtype = dtype
        self.autocast = autocast
        """Whether matrix products run in bfloat16; parameters and sums keep their precision."""
        self.tf32 = tf32
        """Whether, within ``products``, a GPU may round the factors of float32 products to TF32."""
        # A buffer that starts out infinite (a causal mask) is a constant, and no difference of it is finite.
        self._constant = {n for n, b in self.module.named_buffers() if not bool(b.isfinite().all())}
        self._known: dict[Hashable, Any] = {}

    @property
    def multi_head(self) -> bool:
        return has_heads(self.module)

    def __call__(self, params: Tree, x: Tensor, task: int, *, training: bool = False) -> Tensor:
        """The logits of ``x`` on the head of ``task``."""
        self.module.train(training)
        inputs = (x, task) if self.multi_head else (x,)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits: Tensor = functional_call(self.module, params, inputs)
        return logits.to(self.dtype)

    @contextmanager
    def products(self) -> Iterator[None]:
        """Where clients compute: a GPU's products are as exact as the network asks, and no more.

        What the server computes lies outside, in full precision: it repeats round after round, and its
        rounding would leak into what is to be protected.
        """
        flags: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
        before = [flag.allow_tf32 for flag in flags]
        try:
            for flag in flags:
                flag.allow_tf32 = self.tf32
            yield
        finally:
            for flag, value in zip(flags, before, strict=True):
                flag.allow_tf32 = value

    def tree(self) -> Tree:
        """Copies of the module's own parameters and buffers: where a run begins."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}

    def add_task(self, classes: int, seed: int, task: int) -> Tree:
        """Append the head of ``task`` to a multi-head model; returns the new head's parameters."""
        if not self.multi_head:
            return {}
        self._known.clear()
        before = set(self.tree())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(seed, "head", task))
            self.module.add_task(classes)  # type: ignore[operator]  # a Module's attributes are untyped
        self.module.to(device=self.device, dtype=self.dtype)
        return {name: tensor for name, tensor in self.tree().items() if name not in before}

    def known(self, name: Hashable, find: Callable[[nn.Module], Found]) -> Found:
        """What is found in the module, and kept until it gets another head: a walk through it is slow."""
        if name not in self._known:
            self._known[name] = find(self.module)
        found: Found = self._known[name]
        return found

    def trained(self, task: int) -> tuple[str, ...]:
        """The parameters that a client trains on ``task``: all but the heads of other tasks."""

        def find(module: nn.Module) -> tuple[str, ...]:
            own = f"heads.{task}."
            return tuple(
                name
                for name, parameter in module.named_parameters()
                if parameter.requires_grad and (not is_head(module, name) or name.startswith(own))
            )

        return self.known(("trained", task), find)

    def carried(self) -> tuple[str, ...]:
        """The buffers that training moves and clients send with their update: running statistics."""

        def find(module: nn.Module) -> tuple[str, ...]:
            buffers = module.named_buffers()
            return tuple(name for name, b in buffers if b.is_floating_point() and name not in self._constant)

        return self.known("carried", find)


def save_tree(tree: Tree, path: Path) -> None:
    """Write a tree as a safetensors file, whole or not at all."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tree.items()}
    write_whole(path, safetensors.torch.save(tensors))
