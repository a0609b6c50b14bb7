"""What a server that keeps every message can make of them: the sum, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from fot.aggregation.secure import client, primitives, server, wire

CLIENTS, RUNS, LENGTH = 4, 400, 16
LAYOUT = [(32, LENGTH)]
INPUTS = [np.full(LENGTH, 1000 * (u + 1), np.uint32) for u in range(CLIENTS)]
CHI_SQUARE = 360.0  # 255 degrees of freedom: a uniform byte exceeds it once in 50,000 tests


def chi_square(words):
    """The statistic of the bytes of words against the uniform distribution, at each byte's place."""
    counts = [np.bincount(column, minlength=256) for column in words.view(np.uint8).reshape(-1, 4).T]
    expected = counts[0].sum() / 256
    return max(float(((count - expected) ** 2 / expected).sum()) for count in counts)


@pytest.fixture(scope="module")
def transcripts():
    """Of each run: the masked inputs and, as the server learns them by unmasking, the self seeds."""
    found = []
    for number in range(RUNS):
        entropy = Entropy(number)
        session = entropy(16)
        state = server.begin(server.Terms(frozenset(range(CLIENTS)), session))
        states, masked = {}, []
        for u in range(CLIENTS):
            states[u], message = client.advertise(u, session, None, entropy)
            state = server.receive(state, message)
        state, rosters = server.rosters(state)
        for u in range(CLIENTS):
            states[u], message = client.share(states[u], rosters[u])
            state = server.receive(state, message)
        state, inboxes = server.inboxes(state, LAYOUT)
        seeds = []
        for u in range(CLIENTS):
            ready = client.collect(states[u], inboxes[u])
            states[u], message = client.submit(ready, [INPUTS[u]], LAYOUT)
            state = server.receive(state, message)
            masked.append(np.frombuffer(message[22:], "<u4"))
            own = ready.before
            seeds.append((primitives.self_seed(own.self_secret, session, u), ready.seeds))
        state, requests = server.survivors(state)
        for u in range(CLIENTS):
            states[u], message = client.unmask(states[u], requests[u])
            state = server.receive(state, message)
        total, _ = server.finish(state)
        np.testing.assert_array_equal(total[0], np.sum(INPUTS, axis=0))
        found.append((masked, seeds))
    return found


class Entropy:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, count):
        return self.rng.bytes(count)


def without_self(masked, seeds, u):
    words = [masked[u].copy()]
    primitives.add_masks(words, LAYOUT, [], [seeds[u][0]])
    return words[0]


def test_each_masked_input_is_uniform(transcripts):
    for u in range(CLIENTS):
        assert chi_square(np.concatenate([masked[u] for masked, _ in transcripts])) < CHI_SQUARE


def test_after_unmasking_the_pairwise_masks_still_cover_each_input(transcripts):
    for u in range(CLIENTS):
        assert chi_square(np.concatenate([without_self(m, s, u) for m, s in transcripts])) < CHI_SQUARE


def test_every_sum_but_that_of_all_is_noise(transcripts):
    for subset in ([0, 1], [1, 3], [0, 1, 2], [1, 2, 3], [0, 2, 3], [0, 1, 3]):
        partial = [sum(without_self(m, s, u) for u in subset) for m, s in transcripts]
        assert chi_square(np.concatenate(partial)) < CHI_SQUARE


def test_removing_any_one_mask_leaves_noise(transcripts):
    for u in range(CLIENTS):
        for v in range(CLIENTS):
            if v == u:
                continue
            peeled = []
            for masked, seeds in transcripts:
                words = [masked[u].copy()]
                seed = [seeds[u][1][v]]
                plus, minus = ([], seed) if v > u else (seed, [])
                primitives.add_masks(words, LAYOUT, plus, minus)
                peeled.append(words[0])
            assert chi_square(np.concatenate(peeled)) < CHI_SQUARE


def test_the_test_can_see(transcripts):
    """With all masks removed the input stands there, and the statistic is far beyond the bound."""
    bare = []
    for masked, seeds in transcripts:
        words = [without_self(masked, seeds, 1)]
        primitives.add_masks(words, LAYOUT, [seeds[1][1][0]], [seeds[1][1][2], seeds[1][1][3]])
        bare.append(words[0])
    np.testing.assert_array_equal(np.concatenate(bare), np.tile(INPUTS[1], RUNS))
    assert chi_square(np.concatenate(bare)) > 100 * CHI_SQUARE
    whole = [sum(without_self(m, s, u) for u in range(CLIENTS)) for m, s in transcripts]
    assert chi_square(np.concatenate(whole)) > 100 * CHI_SQUARE


def test_sealed_shares_are_uniform_too(seeded):
    sealed = [primitives.seal(seeded(i)(32), bytes(16), 0, 1, bytes(32)) for i in range(400)]
    assert all(len(s) == wire.SEALED for s in sealed)
    assert chi_square(np.frombuffer(b"".join(sealed), "<u4")) < CHI_SQUARE
