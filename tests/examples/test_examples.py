"""The examples run as they are, and FOT forgets less than federated averaging in each."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_folder_of_images(tmp_path: Path) -> None:
    example = importlib.import_module("folder_of_images")
    results = example.main(example.write_pictures(tmp_path))
    plain, fot = results["FocalFedAvg"], results["FocalFOT"]
    assert fot["fgt"] + 2 < plain["fgt"]
    assert fot["acc"] > plain["acc"] > 90
    assert fot["tasks"][4] == "classes 8, 9"
    assert set(fot["layers"]) == {"body.0", "body.2", "body.5"}  # and no head


def test_the_focal_loss_is_not_cross_entropy() -> None:
    example = importlib.import_module("folder_of_images")
    x = example.torch.tensor([[2.0, -1.0], [0.0, 1.0]])
    batch = example.Batch(x, example.torch.tensor([0, 0]), 0, example.torch.tensor([0.5, 0.5]))
    network = example.Network(example.nn.Identity())
    loss = example.FocalFOT(gamma=2.0).loss(network, {}, batch, {})
    p = example.torch.softmax(batch.x, 1)[:, 0]
    assert loss.item() == pytest.approx(float((-((1 - p) ** 2) * p.log()).mean()))


def test_table(tmp_path: Path) -> None:
    example = importlib.import_module("table")
    results = example.main(example.write_table(tmp_path / "cancer.csv"))
    assert results["FOT"]["fgt"] + 2 < results["FedAvg"]["fgt"]
    assert results["FOT"]["acc"] > results["FedAvg"]["acc"] > 80
    assert results["FOT"]["clients"] == 5


def test_own_loop() -> None:
    results = importlib.import_module("own_loop").main()
    first = {name: [row[0] for row in accuracies] for name, accuracies in results.items()}
    assert first["FOT"][0] == first["FedAvg"][0]  # nothing is protected in the first task
    assert first["FOT"][-1] > first["FedAvg"][-1] + 10
    assert results["FOT"][-1][-1] > 70  # and it still learns
