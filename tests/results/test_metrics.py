from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.results import metrics

# Worked by hand: a11 a12 a13 = 90 92 80, a22 a23 = 70 74, a33 = 60.
THREE = [[90.0, 92.0, 80.0], [None, 70.0, 74.0], [None, None, 60.0]]


def test_by_hand():
    assert metrics.average_curve(THREE) == [90.0, 81.0, pytest.approx(214 / 3)]
    assert metrics.average_accuracy(THREE) == pytest.approx(214 / 3)
    assert metrics.forgetting_by_task(THREE) == [10.0, -4.0]
    assert metrics.forgetting(THREE) == 3.0
    assert metrics.forgetting_max(THREE) == 4.0  # (92 - 80 + 70 - 74) / 2
    assert metrics.backward_transfer(THREE) == -3.0


def test_one_task_has_an_accuracy_and_nothing_to_forget():
    one = [[88.0]]
    assert metrics.average_accuracy(one) == 88.0
    assert metrics.forgetting(one) is None
    assert metrics.forgetting_max(one) is None
    assert metrics.backward_transfer(one) is None
    assert metrics.forward_transfer([10.0], [10.0]) is None
    assert metrics.average_accuracy([]) is None


def test_forward_transfer_leaves_out_the_first_task():
    assert metrics.forward_transfer([99.0, 14.0, 8.0], [0.0, 10.0, 10.0]) == 1.0
    assert metrics.forward_transfer(None, [1.0]) is None
    assert metrics.forward_transfer([None, None], [1.0, 1.0]) is None
    with pytest.raises(ValueError):
        metrics.forward_transfer([1.0, 2.0], [1.0])


def test_a_missing_accuracy_is_named():
    with pytest.raises(ValueError, match=r"accuracy\[0\]\[1\]"):
        metrics.average_accuracy([[90.0, None], [None, 80.0]])


def test_used_subspace_is_the_mean_over_layers():
    shares = {"a": [10.0, 40.0], "b": [20.0, 100.0], "head": []}
    assert metrics.used_subspace(shares) == 70.0
    assert metrics.used_subspace(shares, after=0) == 15.0
    assert metrics.used_subspace({}) is None


@st.composite
def matrices(draw: st.DrawFn) -> list[list[float | None]]:
    count = draw(st.integers(2, 6))
    percent = st.floats(0, 100)
    return [[None if t < i else draw(percent) for t in range(count)] for i in range(count)]


@settings(max_examples=50)
@given(matrices(), st.floats(0.1, 5))
def test_invariants(accuracy, shift):
    fgt, fgt_max = metrics.forgetting(accuracy), metrics.forgetting_max(accuracy)
    assert metrics.backward_transfer(accuracy) == pytest.approx(-fgt)
    assert fgt_max >= fgt - 1e-9
    last = [row[-1] for row in accuracy]
    assert min(last) - 1e-9 <= metrics.average_accuracy(accuracy) <= max(last) + 1e-9
    # Losing `shift` points on every task at the end costs exactly that much; the last task does not count.
    worse = [[*row[:-1], row[-1] - shift] for row in accuracy]
    assert metrics.forgetting(worse) == pytest.approx(fgt + shift)
    assert metrics.forgetting_max(worse) == pytest.approx(fgt_max + shift)
    other = [*accuracy[:-1], [*accuracy[-1][:-1], 0.0]]
    assert metrics.forgetting(other) == fgt
