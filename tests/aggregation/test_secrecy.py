"""What a server that keeps every message can make of them: the sum, and nothing else.

The server's view is rebuilt here from the messages alone: the masked inputs, and the secrets that the shares
of the unmasking stage put together. What it can take off an input with them is taken off; the rest must be
uniform.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from fot.aggregation.codec import unpack
from fot.aggregation.secure import client, primitives, server, wire
from fot.aggregation.secure.shamir import Combiner

RUNS, LENGTH = 200, 32
CHI_SQUARE = 360.0  # 255 degrees of freedom: a uniform byte exceeds it once in 50,000 tests


@dataclass(frozen=True)
class Case:
    clients: int = 4
    degree: int = 0
    dropped: tuple[int, ...] = ()  # these share their keys, and their inputs come too late
    bits: int = 32

    @property
    def layout(self):
        return [(self.bits, LENGTH)]

    @property
    def alive(self):
        return [u for u in range(self.clients) if u not in self.dropped]

    def input(self, u):
        return np.full(LENGTH, 1000 * (u + 1), np.uint32 if self.bits <= 32 else np.uint64)


CASES = {
    "complete": Case(),
    "one dropped": Case(clients=5, dropped=(2,)),
    "sparse": Case(clients=8, degree=4),
    "sparse, one dropped": Case(clients=9, degree=6, dropped=(3,)),
    "64 bits": Case(bits=64),
}


@dataclass
class View:
    """One run as the server saw it, and what one client could tell it besides."""

    masked: dict[int, np.ndarray]
    taken_off: dict[int, tuple[list[bytes], list[bytes]]]  # seeds to add, and to subtract
    pairs: dict[int, dict[int, bytes]]  # from the clients: the seeds that each shares with its neighbours


class Entropy:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, count):
        return self.rng.bytes(count)


def run(case: Case, number: int) -> View:
    entropy = Entropy(number)
    session = entropy(16)
    terms = server.Terms(frozenset(range(case.clients)), session, degree=case.degree)
    policy = client.Policy(degree=case.degree)
    state, states, pairs, masked, late = server.begin(terms), {}, {}, {}, {}
    for u in range(case.clients):
        states[u], message = client.advertise(u, session, policy, entropy)
        state = server.receive(state, message)
    state, rosters = server.rosters(state)
    for u in range(case.clients):
        states[u], message = client.share(states[u], rosters[u])
        state = server.receive(state, message)
    state, inboxes = server.inboxes(state, case.layout)
    for u in range(case.clients):
        ready = client.collect(states[u], inboxes[u])
        pairs[u] = ready.seeds
        states[u], message = client.submit(ready, [case.input(u)], case.layout)
        (late if u in case.dropped else masked)[u] = message
    for message in masked.values():
        state = server.receive(state, message)
    state, requests = server.survivors(state)
    answers = {}
    for u, request in requests.items():
        states[u], message = client.unmask(states[u], request)
        state = server.receive(state, message)
        answers[u] = wire.read_entries(memoryview(message)[22:], wire.SHARE)
    total, _ = server.finish(state)
    np.testing.assert_array_equal(total[0], sum(case.input(u) for u in case.alive))
    arrived = {u: unpack(m[22:], case.layout[0]) for u, m in (masked | late).items()}
    return View(arrived, from_the_answers(case, state.before, answers), pairs)


def from_the_answers(case, before, answers):
    """What the returned shares allow to take off each input."""
    session, found = before.terms.session, {u: ([], []) for u in range(case.clients)}
    combiner = Combiner(before.threshold, [v + 1 for v in answers])
    for u in range(case.clients):
        shares = {v + 1: int.from_bytes(a[u], "little") for v, a in answers.items() if u in a}
        secret = combiner.combine(shares)
        if u not in case.dropped:
            found[u][1].append(primitives.self_seed(secret, session, u))
            continue
        key = primitives.private_key(primitives.mask_key(secret, session, u))
        for v in before.graph[u]:
            seed = primitives.pair_seed(primitives.agree(key, before.peers[v].mask_key), session, u, v)
            for own, other in ((u, v), (v, u)):  # the late input of u is freed of it too
                found[own][0 if other < own else 1].append(seed)
    return found


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def seen(request):
    return request.param, [run(request.param, number) for number in range(RUNS)]


def off(case, view, u, plus=(), minus=()):
    """Client u's masked input, without what the server can take off it and without what it is told."""
    words = [view.masked[u].copy()]
    primitives.add_masks(words, case.layout, [*view.taken_off[u][0], *plus], [*view.taken_off[u][1], *minus])
    return words[0]


def chi_square(words):
    """The statistic of the bytes of words against the uniform distribution, at each byte's place."""
    columns = words.view(np.uint8).reshape(-1, words.dtype.itemsize).T
    counts = [np.bincount(column, minlength=256) for column in columns]
    expected = counts[0].sum() / 256
    return max(float(((count - expected) ** 2 / expected).sum()) for count in counts)


def test_each_masked_input_is_uniform(seen):
    case, views = seen
    for u in range(case.clients):
        assert chi_square(np.concatenate([view.masked[u] for view in views])) < CHI_SQUARE


def test_after_unmasking_each_input_is_still_covered(seen):
    """By pairwise masks between survivors; the late input of a dropped client, by its self mask."""
    case, views = seen
    for u in range(case.clients):
        assert chi_square(np.concatenate([off(case, view, u) for view in views])) < CHI_SQUARE


def test_every_sum_but_that_of_all_survivors_is_noise(seen):
    case, views = seen
    some = [s for n in range(2, len(case.alive)) for s in itertools.combinations(case.alive, n)]
    for subset in some[:: max(len(some) // 12, 1)]:
        partial = [sum(off(case, view, u) for u in subset) for view in views]
        assert chi_square(np.concatenate(partial)) < CHI_SQUARE
    for late in case.dropped:
        partial = [sum(off(case, view, u) for u in (*case.alive, late)) for view in views]
        assert chi_square(np.concatenate(partial)) < CHI_SQUARE


def test_what_one_neighbour_tells_leaves_noise(seen):
    case, views = seen
    for u, place in itertools.product(case.alive, (0, -1)):  # the first and the last of its neighbours
        peeled = []
        for view in views:
            v = sorted(view.pairs[u].keys() - set(case.dropped))[place]
            seed = [view.pairs[u][v]]
            peeled.append(off(case, view, u, *(([], seed) if v > u else (seed, []))))
        assert chi_square(np.concatenate(peeled)) < CHI_SQUARE


def test_the_test_can_see(seen):
    """With all masks removed the input stands there, and the statistic is far beyond the bound."""
    case, views = seen
    u, bare = case.alive[1], []
    for view in views:
        told = {v: seed for v, seed in view.pairs[u].items() if v not in case.dropped}
        plus, minus = ([s for v, s in told.items() if v < u], [s for v, s in told.items() if v > u])
        bare.append(off(case, view, u, plus, minus))
    np.testing.assert_array_equal(np.concatenate(bare), np.tile(case.input(u), RUNS))
    assert chi_square(np.concatenate(bare)) > 100 * CHI_SQUARE
    whole = [sum(off(case, view, u) for u in case.alive) for view in views]
    np.testing.assert_array_equal(np.concatenate(whole), np.tile(sum(map(case.input, case.alive)), RUNS))


def test_sealed_shares_are_uniform_too(seeded):
    sealed = [primitives.seal(seeded(i)(32), bytes(16), 0, 1, bytes(32)) for i in range(400)]
    assert all(len(s) == wire.SEALED for s in sealed)
    assert chi_square(np.frombuffer(b"".join(sealed), "<u4")) < CHI_SQUARE
