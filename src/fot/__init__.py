"""Federated Orthogonal Training: one global model that learns task after task and forgets none.

What most users need stands here and is loaded when it is asked for; every room of the package can be
used by itself too (see ARCHITECTURE.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fot.benchmarks import Partition as Partition
    from fot.benchmarks import Task as Task
    from fot.benchmarks import class_split as class_split
    from fot.benchmarks import from_tensors as from_tensors
    from fot.benchmarks import permuted as permuted
    from fot.engines.base import EngineOptions as EngineOptions
    from fot.engines.base import Training as Training
    from fot.errors import UserError as UserError
    from fot.federation.run import Run as Run
    from fot.layers import find_layers as find_layers
    from fot.methods import FOT as FOT
    from fot.methods import FedAvg as FedAvg
    from fot.methods import Method as Method
    from fot.models import multi_head as multi_head
    from fot.subspace import SubspaceMemory as SubspaceMemory
    from fot.subspace import sketch as sketch

__version__ = "0.1.0"

_HOMES = {
    "fot.benchmarks": ("Partition", "Task", "class_split", "from_tensors", "permuted"),
    "fot.engines.base": ("EngineOptions", "Training"),
    "fot.errors": ("UserError",),
    "fot.federation.run": ("Run",),
    "fot.layers": ("find_layers",),
    "fot.methods": ("FOT", "FedAvg", "Method"),
    "fot.models": ("multi_head",),
    "fot.subspace": ("SubspaceMemory", "sketch"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'fot' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
