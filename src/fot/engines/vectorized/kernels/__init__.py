"""Kernels for a cohort on a GPU, written in Triton: convolutions, and what follows a product.

They compute what torch's own operations compute, in fewer and larger steps, and in float64 too, so that the
trial of a cohort tries them as well. Where they cannot run, torch's operations do the same, slower.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import NamedTuple

import torch


class Window(NamedTuple):
    """The windows of a convolution: their size, stride, and the padding before the first row and column."""

    size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    before: tuple[int, int] = (0, 0)


@cache
def at_hand(device: torch.device) -> bool:
    """Whether the kernels run on this device."""
    if device.type != "cuda":
        return False
    try:
        from fot.engines.vectorized.kernels.tails import total_change

        ones = torch.ones(3, 2, device=device)
        if total_change(ones, ones[:1]).tolist() == [[0.0, 0.0]]:
            return True
        reason = "a kernel is wrong"
    except Exception as error:  # a compiler can fail in many ways, and none of them matters here
        reason = str(error).partition("\n")[0]
    warnings.warn(f"cohorts train without kernels of their own, and so slower: {reason}", stacklevel=2)
    return False
