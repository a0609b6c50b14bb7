"""Dropout whose masks come from keys, so that every engine drops the same units.

Inside :func:`keyed_dropout` each call of ``torch.nn.functional.dropout`` (which ``nn.Dropout``
makes) takes its mask from a hash of (key, number of the call, position in the client's batch).
A cohort folded into one batch, C clients of B samples each, gives one key a client. Dropout within
attention and between recurrent layers is drawn alike.

>>> x = torch.ones(2, 3)
>>> with keyed_dropout(7):
...     first = torch.nn.functional.dropout(x, 0.5)
>>> with keyed_dropout(7):
...     again = torch.nn.functional.dropout(x, 0.5)
>>> bool((first == again).all())
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fot.composed import COMPOSED, NotComposed
from fot.randomness import fold, uniform

_WHOLE_CHANNELS = {functional.dropout1d, functional.dropout2d, functional.dropout3d}


class keyed_dropout(TorchFunctionMode):
    """Draw dropout masks from ``keys``: one key, or a key for each client of a folded batch."""

    def __init__(self, keys: int | Tensor) -> None:
        super().__init__()
        self.keys = keys.reshape(-1, 1) if isinstance(keys, Tensor) else keys
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is functional.dropout or func in _WHOLE_CHANNELS:
            return self._dropout(func, *args, **(kwargs or {}))
        if func in COMPOSED and _drops(COMPOSED[func], args, kwargs or {}):
            with suppress(NotComposed), self:
                return COMPOSED[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self,
        func: Callable[..., Any],
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return x
        mask = self.mask(x.shape if func is functional.dropout else x.shape[:2], p, x.device)
        mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        factor = mask.to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
        return x.mul_(factor) if inplace else x * factor

    def mask(self, shape: torch.Size, p: float, device: torch.device) -> Tensor:
        """The next mask: True where a unit is kept."""
        clients = self.keys.shape[0] if isinstance(self.keys, Tensor) else 1
        counter = torch.arange(shape.numel() // clients, device=device)
        kept = uniform(fold(self.keys, self.calls), counter) >= p
        self.calls += 1
        return kept.reshape(shape)


def _drops(composed: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call of a composed function drops anything."""
    given = inspect.signature(composed).bind(*args, **kwargs).arguments
    return bool(given.get("dropout_p")) and bool(given.get("training", True))
