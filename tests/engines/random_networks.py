"""Networks put together at random: what follows what must not matter to an engine."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fot.models import multi_head


class Added(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Beside(nn.Module):
    """Two branches, whose results are put side by side."""

    def __init__(self, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.other(x)], 1)


class Gated(nn.Module):
    """Each channel by a factor that follows from the means of all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.flatten(2).mean(2)).sigmoid()[..., None, None]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


ANYWHERE: list[Callable[[int], nn.Module]] = [
    lambda n: nn.ReLU(),
    lambda n: Function(F.relu),
    lambda n: nn.PReLU(),
    lambda n: nn.GELU(),
    lambda n: nn.LeakyReLU(0.1),
    lambda n: nn.Dropout(0.3),
]
ON_MAPS = [
    *ANYWHERE,
    lambda n: nn.MaxPool2d(2),
    lambda n: nn.MaxPool2d(3, stride=1, padding=1),
    lambda n: nn.AvgPool2d(2),
    lambda n: nn.GroupNorm(1, n),
    lambda n: Gated(n),
    lambda n: nn.Conv2d(n, 3, 2, stride=2, padding=1),
    lambda n: nn.Sequential(nn.Conv2d(n, 3, 2), nn.ReLU(inplace=True)),
    lambda n: nn.Conv2d(n, 2 * n, (2, 1), groups=n, bias=False),
    # An ε that keeps what rounding is multiplied by small, whatever the few samples are.
    lambda n: nn.Sequential(nn.Conv2d(n, 4, 3, padding=1), nn.BatchNorm2d(4, eps=0.1)),
    lambda n: Added(nn.Sequential(nn.Conv2d(n, n, 1), nn.BatchNorm2d(n, eps=0.1, track_running_stats=False))),
    lambda n: Added(nn.Sequential(nn.Conv2d(n, n, 3, padding="same", bias=False), nn.ReLU())),
    lambda n: Beside(nn.Conv2d(n, 2, 1), nn.Conv2d(n, 3, 1)),
]
ON_ROWS = [
    *ANYWHERE,
    lambda n: nn.LayerNorm(n),
    lambda n: nn.Linear(n, 5, bias=False),
    lambda n: nn.Linear(n, 30),
    lambda n: nn.Sequential(nn.Linear(n, 5), nn.ReLU(inplace=True)),
    lambda n: nn.Sequential(nn.Linear(n, 30, bias=False), nn.LeakyReLU(0.1, inplace=True)),
    lambda n: nn.Sequential(nn.Linear(n, 6), nn.BatchNorm1d(6, eps=0.1)),
    lambda n: Added(nn.Linear(n, n)),
    lambda n: Added(nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Dropout(0.2))),
    lambda n: Beside(nn.Linear(n, 3), nn.Linear(n, 2)),
]


def random_network(seed: int, classes: int) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    """What makes a network, of one head or with one for each task, and the shape of its samples."""
    choose = Random(seed)
    shape = (2, 7, 6) if choose.random() < 0.6 else (5,)
    parts: list[nn.Module] = []
    x = torch.randn(4, *shape)

    def follow(part: nn.Module) -> None:
        nonlocal x
        x = part(x.clone())
        parts.append(part)

    def some(of: list[Any], most: int) -> None:
        for _ in range(choose.randint(1, most)):
            part = choose.choice(of)(x.shape[1])
            if x.dim() < 4 or min(x.shape[2:]) > 2:
                follow(part)

    torch.manual_seed(seed)
    with torch.no_grad():
        if len(shape) > 1:
            some(ON_MAPS, 6)
            follow(choose.choice([nn.Flatten(), Function(lambda x: x.mean((2, 3)))]))
        some(ON_ROWS, 4)
    body = nn.Sequential(*parts)
    if choose.random() < 0.5:
        return (lambda: multi_head(body, shape)), shape
    return (lambda: nn.Sequential(body, nn.Linear(x.shape[1], classes))), shape
