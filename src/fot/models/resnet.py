"""The two reduced ResNet18: 5-Datasets (no normalisation) and Split Mini-ImageNet (batch-norm)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from fot.errors import UserError
from fot.models.heads import MultiHead
from fot.options import Between

Positive = Annotated[int, Between(1)]


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, norm: bool) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    if not norm:
        return convolution
    # Statistics of the batch at hand, in training and in evaluation alike: running ones would be a
    # second state to aggregate, and would drift away from the old tasks.
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, track_running_stats=False))


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut; the shortcut is a 1 x 1 convolution where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, outputs, 3, stride, norm)
        self.conv2 = _convolution(outputs, outputs, 3, 1, norm)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(conv2(relu(conv1(x))) + shortcut(x))."""
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


def _resnet(filters: int, norm: bool, stride: int, size: int) -> MultiHead:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=_convolution(3, filters, 3, stride, norm), relu=nn.ReLU()
    )
    size = (size - 1) // stride + 1
    previous = filters
    for i, width in enumerate((filters, 2 * filters, 4 * filters, 8 * filters), start=1):
        first = 1 if i == 1 else 2  # each stage but the first halves the maps
        layers[f"stage{i}"] = nn.Sequential(Block(previous, width, first, norm), Block(width, width, 1, norm))
        size = (size - 1) // first + 1
        previous = width
    if size < 2:
        raise UserError(
            "resnet18: the images are too small to be halved so often; raise size or lower stride"
        )
    layers["pool"] = nn.AvgPool2d(2)
    layers["flatten"] = nn.Flatten()
    return MultiHead(nn.Sequential(layers), previous * (size // 2) ** 2)


def resnet18(*, filters: Positive = 20, stride: Positive = 1, size: Positive = 32) -> MultiHead:
    """Build the reduced ResNet18 of 5-Datasets: no normalisation, no biases.

    Parameters
    ----------
    filters
        Filters of the first stage; each later stage has twice as many.
    stride
        Stride of the first convolution.
    size
        The side of the (square, three-channel) images; it fixes the width of the heads.

    Examples
    --------
    >>> resnet18().features
    640
    """
    return _resnet(filters, False, stride, size)


def resnet18_norm(*, filters: Positive = 32, stride: Positive = 2, size: Positive = 84) -> MultiHead:
    """Build the reduced ResNet18 of Split Mini-ImageNet: batch-norm on the statistics of the batch at hand.

    The options are those of ``resnet18``.

    Examples
    --------
    >>> resnet18_norm().features
    2304
    """
    return _resnet(filters, True, stride, size)
