"""From samples as they were read to what the model takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

Prepare = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class Pictures:
    """Pictures (N, C, H, W) to float32: resized, padded, normalised and repeated over channels.

    Parameters
    ----------
    mean, std
        Of each channel, of pixel values in [0, 1].
    size
        Height and width to resize to (bilinear), or None.
    padding
        Black pixels added on every side.
    channels
        The number of channels to repeat a grey picture over, or None.
    largest
        The pixel value that counts as 1.

    Examples
    --------
    >>> white = np.full((1, 1, 28, 28), 255, np.uint8)
    >>> x = Pictures((0.1,), (0.25,), padding=2, channels=3)(white)
    >>> tuple(x.shape), round(x[0, 2, 15, 15].item(), 4), round(x[0, 0, 0, 0].item(), 4)
    ((1, 3, 32, 32), 3.6, -0.4)
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None = None
    padding: int = 0
    channels: int | None = None
    largest: float = 255.0

    def __call__(self, raw: np.ndarray) -> Tensor:
        x = torch.from_numpy(np.ascontiguousarray(raw))
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)  # uint8 stays uint8
        x = x.float()
        if self.padding:
            x = pad(x, [self.padding] * 4)
        axes = (-1, *[1] * (x.ndim - 2))
        mean, std = (torch.tensor(of).view(axes) for of in (self.mean, self.std))
        x = x.div_(self.largest).sub_(mean).div_(std)
        return x.expand(-1, self.channels, -1, -1).contiguous() if self.channels else x
