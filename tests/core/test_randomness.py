"""Every draw is a pure function of its key: the same for integers and tensors, here and on every platform."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot import randomness
from fot.randomness import bits, fold, generator, key, permutation, uniform

words = st.integers(0, 2**63 - 1)
indices = st.integers(-(2**63), 2**63 - 1)


def splitmix64(seed: int) -> int:
    """SplitMix64's finaliser, from its definition and independent of the package."""
    mask = 2**64 - 1
    seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & mask
    return seed ^ (seed >> 31)


@settings(max_examples=200)
@given(words, indices)
def test_integers_and_tensors_fold_alike(parent, index):
    one = fold(parent, index)
    assert isinstance(one, int) and 0 <= one < 2**63
    assert one == splitmix64((parent + (index + 1) * 0x9E3779B97F4A7C15) % 2**64) % 2**63
    assert fold(parent, torch.tensor([index])).tolist() == [one]
    assert fold(torch.tensor([parent]), index).tolist() == [one]
    assert fold(torch.tensor([parent]), torch.tensor([index])).tolist() == [one]


@settings(max_examples=100)
@given(words, st.integers(0, 2**62))
def test_bits_of_a_key_and_of_a_tensor_of_keys(of, counter):
    one = int(bits(of, torch.tensor(counter)))
    whole = splitmix64(((of ^ 0x5851F42D4C957F2D) + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)
    assert one == whole >> 32
    assert int(bits(torch.tensor(of), torch.tensor(counter))) == one
    assert float(uniform(of, torch.tensor(counter))) == (one >> 8) / 2**24


def test_keys_broadcast_against_counters():
    keys, counter = torch.tensor([[3], [9]]), torch.arange(5)
    rows = bits(keys, counter)
    assert rows.shape == (2, 5)
    assert rows[0].tolist() == bits(3, counter).tolist()
    assert rows[1].tolist() == bits(9, counter).tolist()


def test_known_answers():
    """Stored values: no platform and no refactoring may change a draw, or runs would not repeat."""
    assert key(0, "cohort") == 1243061400191155851
    assert key(7, "order", 3, 1) == 5184526727931478549
    assert key(-1, "x") == 9171892219192434075
    assert key(2**63 + 5, "dropout", 0) == 1803716226016796754
    assert fold(123, 2**62) == 6009018101678621282
    assert fold(123, -1) == 6435543438401061060
    assert bits(key(0, "cohort", 3, 7), torch.arange(4)).tolist() == [
        1674204647,
        456785126,
        1942607602,
        1740810203,
    ]
    assert uniform(5, torch.arange(3)).tolist() == [
        0.24399465322494507,
        0.06729018688201904,
        0.45710688829421997,
    ]
    assert permutation(key(1, "p"), 10).tolist() == [6, 4, 1, 2, 0, 8, 9, 5, 3, 7]


def test_a_path_is_folded_from_the_left():
    assert key(3, "order", 1, 2) == fold(fold(key(3, "order"), 1), 2)
    assert key(3, "order", 1, 2) != key(3, "order", 2, 1)


def test_keys_differ():
    parts = itertools.product(range(6), ("order", "cohort", "dropout"), range(6), range(6))
    keys = {key(seed, purpose, task, round) for seed, purpose, task, round in parts}
    assert len(keys) == 6 * 3 * 6 * 6


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_a_permutation_is_one(n):
    assert sorted(permutation(key(2, "p"), n).tolist()) == list(range(n))


def test_permutations_are_uniform():
    """All 24 orders of four things, and each thing's place among twelve, by chi-square."""
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for seed in range(2400):
        counts[tuple(permutation(key(seed, "p"), 4).tolist())] += 1
    assert sum((c - 100) ** 2 / 100 for c in counts.values()) < 49.7  # 23 degrees, p = 0.001

    places = torch.zeros(12, 12)
    for round in range(1200):
        places[torch.arange(12), permutation(key(0, "cohort", round), 12)] += 1
    assert float(((places - 100) ** 2 / 100).sum()) < 173.6  # 121 degrees, p = 0.001


def test_uniform_numbers_fill_the_interval():
    u = uniform(key(0, "u"), torch.arange(100_000))
    assert u.dtype == torch.float32 and float(u.min()) >= 0 and float(u.max()) < 1
    counts = torch.histc(u, bins=100, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 148.2  # 99 degrees, p = 0.001
    assert abs(float(u.double().var()) - 1 / 12) < 1e-3


def test_the_largest_bits_stay_below_one():
    # The counter whose hash is all ones is not known, so the arithmetic is tested instead of the draw.
    assert (0xFFFFFFFF >> 8) * 2.0**-24 == 1 - 2.0**-24
    assert float(torch.tensor(0xFFFFFFFF >> 8).to(torch.float32) * 2.0**-24) < 1


@pytest.mark.parametrize(
    "other",
    [key(0, "order", 1, 1), key(0, "order", 1, 0), key(1, "order", 0, 1), key(0, "dropout", 0, 1)],
    ids=["task", "both", "seed", "purpose"],
)
def test_neighbouring_keys_are_uncorrelated(other):
    n = 20_000
    counter = torch.arange(n)
    a, b = (uniform(k, counter).double() - 0.5 for k in (key(0, "order", 0, 1), other))
    for shift in (0, 1, 7):
        correlation = float((a[: n - shift] * b[shift:]).mean()) * 12
        assert abs(correlation) < 4 / math.sqrt(n)


def test_every_bit_is_a_fair_coin_and_follows_its_key():
    drawn = bits(key(4, "b"), torch.arange(20_000))
    assert int(drawn.min()) >= 0 and int(drawn.max()) < 2**32
    for bit in range(32):
        assert abs(float((drawn >> bit & 1).double().mean()) - 0.5) < 4 * 0.5 / math.sqrt(20_000)
    flipped = bits(key(4, "b") ^ 1, torch.arange(20_000)) ^ drawn
    changed = sum(int((flipped >> bit & 1).sum()) for bit in range(32)) / (32 * 20_000)
    assert abs(changed - 0.5) < 0.005  # one bit of the key changes half of the bits


def test_keys_are_kept_apart_from_bits():
    """A child's key must not show in the bits drawn from its parent."""
    parent = key(0, "x")
    children = [fold(parent, i) >> 31 for i in range(100)]
    assert not set(children) & set(bits(parent, torch.arange(100)).tolist())


def test_a_generator_is_seeded_by_its_key_alone():
    torch.manual_seed(1)
    a = torch.randn(4, generator=generator(key(0, "g")))
    torch.manual_seed(2)
    b = torch.randn(4, generator=generator(key(0, "g")))
    assert a.tolist() == b.tolist()
    assert a.tolist() != torch.randn(4, generator=generator(key(1, "g"))).tolist()


def test_a_generator_depends_on_every_bit_of_its_key():
    """torch's own seeding of a CPU generator keeps 32 bits: keys that agree in these drew the same."""
    first = torch.empty(1000).normal_(generator=generator(5))
    assert torch.equal(first, torch.empty(1000).normal_(generator=generator(5)))
    for bit in (0, 1, 31, 32, 40, 62):
        other = torch.empty(1000).normal_(generator=generator(5 ^ (1 << bit)))
        assert abs(float((first * other).mean())) < 0.15
    assert abs(float(first.mean())) < 0.15 and abs(float(first.var()) - 1) < 0.2


def test_the_words_of_the_twister_lie_where_they_are_written():
    """After torch's own seeding they are those of Matsumoto and Nishimura's initialisation."""
    state = torch.Generator().manual_seed(5489).get_state()
    words = state[randomness._TWISTER].view(torch.int64).tolist()
    expected = [5489]
    for i in range(1, 624):
        expected.append((1812433253 * (expected[-1] ^ (expected[-1] >> 30)) + i) & 0xFFFFFFFF)
    assert words == expected
