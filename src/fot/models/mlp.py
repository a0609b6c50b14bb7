"""Fully connected networks: ``digits`` and permuted MNIST."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from torch import nn

from fot.errors import UserError
from fot.models.heads import MultiHead
from fot.options import Between


def mlp(
    *,
    inputs: Annotated[int, Between(1)] = 64,
    hidden: tuple[Annotated[int, Between(1)], ...] = (100, 100),
    classes: Annotated[int, Between(1)] = 10,
    dropout: tuple[Annotated[float, Between(0, 1)], ...] = (),
    bias: bool = True,
    multi_head: bool = False,
) -> nn.Module:
    """Build a perceptron with ReLUs: one output for all tasks, or a head a task.

    Parameters
    ----------
    inputs, hidden, classes
        Widths. The paper's network for permuted MNIST is 784, (400, 400, 400), 10.
    dropout
        A probability for each hidden layer, applied after its ReLU; empty for none.
    bias
        Whether layers (and heads) have biases.
    multi_head
        A head a task in place of the single output; ``classes`` is then not used.

    Examples
    --------
    >>> sum(p.numel() for p in mlp().parameters())
    17610
    >>> mlp(multi_head=True).features
    100
    """
    if dropout and len(dropout) != len(hidden):
        raise UserError(
            f"mlp has {len(hidden)} hidden layers but {len(dropout)} dropout probabilities: give one for each"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = inputs
    for i, out in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, out, bias)
        layers[f"relu{i}"] = nn.ReLU()
        if dropout:
            layers[f"drop{i}"] = nn.Dropout(dropout[i - 1])
        width = out
    if multi_head:
        return MultiHead(nn.Sequential(layers), width, bias)
    layers["out"] = nn.Linear(width, classes, bias)
    return nn.Sequential(layers)
