from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.aggregation import make_aggregation
from fot.aggregation.secure import RoundAborted, server, shamir
from fot.aggregation.secure.aggregation import INPUT, UNMASK


def some_arrays(clients, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": 0.1 * torch.randn(clients, 6, 5, generator=generator),
        "sketch": 100 * torch.randn(clients, 7, generator=generator, dtype=torch.float64),
        "samples": torch.arange(1, clients + 1),
        "loss": torch.rand(clients, generator=generator),
    }


def expected(arrays, cohort, included, kind, **options):
    """The encoded sum over the clients that are included, in a cohort of the same size."""
    summation = make_aggregation("encoded", seed=0, **options).open(cohort, kind=kind, path=(0,))
    rows = [cohort.index(u) for u in included]
    summation.add(included, {name: array[rows] for name, array in arrays.items()})
    return summation.close()


def assert_same(sums, reference):
    assert (sums.clients, sums.clipped) == (reference.clients, reference.clipped)
    assert sums.arrays.keys() == reference.arrays.keys()
    for name, array in reference.arrays.items():
        assert torch.equal(sums.arrays[name], array), name
        assert sums.arrays[name].dtype == array.dtype


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_exact_sums_whichever_third_drops_out_and_whenever(data):
    clients = data.draw(st.integers(4, 14))
    cohort = [3 * u + 1 for u in range(clients)]
    third = data.draw(st.permutations(cohort))[: clients // 3]
    gone = {u: data.draw(st.integers(0, 3)) for u in third}
    kind = data.draw(st.sampled_from(["update", "statistics"]))
    bits = data.draw(st.sampled_from([21, 32]))
    options = {"update_bits": bits, "clips": {"sketch": data.draw(st.sampled_from([50.0, 1000.0]))}}
    summation = make_aggregation("secure", seed=0, dropouts=lambda path: gone, workers=1, **options).open(
        cohort, kind=kind, path=(0, 0)
    )
    arrays = some_arrays(clients)
    split = data.draw(st.integers(1, clients))  # a stack, or two
    for rows in (slice(0, split), slice(split, clients)):
        if cohort[rows]:
            summation.add(cohort[rows], {name: array[rows] for name, array in arrays.items()})
    included = [u for u in cohort if gone.get(u, UNMASK) >= UNMASK]
    assert_same(summation.close(), expected(arrays, cohort, included, kind, **options))


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_exact_sums_on_the_sparse_graph(data):
    cohort = list(range(24))
    gone = {u: data.draw(st.integers(0, 3)) for u in data.draw(st.permutations(cohort))[:4]}
    aggregation = make_aggregation("secure", seed=0, neighbours=12, dropouts=lambda path: gone, workers=1)
    summation = aggregation.open(cohort, kind="update", path=(0, 0))
    arrays = some_arrays(24)
    summation.add(cohort, arrays)
    included = [u for u in cohort if gone.get(u, UNMASK) >= UNMASK]
    assert_same(summation.close(), expected(arrays, cohort, included, "update"))


def test_a_client_that_never_adds_has_dropped_out():
    aggregation = make_aggregation("secure", seed=0)
    summation = aggregation.open(range(6), kind="update", path=(0, 0))
    arrays = some_arrays(6)
    summation.add([0, 1, 3, 5], {name: array[[0, 1, 3, 5]] for name, array in arrays.items()})
    assert_same(summation.close(), expected(arrays, list(range(6)), [0, 1, 3, 5], "update"))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_beyond_the_threshold_the_round_aborts_and_no_secret_is_put_together(data):
    clients = data.draw(st.integers(4, 10))
    stage = data.draw(st.sampled_from([INPUT, UNMASK]))
    t = server.threshold_of(clients - 1, 0.6)
    stay = data.draw(
        st.integers(0 if stage == UNMASK else 1, t)
    )  # each of them keeps at most t - 1 neighbours
    gone = dict.fromkeys(data.draw(st.permutations(range(clients)))[stay:], stage)
    aggregation = make_aggregation("secure", seed=0, dropouts=lambda path: gone, workers=1)
    summation = aggregation.open(range(clients), kind="update", path=(0, 0))
    summation.add(list(range(clients)), some_arrays(clients))
    put_together = []
    original = shamir.Combiner.combine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shamir.Combiner, "combine", lambda *args: put_together.append(1) or original(*args))
        with pytest.raises(RoundAborted, match=r"too many dropped out|below the minimum"):
            summation.close()
    assert not put_together
    state = aggregation.session.server
    if stage == INPUT:
        assert isinstance(state, server.Inputs)  # nobody was asked for a share
    else:
        held = [sum(u in shares for shares in state.answers.values()) for u in range(clients)]
        assert min(held) < t  # and so some self mask covers the sum


def test_a_cohort_below_the_minimum_is_refused():
    with pytest.raises(RoundAborted, match="below the minimum"):
        make_aggregation("secure", seed=0).open([0, 1], kind="update", path=(0,))


def run(aggregation, cohort, path, seed=0):
    summation = aggregation.open(cohort, kind="update", path=path)
    arrays = some_arrays(len(cohort), seed)
    summation.add(list(cohort), arrays)
    return arrays, summation.close()


def test_a_steady_round_takes_two_exchanges():
    aggregation = make_aggregation("secure", seed=0)
    exchanges, sessions = [], set()
    for number in range(5):
        arrays, sums = run(aggregation, range(5), (0, number), seed=number)
        exchanges.append(aggregation.exchanges)
        sessions.add(aggregation.session.server.before.terms.session)
        assert_same(sums, expected(arrays, list(range(5)), list(range(5)), "update"))
    assert exchanges == [4, 4, 2, 2, 2]  # a cohort that has come twice is prepared for
    assert len(sessions) == 5  # and no round shares its keys with another


def test_a_cohort_that_is_announced_is_prepared_for():
    aggregation = make_aggregation("secure", seed=0)
    aggregation.expect([2, 3, 4, 9])
    run(aggregation, range(4), (0, 0))
    arrays, sums = run(aggregation, [2, 3, 4, 9], (0, 1), seed=1)
    assert aggregation.exchanges == 2
    assert_same(sums, expected(arrays, [2, 3, 4, 9], [2, 3, 4, 9], "update"))
    run(aggregation, [2, 3, 4, 8], (0, 2))
    assert aggregation.exchanges == 4


def test_steady_rounds_recover_from_dropouts():
    gone = {(0, 2): {1: INPUT}, (0, 3): {2: UNMASK}, (0, 5): {0: 0}}
    aggregation = make_aggregation("secure", seed=0, dropouts=lambda path: gone.get(path, {}))
    exchanges = []
    for number in range(7):
        arrays, sums = run(aggregation, range(6), (0, number), seed=number)
        exchanges.append(aggregation.exchanges)
        included = [u for u in range(6) if gone.get((0, number), {}).get(u, UNMASK) >= UNMASK]
        assert_same(sums, expected(arrays, list(range(6)), included, "update"))
    assert exchanges == [4, 4, 2, 4, 4, 4, 4]  # whoever vanished had not advertised for the round after


def test_a_silent_client_has_not_advertised_for_the_next_round():
    aggregation = make_aggregation("secure", seed=0)
    for number in range(3):
        _, sums = run(aggregation, range(5), (0, number))
    summation = aggregation.open(range(5), kind="update", path=(0, 3))
    assert aggregation.exchanges == 2
    arrays = some_arrays(5)
    summation.add([0, 1, 2, 3], {name: array[:4] for name, array in arrays.items()})
    assert_same(summation.close(), expected(arrays, list(range(5)), [0, 1, 2, 3], "update"))
    _, sums = run(aggregation, range(5), (0, 4))
    assert aggregation.exchanges == 4 and sums.clients == (0, 1, 2, 3, 4)


def test_bytes_are_counted_message_by_message():
    aggregation = make_aggregation("secure", seed=0)
    messages = []
    aggregation.record = lambda stage, message: messages.append(message)
    _, sums = run(aggregation, range(5), (0, 0))
    by_type = {kind: [m for m in messages if m[1] == kind] for kind in range(1, 8)}
    assert {kind: len(found) for kind, found in by_type.items()} == dict.fromkeys(range(1, 8), 5)
    up = sum(len(m) for kind in (1, 3, 5, 7) for m in by_type[kind])
    down = sum(len(m) for kind in (2, 4, 6) for m in by_type[kind])
    assert (sums.bytes_up, sums.bytes_down) == (round(up / 5), round(down / 5))
    payload = 30 * 4 + 7 * 4 + 8 + 8 + 8  # weight, sketch (an update here), samples, loss; entries clipped
    assert len(by_type[5][0]) == 22 + payload


def test_secrets_do_not_come_from_the_seed(seeded):
    def masked(**options):
        aggregation = make_aggregation("secure", seed=0, **options)
        messages = []
        aggregation.record = lambda stage, message: messages.append(message)
        run(aggregation, range(4), (0, 0))
        return messages

    assert masked() != masked()
    assert masked(entropy=seeded(1)) == masked(entropy=seeded(1)) != masked(entropy=seeded(2))
