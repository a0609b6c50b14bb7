"""A table with a column that says who holds each row, and a perceptron: FedAvg against FOT.

    python examples/table.py              # on scikit-learn's breast cancer data, written as a .csv file
    python examples/table.py TABLE.csv    # on yours: columns "label" and "hospital", all others numbers

Every task has the same rows with the columns in another order, so one output serves all tasks.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_breast_cancer

from fot.benchmarks import Partition, permuted, read
from fot.engines.base import Training
from fot.federation.run import Run
from fot.methods import FOT, FedAvg
from fot.models import mlp


def write_table(path: Path, hospitals: int = 5) -> Path:
    """The breast cancer table of scikit-learn, its rows shared out among `hospitals` in turn."""
    cancer = load_breast_cancer()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([*cancer.feature_names, "label", "hospital"])
        for number, (row, label) in enumerate(zip(cancer.data, cancer.target, strict=True)):
            writer.writerow([*row, cancer.target_names[label], f"hospital {number % hospitals}"])
    return path


def main(table: Path) -> dict[str, dict[str, Any]]:
    """Train with both methods from the same weights; returns their summaries."""
    data = read(table, owner="hospital")  # columns are standardised, a fifth of each class is held back
    torch.manual_seed(0)
    model = mlp(inputs=data.train_x.shape[1], hidden=(100,), classes=data.classes)
    deal = Partition("natural", clients=5)
    stream = permuted(data, torch.from_numpy, deal, tasks=3, name=data.name)
    training = Training(rounds=20, cohort=5, epochs=3, batch_size=8, lr=0.3)
    summaries = {}
    for name, method in {"FedAvg": FedAvg(), "FOT": FOT(threshold=0.9)}.items():
        summaries[name] = Run(stream, model, method, training=training)()
        print(f"{name:7} ACC {summaries[name]['acc']:.2f}   FGT {summaries[name]['fgt']:.2f}")
    return summaries


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(sys.argv[1]) if len(sys.argv) > 1 else write_table(Path(folder) / "cancer.csv"))
