"""A folder of pictures, a network of one's own and a loss of one's own: FedAvg against FOT.

    python examples/folder_of_images.py             # on scikit-learn's digits, written as PNG files
    python examples/folder_of_images.py PICTURES    # on yours: a folder of 8 x 8 grey pictures for each class

Every task is two more classes. They get a head of their own; the body is shared by all tasks.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from fot.benchmarks import build
from fot.engines.base import Training
from fot.federation.run import Run
from fot.methods import FOT, Batch, FedAvg
from fot.models import MultiHead
from fot.network import Network, Tree


class Net(MultiHead):
    """Two convolutions and a hidden layer, and a head for each task."""

    def __init__(self, width: int = 16) -> None:
        convolutions = [nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU()]
        body = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * width, 64), nn.ReLU())
        super().__init__(body, features=64)


@dataclass(frozen=True)
class FocalFedAvg(FedAvg):
    """FedAvg with the focal loss (Lin et al., 2017): samples that are right already count less."""

    gamma: float = 2.0

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        logits = network(params, batch.x, batch.task, training=True)
        each = functional.cross_entropy(logits, batch.y, reduction="none")
        return batch.mean((1 - torch.exp(-each)) ** self.gamma * each)


@dataclass(frozen=True)
class FocalFOT(FOT):
    """The same loss under FOT, whose work is on the server and at the end of a task."""

    gamma: float = 2.0
    loss = FocalFedAvg.loss


def write_pictures(folder: Path) -> Path:
    """scikit-learn's digits as ``folder/CLASS/NUMBER.png``."""
    digits = load_digits()
    for number, (picture, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((picture * 15).astype("uint8")).save(path)
    return folder


def main(pictures: Path) -> dict[str, dict[str, Any]]:
    """Train with both methods from the same weights; returns their summaries."""
    torch.manual_seed(0)
    model = Net()
    summaries = {}
    for method in (FocalFedAvg(), FocalFOT(threshold=0.95)):
        stream = build("own-split", path=str(pictures), clients=10, classes_per_task=2)
        run = Run(stream, model, method, training=Training(rounds=15, cohort=5, batch_size=8, lr=0.3))
        name = type(method).__name__
        summaries[name] = run()
        print(f"{name:12} ACC {summaries[name]['acc']:.2f}   FGT {summaries[name]['fgt']:.2f}")
    return summaries


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else write_pictures(Path(folder)))
