"""The bench measures three ways of one round, and they reach the same model."""

from __future__ import annotations

import pytest

from fot.engines.bench import bench_engine, bench_table
from fot.engines.profile import profile_round, profile_table
from fot.errors import UserError


def test_three_ways_agree() -> None:
    rows = bench_engine("digits", rounds=2, cohort=3)
    assert [row.name for row in rows] == ["vectorized", "sequential", "by hand"]
    for row in rows:
        assert row.seconds > 0 and row.floor > 0 and row.memory >= 0
        assert row.difference < 1e-10
    assert bench_table(rows, "digits").row_count == 3


def test_a_profile_adds_up() -> None:
    costs = profile_round("digits", rounds=2, cohort=3)
    assert [c.microseconds for c in costs] == sorted((c.microseconds for c in costs), reverse=True)
    # Five steps a round of three layers; the weights are stepped on the way back by a product that adds.
    assert {c.name: c.launches for c in costs}["aten::bmm"] >= 15
    table = profile_table(costs, "digits", most=4)
    assert table.row_count == 6
    shown = [float(cell) for cell in table.columns[2].cells]
    assert sum(shown[:-1]) == pytest.approx(shown[-1], abs=0.5)
    assert shown[-1] == pytest.approx(sum(c.microseconds for c in costs), abs=0.1)


def test_unknown_work() -> None:
    with pytest.raises(UserError, match="choose digits"):
        bench_engine("nothing")
