"""The bench measures three ways of one round, and they reach the same model."""

from __future__ import annotations

import pytest

from fot.engines.bench import bench_engine, bench_table
from fot.errors import UserError


def test_three_ways_agree() -> None:
    rows = bench_engine("digits", rounds=2, cohort=3)
    assert [row.name for row in rows] == ["vectorized", "sequential", "by hand"]
    for row in rows:
        assert row.seconds > 0 and row.floor > 0 and row.memory >= 0
        assert row.difference < 1e-10
    assert bench_table(rows, "digits").row_count == 3


def test_unknown_work() -> None:
    with pytest.raises(UserError, match="choose digits"):
        bench_engine("nothing")
