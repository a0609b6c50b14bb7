"""One body shared by all tasks, and a head a task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MultiHead(nn.Module):
    """A body that turns inputs into features, and a linear head for each task seen so far.

    The number of tasks is not known in advance: ``add_task`` appends a head when a task arrives.

    Parameters
    ----------
    body
        Any module from inputs to features of shape ``[B, features]``.
    features
        The width of what the body returns.
    bias
        Whether the heads have biases. The paper's have none.

    Examples
    --------
    >>> model = MultiHead(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), features=3)
    >>> model.add_task(classes=2)
    >>> model.add_task(classes=5)
    >>> model(torch.zeros(7, 4), task=1).shape
    torch.Size([7, 5])
    """

    def __init__(self, body: nn.Module, features: int, bias: bool = False) -> None:
        super().__init__()
        self.body = body
        self.features = features
        self.bias = bias
        self.heads = nn.ModuleList()

    def add_task(self, classes: int) -> None:
        """Append a head for a task of so many classes, where and in the precision the body is."""
        like = next(self.body.parameters(), torch.empty(0))
        self.heads.append(nn.Linear(self.features, classes, self.bias, like.device, like.dtype))

    def forward(self, x: Tensor, task: int) -> Tensor:
        """Return the logits ``[B, classes]`` of the task's own head."""
        logits: Tensor = self.heads[task](self.body(x))
        return logits


def multi_head(body: nn.Module, input_shape: Sequence[int], bias: bool = False) -> MultiHead:
    """Make any body multi-head, its width found by showing it one blank input.

    Examples
    --------
    >>> multi_head(nn.Flatten(), (3, 8, 8)).features
    192
    """
    like = next(body.parameters(), torch.empty(0))
    training = body.training
    with torch.no_grad():
        # Two inputs, in eval mode: nothing is drawn, no running statistic moves, and a batch-norm
        # on batch statistics has something to normalise.
        features = body.eval()(like.new_zeros(2, *input_shape)).flatten(1).shape[1]
    body.train(training)
    return MultiHead(body, features, bias)
