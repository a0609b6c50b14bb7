from __future__ import annotations

import pytest
import torch

from fot.aggregation import make_aggregation
from fot.errors import UserError


def open_sum(cohort, kind="plain"):
    return make_aggregation(kind, seed=0).open(cohort, kind="update", path=(0, 0))


def test_sum_does_not_depend_on_grouping():
    x = torch.randn(7, 5, 3, generator=torch.Generator().manual_seed(0))
    whole = open_sum(range(7))
    whole.add(list(range(7)), {"a": x, "n": torch.arange(7)})
    pieces = open_sum(range(7))
    for rows in ([6, 2], [0], [5, 1, 3, 4]):
        pieces.add(rows, {"a": x[rows], "n": torch.arange(7)[rows]})
    one, other = whole.close(), pieces.close()
    assert one.clients == other.clients == tuple(range(7))
    torch.testing.assert_close(one.arrays["a"], x.double().sum(0).float(), rtol=0, atol=0)
    torch.testing.assert_close(other.arrays["a"], one.arrays["a"], rtol=1e-7, atol=1e-7)
    assert one.arrays["n"].item() == 21 and one.arrays["n"].dtype == torch.int64


def test_rows_of_a_call_are_added_in_the_order_of_ids():
    x = torch.tensor([[1e17], [1.0], [-1e17]], dtype=torch.float64)
    for rows in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        summation = open_sum(range(3))
        summation.add(rows, {"a": x[rows]})
        assert summation.close().arrays["a"].item() == x.sum(0).item()


def test_float32_terms_are_accumulated_in_float64():
    summation = open_sum(range(3))
    for client, value in enumerate([1.0, 2.0**-24, 2.0**-24]):
        summation.add([client], {"a": torch.tensor([[value]])})
    assert summation.close().arrays["a"].item() == 1.0 + 2.0**-23


def test_totals_count_as_the_clients_they_are_of():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    mixed, rows = open_sum(range(6)), open_sum(range(6))
    rows.add([0, 1, 2, 3, 4], {"a": x})
    mixed.add([3], {"a": x[3:4]})
    total = x[[0, 1, 2, 4]].double().sum(0)
    mixed.add_total([0, 1, 2, 4], {"a": total}, {"a": torch.float32})
    total.zero_()  # the sum holds a copy
    with pytest.raises(UserError, match="added twice"):
        mixed.add_total([4, 5], {"a": x[0]}, {"a": torch.float32})
    with pytest.raises(UserError, match="types of 'a'"):
        mixed.add_total([5], {"a": x[0]}, {"a": torch.float64})
    one, other = mixed.close(), rows.close()
    assert one.clients == other.clients and one.bytes_up == other.bytes_up == 12
    assert one.arrays["a"].dtype == torch.float32
    torch.testing.assert_close(one.arrays["a"], other.arrays["a"], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["encoded", "secure"])
def test_only_plain_sums_take_totals(kind):
    assert open_sum(range(3), kind).add_total is None and open_sum(range(3)).add_total is not None


def test_bytes_are_those_of_one_client():
    summation = open_sum(range(4))
    summation.add([1, 3], {"a": torch.zeros(2, 5, 3), "b": torch.zeros(2, dtype=torch.float64)})
    sums = summation.close()
    assert (sums.bytes_up, sums.bytes_down, sums.clients) == (68, 0, (1, 3))


@pytest.mark.parametrize("kind", ["plain", "encoded", "secure"])
def test_mistakes_are_named(kind):
    with pytest.raises(UserError, match="empty sum"):
        open_sum(range(3), kind).close()
    with pytest.raises(UserError, match="twice"):
        open_sum([1, 1, 2], kind)
    summation = open_sum(range(4), kind)
    summation.add([0], {"a": torch.zeros(1, 3)})
    with pytest.raises(UserError, match="shapes of 'a, b'"):
        summation.add([1], {"b": torch.zeros(1, 3)})
    with pytest.raises(UserError, match="shapes of 'a'"):
        summation.add([1], {"a": torch.zeros(1, 4)})
    with pytest.raises(UserError, match="one row"):
        summation.add([1, 2], {"a": torch.zeros(1, 3)})
    with pytest.raises(UserError, match="added twice"):
        summation.add([0], {"a": torch.zeros(1, 3)})
    with pytest.raises(UserError, match="not in the cohort"):
        summation.add([1, 9], {"a": torch.zeros(2, 3)})
    with pytest.raises(UserError, match="twice"):
        summation.add([1, 1], {"a": torch.zeros(2, 3)})
    with pytest.raises(UserError, match="types of 'a'"):
        summation.add([1], {"a": torch.zeros(1, 3, dtype=torch.float64)})
    summation.add([1, 2, 3], {"a": torch.ones(3, 3)})  # what was refused has left no trace
    assert summation.close().arrays["a"].tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(UserError, match="closed"):
        summation.close()


def test_unknown_kind():
    with pytest.raises(UserError, match="plain, encoded or secure"):
        make_aggregation("homomorphic", seed=0)
