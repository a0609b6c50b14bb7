"""The AlexNet-like network of Split-CIFAR100."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated

from torch import nn

from fot.errors import UserError
from fot.models.heads import MultiHead
from fot.options import Between


def alexnet(
    *,
    channels: tuple[Annotated[int, Between(1)], ...] = (64, 128, 256),
    kernels: tuple[Annotated[int, Between(1)], ...] = (4, 3, 2),
    hidden: tuple[Annotated[int, Between(1)], ...] = (2048, 2048),
    dropout: tuple[Annotated[float, Between(0, 1)], ...] = (0.2, 0.2, 0.5, 0.5, 0.5),
    size: Annotated[int, Between(1)] = 32,
) -> MultiHead:
    """Build convolutions without padding, each with ReLU, dropout and max-pooling by 2, then wide layers.

    Neither biases nor normalisation. With the defaults and 32 x 32 images the maps shrink
    32 -> 29 -> 14 -> 12 -> 6 -> 5 -> 2, so the first wide layer has 256 · 2 · 2 = 1024 inputs.

    Parameters
    ----------
    channels, kernels
        Filters of each convolution, and the side of its window.
    hidden
        Widths of the fully connected layers.
    dropout
        A probability for each convolution and each fully connected layer, in order.
    size
        The side of the (square, three-channel) images.

    Examples
    --------
    >>> sum(p.numel() for p in alexnet().parameters())
    6499328
    """
    if len(kernels) != len(channels) or len(dropout) != len(channels) + len(hidden):
        raise UserError(
            "alexnet needs one kernel for each convolution and one dropout probability for each "
            f"convolution and hidden layer: got {len(channels)} channels, {len(kernels)} kernels, "
            f"{len(hidden)} hidden, {len(dropout)} dropout"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    previous = 3
    for i, (width, kernel) in enumerate(zip(channels, kernels, strict=True), start=1):
        layers[f"conv{i}"] = nn.Conv2d(previous, width, kernel, bias=False)
        layers[f"relu{i}"] = nn.ReLU()
        layers[f"drop{i}"] = nn.Dropout(dropout[i - 1])
        layers[f"pool{i}"] = nn.MaxPool2d(2)
        previous, size = width, (size - kernel + 1) // 2
    if size < 1:
        raise UserError("alexnet: the images are too small for these kernels; raise size or shrink kernels")
    layers["flatten"] = nn.Flatten()
    previous *= size * size
    for i, width in enumerate(hidden, start=1):
        j = len(channels) + i
        layers[f"fc{i}"] = nn.Linear(previous, width, bias=False)
        layers[f"relu{j}"] = nn.ReLU()
        layers[f"drop{j}"] = nn.Dropout(dropout[j - 1])
        previous = width
    return MultiHead(nn.Sequential(layers), previous)
