from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom

from fot.aggregation.secure import primitives
from fot.aggregation.secure.graph import _tail, degree_needed, neighbours, threshold_of
from fot.aggregation.secure.shamir import PRIME, Combiner, combine, split
from fot.aggregation.secure.wire import Refusal
from fot.errors import UserError

SESSION = bytes(range(16))


def test_key_agreement_is_that_of_rfc_7748():
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    one, other = alice, bob
    assert (
        primitives.public_key(one).hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    )
    expected = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert primitives.agree(primitives.private_key(one), primitives.public_key(other)).hex() == expected
    assert primitives.agree(primitives.private_key(other), primitives.public_key(one)).hex() == expected


def test_a_key_of_low_order_is_refused():
    with pytest.raises(Refusal, match="not a key"):
        primitives.agree(primitives.private_key(b"5" * 32), bytes(32))


def test_masks_are_the_key_stream_of_aes_256():
    # The encryptions of the blocks 0 and 1 under the zero key: the AES-256 test vectors of GCM.
    stream = "dc95c078a2408989ad48a21492842087" + "530f8afbc74536b9a963b4f1c4cb738b"
    assert primitives.expand(bytes(32), 32).hex() == stream
    words = [np.zeros(2, np.uint32), np.zeros(3, np.uint64)]
    primitives.add_masks(words, [(32, 2), (64, 3)], [bytes(32)], [])
    assert (words[0].astype("<u4").tobytes() + words[1].astype("<u8").tobytes()).hex() == stream
    primitives.add_masks(words, [(32, 2), (64, 3)], [], [bytes(32)])
    assert not words[0].any() and not words[1].any()


def test_masks_of_long_vectors_are_one_stream():
    length = 70_001  # more than two blocks
    words = [np.arange(length, dtype=np.uint32)]
    primitives.add_masks(words, [(32, length)], [b"\1" * 32, b"\2" * 32], [b"\3" * 32])
    one, two, three = (
        np.frombuffer(primitives.expand(bytes([i]) * 32, 4 * length), "<u4") for i in (1, 2, 3)
    )
    np.testing.assert_array_equal(words[0], np.arange(length, dtype=np.uint32) + one + two - three)


def test_derived_keys_are_known_and_apart():
    seed = primitives.pair_seed(bytes(32), SESSION, 3, 7)
    assert seed == primitives.pair_seed(bytes(32), SESSION, 7, 3)
    assert seed.hex() == "4348da4c8e959955e0d05d5758fd8a75a489e01556237ff56db720e6c7651084"
    others = [
        primitives.pair_seed(bytes(32), SESSION, 3, 8),
        primitives.pair_seed(bytes(32), bytes(16), 3, 7),
        primitives.derive(bytes(32), b"share", SESSION, 3, 7),
        primitives.derive(bytes(32), b"share", SESSION, 7, 3),
        primitives.self_seed(5, SESSION, 3),
        primitives.self_seed(5, SESSION, 4),
        primitives.mask_key(5, SESSION, 3),
    ]
    assert len({seed, *others}) == 8


def test_sealed_shares_open_only_where_they_belong():
    sealed = primitives.seal(b"k" * 32, SESSION, 1, 2, b"x" * 32)
    assert len(sealed) == 48
    assert primitives.unseal(b"k" * 32, SESSION, 1, 2, sealed) == b"x" * 32
    for secret, session, sender, receiver, data in [
        (b"l" * 32, SESSION, 1, 2, sealed),
        (b"k" * 32, bytes(16), 1, 2, sealed),
        (b"k" * 32, SESSION, 2, 1, sealed),
        (b"k" * 32, SESSION, 1, 2, sealed[:-1] + bytes([sealed[-1] ^ 1])),
    ]:
        with pytest.raises(Refusal, match="not authentic"):
            primitives.unseal(secret, session, sender, receiver, data)


def test_shares_known_answers():
    # 7 + 3 x + 2 x² by hand, and once around the prime.
    assert split(7, [3, 2], [1, 2, 3, 10]) == [12, 21, 34, 237]
    assert split(PRIME - 1, [PRIME - 1], [1, 2]) == [PRIME - 2, PRIME - 3]
    assert combine({1: 12, 3: 34, 10: 237}, 3) == 7
    assert combine({1: PRIME - 2, 2: PRIME - 3}, 2) == PRIME - 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_threshold_of_shares_gives_the_secret(data):
    holders = data.draw(st.lists(st.integers(1, 2**32), min_size=2, max_size=9, unique=True))
    t = data.draw(st.integers(1, len(holders)))
    secret, *rest = data.draw(st.lists(st.integers(0, PRIME - 1), min_size=t, max_size=t))
    shares = dict(zip(holders, split(secret, rest, holders), strict=True))
    subset = data.draw(st.permutations(holders))[: data.draw(st.integers(t, len(holders)))]
    chosen = {x: shares[x] for x in subset}
    assert combine(chosen, t) == secret
    assert Combiner(t, holders).combine(chosen) == secret  # whichever way the weights are found
    with pytest.raises(ValueError):
        combine(dict(list(chosen.items())[: t - 1]), t)


def test_fewer_shares_fit_every_secret():
    secret, coefficients = 1234, [99, 7]
    two = dict(zip([1, 2], split(secret, coefficients, [1, 2]), strict=True))
    for other in (0, 1, PRIME - 1):
        # A polynomial through the two shares and any secret exists: interpolate, and read the shares off it.
        value_at_3 = combine({x - 3: y for x, y in {0: other, **two}.items()}, 3)
        assert combine({**two, 3: value_at_3}, 3) == other


@settings(max_examples=30, deadline=None)
@given(st.integers(4, 40), st.integers(1, 12), st.binary(min_size=16, max_size=16))
def test_graph_is_regular_symmetric_and_connected(clients, half, session):
    degree = 2 * half
    graph = neighbours(range(100, 100 + clients), degree, session)
    for u, peers in graph.items():
        assert len(peers) == min(degree, clients - 1) and u not in peers
        assert all(u in graph[v] for v in peers)
    gone = set(list(graph)[: min(degree, clients - 1) - 1])  # it survives the loss of any degree - 1
    left = [u for u in graph if u not in gone]
    seen, front = {left[0]}, [left[0]]
    while front:
        for v in graph[front.pop()]:
            if v not in gone and v not in seen:
                seen.add(v)
                front.append(v)
    assert seen == set(left)


def test_graph_depends_on_the_session_and_must_be_even():
    assert neighbours(range(30), 4, bytes(16)) != neighbours(range(30), 4, SESSION)
    with pytest.raises(UserError, match="even"):
        neighbours(range(30), 5, SESSION)


def test_a_third_may_always_leave_the_complete_graph():
    for clients in range(4, 300):
        t = threshold_of(clients - 1, 0.6)
        assert 2 * t > clients - 1
        assert clients - 1 - clients // 3 >= t


def test_degrees_that_the_documentation_quotes():
    quoted = {
        (0.05, 0.05): [14, 26, 30],
        (0.1, 0.1): [26, 38, 50],
        (0.2, 0.1): [34, 56, 74],
        (0.1, 0.2): [34, 90, 140],
        (0.2, 0.2): [44, 90, 140],
        (0.05, 0.33): [54, 208, 618],
    }
    for (colluding, dropping), degrees in quoted.items():
        for clients, degree in zip((64, 256, 1024), degrees, strict=True):
            gone = {"colluding": int(colluding * clients), "dropping": int(dropping * clients)}
            assert degree_needed(clients, **gone, share=0.6) == degree


def test_the_chances_are_hypergeometric():
    for population, marked, draws, at_least in [(63, 6, 26, 4), (1023, 102, 50, 20), (20, 3, 5, 4)]:
        expected = hypergeom.sf(at_least - 1, population, marked, draws)
        assert _tail(population, marked, draws, at_least) == pytest.approx(expected, rel=1e-9, abs=1e-300)
