from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.aggregation import make_aggregation
from fot.aggregation.secure import RoundAborted, primitives, server, shamir, wire
from fot.aggregation.secure import client as client_side
from fot.aggregation.secure.aggregation import INPUT, UNMASK
from fot.errors import UserError


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


def run(aggregation, cohort, path, seed=0, following=None):
    summation = aggregation.open(cohort, kind="update", path=path)
    if following is not None:
        aggregation.expect(following)
    arrays = some_arrays(len(cohort), seed)
    summation.add(list(cohort), arrays)
    return arrays, summation.close()


class Envelopes:
    """Counts how often each client is in touch: what it sends without hearing from the server between, and
    what it hears without answering between, fits one envelope."""

    UP = (wire.ADVERTISE, wire.SHARES, wire.MASKED, wire.UNMASK)

    def __init__(self, aggregation):
        self.messages: list[tuple[int, int]] = []
        self.sessions: set[bytes] = set()
        aggregation.record = self.record

    def record(self, stage, message):
        self.messages.append((int.from_bytes(message[18:22], "little"), message[1]))
        self.sessions.add(message[2:18])

    def exchanges(self):
        """Envelopes sent by each client since the last call."""
        sent = {}
        for client in sorted({u for u, _ in self.messages}):
            up = [kind in self.UP for u, kind in self.messages if u == client]
            sent[client] = sum(going_up for going_up, _ in itertools.groupby(up))
        self.messages.clear()
        return sent


def test_a_steady_round_takes_two_exchanges():
    aggregation = make_aggregation("secure", seed=0)
    envelopes, exchanges = Envelopes(aggregation), []
    for number in range(5):
        arrays, sums = run(aggregation, range(5), (0, number), seed=number)
        (each,) = set(envelopes.exchanges().values())
        exchanges.append(each)
        assert_same(sums, expected(arrays, list(range(5)), list(range(5)), "update"))
    assert exchanges == [4, 4, 2, 2, 2]  # a cohort that has come twice is prepared for
    assert len(envelopes.sessions) == 6  # no round shares its keys with another; the sixth is prepared


def test_a_cohort_that_is_announced_is_prepared_for_and_newcomers_come_twice_before():
    aggregation = make_aggregation("secure", seed=0)
    envelopes = Envelopes(aggregation)
    run(aggregation, range(4), (0, 0), following=[2, 3, 4, 9])
    assert envelopes.exchanges() == {0: 4, 1: 4, 2: 4, 3: 4, 4: 2, 9: 2}  # keys and shares of their own
    arrays, sums = run(aggregation, [2, 3, 4, 9], (0, 1), seed=1)
    assert envelopes.exchanges() == {2: 2, 3: 2, 4: 2, 9: 2}
    assert_same(sums, expected(arrays, [2, 3, 4, 9], [2, 3, 4, 9], "update"))
    run(aggregation, [2, 3, 4, 8], (0, 2))
    assert envelopes.exchanges() == {2: 4, 3: 4, 4: 4, 8: 4}


def test_announcing_nobody_or_too_few_prepares_nothing_and_harms_nothing():
    aggregation = make_aggregation("secure", seed=0)
    for number, following in enumerate([None, [0, 1], []]):
        arrays, sums = run(aggregation, range(4), (0, number), following=following)
        assert_same(sums, expected(arrays, list(range(4)), list(range(4)), "update"))
        assert (aggregation._prepared is None) == (number < 3)
    abandoned = aggregation.open(range(4), kind="update", path=(0, 3))
    aggregation.expect([5, 6, 7])
    del abandoned
    run(aggregation, range(5), (0, 4))
    assert aggregation._prepared is None  # what was announced during an abandoned sum is forgotten


def test_steady_rounds_recover_from_dropouts():
    gone = {(0, 2): {1: INPUT}, (0, 3): {2: UNMASK}, (0, 5): {0: 0}}
    aggregation = make_aggregation("secure", seed=0, dropouts=lambda path: gone.get(path, {}))
    envelopes, exchanges = Envelopes(aggregation), []
    for number in range(7):
        arrays, sums = run(aggregation, range(6), (0, number), seed=number)
        exchanges.append(max(envelopes.exchanges().values()))
        included = [u for u in range(6) if gone.get((0, number), {}).get(u, UNMASK) >= UNMASK]
        assert_same(sums, expected(arrays, list(range(6)), included, "update"))
    assert exchanges == [4, 4, 2, 4, 4, 4, 4]  # whoever vanished had not advertised for the round after


def test_a_silent_client_has_not_advertised_for_the_next_round():
    aggregation = make_aggregation("secure", seed=0)
    for number in range(3):
        _, sums = run(aggregation, range(5), (0, number))
    envelopes = Envelopes(aggregation)
    summation = aggregation.open(range(5), kind="update", path=(0, 3))
    assert not envelopes.messages  # it was prepared
    arrays = some_arrays(5)
    summation.add([0, 1, 2, 3], {name: array[:4] for name, array in arrays.items()})
    assert_same(summation.close(), expected(arrays, list(range(5)), [0, 1, 2, 3], "update"))
    envelopes.exchanges()
    _, sums = run(aggregation, range(5), (0, 4))
    assert set(envelopes.exchanges().values()) == {4} and sums.clients == (0, 1, 2, 3, 4)


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


def test_bytes_are_those_of_a_client_that_stays_to_the_end():
    whole = run(make_aggregation("secure", seed=0), range(6), (0, 0))[1]
    for stage, tolerance in [(INPUT, 0), (UNMASK, 0), (0, 400)]:  # who never comes is in nobody's roster
        gone = {2: stage}
        aggregation = make_aggregation("secure", seed=0, dropouts=lambda path, gone=gone: gone)
        sums = run(aggregation, range(6), (0, 0))[1]
        assert 0 <= whole.bytes_up - sums.bytes_up <= tolerance
        assert 0 <= whole.bytes_down - sums.bytes_down <= tolerance


def test_an_aborted_sum_tells_what_it_has_cost():
    gone = dict.fromkeys(range(4), UNMASK)
    aggregation = make_aggregation("secure", seed=0, dropouts=lambda path: gone)
    with pytest.raises(RoundAborted, match=r"too many dropped out; allow a lower aggregation\.thr") as told:
        run(aggregation, range(6), (0, 0))
    assert (told.value.bytes_up, told.value.bytes_down) == aggregation.session.cost()
    assert told.value.bytes_up > 22 + 30 * 4 and aggregation._prepared is None
    with pytest.raises(RoundAborted, match=r"a cohort of 2.*raise training.cohort"):
        aggregation.open([0, 1], kind="update", path=(0, 1))


def test_the_remedy_is_one_that_helps():
    for options, remedy in [
        ({"neighbours": 4}, "allow more aggregation.neighbours or a lower"),
        ({"threshold": 0.5}, r"too many dropped out$"),
    ]:
        gone = dict.fromkeys(range(5), UNMASK)
        aggregation = make_aggregation("secure", seed=0, dropouts=lambda path, gone=gone: gone, **options)
        with pytest.raises(RoundAborted, match=remedy):
            run(aggregation, range(7), (0, 0))


def test_a_client_without_a_true_key_drops_out_and_the_others_go_on(monkeypatch):
    honest = client_side.advertise

    def low_order(client, *others):
        state, message = honest(client, *others)
        return state, message[:-32] + bytes(32) if client == 2 else message

    monkeypatch.setattr(client_side, "advertise", low_order)
    arrays, sums = run(make_aggregation("secure", seed=0), range(5), (0, 0))
    assert_same(sums, expected(arrays, list(range(5)), [0, 1, 3, 4], "update"))


def test_a_client_that_seals_falsely_costs_the_sum_and_no_more(monkeypatch):
    honest = primitives.seal

    def false(secret, session, sender, receiver, shares):
        sealed = honest(secret, session, sender, receiver, shares)
        return bytes(len(sealed)) if sender == 2 else sealed

    monkeypatch.setattr(primitives, "seal", false)
    with pytest.raises(RoundAborted, match="below the minimum"):
        run(make_aggregation("secure", seed=0), range(5), (0, 0))


def test_a_sum_is_closed_once():
    aggregation = make_aggregation("secure", seed=0)
    summation = aggregation.open(range(4), kind="update", path=(0, 0))
    summation.add(range(3), some_arrays(3))
    summation.close()
    for after in (summation.close, lambda: summation.add([3], some_arrays(1))):
        with pytest.raises(UserError, match="closed"):
            after()


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 1.5}, {"threshold": float("nan")}, {"workers": -1}, {"minimum": 1}, {"neighbours": 3},
        {"update_clip": 1e-300}, {"clips": {"*": -1.0}}, {"statistics_bits": 65},
    ],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_one_line(options):
    with pytest.raises(UserError, match=r"choose|among 2"):
        make_aggregation("secure", seed=0, **options)


def test_secrets_do_not_come_from_the_seed(seeded):
    def masked(**options):
        aggregation = make_aggregation("secure", seed=0, **options)
        messages = []
        aggregation.record = lambda stage, message: messages.append(message)
        run(aggregation, range(4), (0, 0))
        return messages

    assert masked() != masked()
    assert masked(entropy=seeded(1)) == masked(entropy=seeded(1)) != masked(entropy=seeded(2))
