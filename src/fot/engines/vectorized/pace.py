"""What all of local SGD shares: the pace of a step, and models spread over clients and summed up again."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fot.aggregation.plain import sum_rows
from fot.engines.vectorized import kernels
from fot.engines.vectorized.aside import Aside


class NeedsAutograd(Exception):
    """A weight is used more than once, or otherwise than by its layer, and cannot be stepped backward."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass
class Pace:
    """How far the current step goes: the same for all layers."""

    lr: float
    steps: float
    """Steps in the round, counted in the first one's samples: what a factored history must hold."""
    aside: Aside = field(default_factory=lambda: Aside(torch.device("cpu")))
    """Where filters are stepped."""
    keep: float | Tensor = 1.0
    """1 - lr·(weight decay); ``[C]`` where some clients have no samples in this step and stay put."""


def spread(sent: Tensor, clients: int) -> Tensor:
    """What each client was sent, ``[C, *shape]``, of the R models ``[R, *shape]``; of one model a view."""
    if len(sent) == 1:
        return sent.expand(clients, *sent.shape[1:])
    return sent.repeat_interleave(clients // len(sent), dim=0)


def total_change(stack: Tensor, sent: Tensor) -> Tensor:
    """The sum over each model's clients of what they changed, in float64: ``[C, ...]`` to ``[R, ...]``."""
    if kernels.at_hand(stack.device):
        from fot.engines.vectorized.kernels import tails

        return tails.total_change(stack.contiguous(), sent.contiguous())
    clients = len(stack) // len(sent)
    held = [sum_rows(own) for own in torch.split(stack, clients)]
    return (torch.stack(held) if len(held) > 1 else held[0].unsqueeze(0)).sub_(sent, alpha=clients)
