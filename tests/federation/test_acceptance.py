"""The promise of the first run: on `digits`, three seeds, FOT learns more and forgets far less."""

from __future__ import annotations

from statistics import fmean

import pytest

from fot.federation.experiment import resolve
from fot.federation.run import Run


@pytest.mark.parametrize("partition", ["iid", "shards"])
def test_fot_beats_federated_averaging_on_digits(partition):
    mean = {}
    for method in ("fedavg", "fot"):
        runs = [
            Run.of(resolve("digits", method=method, partition=partition, seed=seed))() for seed in range(3)
        ]
        mean[method] = fmean(run["acc"] for run in runs), fmean(run["fgt"] for run in runs)
    assert mean["fot"][0] >= mean["fedavg"][0] + 5
    assert mean["fot"][1] <= mean["fedavg"][1] / 3
