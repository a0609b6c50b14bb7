"""From samples as they were read to what the model takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from fot.randomness import bits

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
        x = torch.from_numpy(np.array(raw, order="C"))  # a copy: what was read stays as it is
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            x = interpolate(x, (self.size, self.size), mode="bilinear", antialias=True)  # uint8 stays uint8
        x = x.float()
        if self.padding:
            x = pad(x, [self.padding] * 4)
        axes = (-1, *[1] * (x.ndim - 2))
        mean, std = (torch.tensor(of).mul(self.largest).view(axes) for of in (self.mean, self.std))
        x = x.sub_(mean).div_(std)
        return x.expand(-1, self.channels, -1, -1).contiguous() if self.channels else x

    @property
    def black(self) -> tuple[float, ...]:
        """What a black pixel becomes."""
        return tuple(-m / s for m, s in zip(self.mean, self.std, strict=True))


@dataclass(frozen=True)
class CropAndFlip:
    """Pads every picture, crops it back at a random place, and mirrors every other one.

    What is drawn for a sample depends on its key alone, not on the batch it comes in.

    Parameters
    ----------
    padding
        Pixels added on every side.
    fill
        What they hold, for each channel: the value of black after normalisation.

    Examples
    --------
    >>> x = torch.arange(9.0).view(1, 1, 3, 3)
    >>> CropAndFlip(1, (0.0,))(x, torch.tensor([5])).squeeze()
    tensor([[4., 5., 0.],
            [7., 8., 0.],
            [0., 0., 0.]])
    """

    padding: int
    fill: tuple[float, ...]

    def __call__(self, x: Tensor, keys: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        draws = bits(keys[:, None], torch.arange(3, device=x.device))
        top, left = ((draws[:, :2] % (2 * self.padding + 1)) - self.padding).unsqueeze(-1).unbind(1)
        mirror = (draws[:, 2] >> 31).bool().unsqueeze(-1)
        rows = torch.arange(height, device=x.device) + top
        columns = torch.arange(width, device=x.device)
        columns = torch.where(mirror, width - 1 - columns, columns) + left
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
            :, None, :
        ]
        sample = torch.arange(len(x), device=x.device)[:, None, None]
        rows, columns = rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None, :]
        cropped = x.permute(0, 2, 3, 1)[sample, rows, columns].permute(0, 3, 1, 2)
        fill = _constant(self.fill, x.dtype, x.device).view(-1, 1, 1)
        return torch.where(inside[:, None], cropped, fill)


@cache
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made once: a copy from the host could not be recorded in a CUDA graph."""
    return torch.tensor(values, dtype=dtype, device=device)


def standardise(train_x: np.ndarray) -> Prepare:
    """Pictures by the mean and deviation of each channel of the training part; numbers as they are."""
    if train_x.dtype != np.uint8 or train_x.ndim != 4:
        return lambda raw: torch.from_numpy(np.array(raw, np.float32, order="C"))
    levels = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(train_x.shape[1]):
        share = np.bincount(train_x[:, channel].ravel(), minlength=256) / train_x[:, channel].size
        means.append(float(share @ levels))
        deviations.append(float(np.sqrt(share @ (levels - means[-1]) ** 2)) or 1.0)
    return Pictures(tuple(means), tuple(deviations))
