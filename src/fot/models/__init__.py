"""The paper's networks, multi-head by construction.

``MODELS`` is the catalogue: a name, and the function that builds the network from keyword options.
The default options of ``alexnet``, ``resnet18`` and ``resnet18_norm`` are the paper's; ``mlp`` defaults
to the small network of the bundled ``digits`` benchmark.

Examples
--------
>>> sorted(MODELS)
['alexnet', 'mlp', 'resnet18', 'resnet18_norm']
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fot.models.alexnet import alexnet
from fot.models.heads import MultiHead, multi_head
from fot.models.mlp import mlp
from fot.models.resnet import resnet18, resnet18_norm

MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet18_norm": resnet18_norm,
}

__all__ = ["MODELS", "MultiHead", "alexnet", "mlp", "multi_head", "resnet18", "resnet18_norm"]
