from __future__ import annotations

import random
import struct

import numpy as np
import pytest

from fot.aggregation.secure import client, server, wire
from fot.aggregation.secure.client import Policy
from fot.aggregation.secure.wire import Refusal

SESSION = b"0123456789abcdef"
LAYOUT = [(32, 3), (64, 2)]


def vector(value):
    return [np.full(3, value, np.uint32), np.full(2, value, np.uint64)]


class Walk:
    """A session of some clients up to a stage, with all messages kept."""

    def __init__(self, entropy, clients=5, session=SESSION, vanish=()):
        self.states, self.inbox, self.sent = {}, {}, {}
        terms = server.Terms(frozenset(range(clients)), session)
        state = server.begin(terms)
        self.history = {u: [] for u in range(clients)}
        self.servers = [state]

        def step(u, result):
            new, reply = result if isinstance(result, tuple) else (result, None)
            self.states[u] = new
            self.history[u].append(new)
            return reply

        def feed(messages):
            nonlocal state
            for message in messages:
                state = server.receive(state, message)
            self.sent[len(self.servers)] = list(messages)
            self.servers.append(state)

        feed([step(u, client.advertise(u, session, Policy(), entropy)) for u in range(clients)])
        state, self.rosters = server.rosters(state)
        feed([step(u, client.share(self.states[u], self.rosters[u])) for u in range(clients)])
        state, self.inboxes = server.inboxes(state, LAYOUT)
        for u in range(clients):
            step(u, client.collect(self.states[u], self.inboxes[u]))
        feed(
            [
                step(u, client.submit(self.states[u], vector(u + 1), LAYOUT))
                for u in range(clients)
                if u not in vanish
            ]
        )
        state, self.requests = server.survivors(state)
        self.server = state


def request(alive, dropped, survivors=None, u=0, session=SESSION):
    body = wire.write_survivors(len(alive) + 1 if survivors is None else survivors, alive, dropped)
    return wire.write(wire.SURVIVORS, session, u, body)


def roster(walk, u=0, clients=5, threshold=3, peers=None):
    keys = walk.servers[1].peers
    listed = [keys[v] for v in ([1, 2, 3, 4] if peers is None else peers)]
    return wire.write(wire.ROSTER, SESSION, u, wire.write_roster(clients, threshold, listed))


@pytest.fixture
def walk(seeded):
    return Walk(seeded(0))


def test_the_walk_gives_the_sum(walk):
    state = walk.server
    for u, message in walk.requests.items():
        _, reply = client.unmask(walk.states[u], message)
        state = server.receive(state, reply)
    total, included = server.finish(state)
    assert included == {0, 1, 2, 3, 4}
    assert total[0].tolist() == [15] * 3 and total[1].tolist() == [15] * 2


def test_clients_refuse_bad_rosters(walk):
    advertised = walk.history[0][0]
    client.share(advertised, roster(walk))
    for message, reason in [
        (roster(walk, clients=2, peers=[1], threshold=1), "below this client's minimum"),
        (roster(walk, threshold=2), "at or below half"),
        (roster(walk, threshold=0), "at or below half"),
        (roster(walk, threshold=5), "cannot meet"),
        (roster(walk, peers=[0, 2, 3, 4]), "names its receiver"),
        (roster(walk, peers=[1, 2, 3, 4], clients=4), "more peers than clients"),
        (roster(walk, peers=[1, 2, 3]), "fewer than this client demands"),
        (roster(walk, peers=[1, 2, 3, 3]), "named twice"),
        (roster(walk, u=1), "misdirected"),
        (roster(walk)[:-1], "malformed"),
        (roster(walk)[:25], "malformed"),
        (b"", "malformed"),
        (b"\x02" + roster(walk)[1:], "version"),
    ]:
        with pytest.raises(Refusal, match=reason):
            client.share(advertised, message)


def test_a_client_may_accept_a_sparse_graph_of_its_own_degree(walk):
    _, (advertised, message) = 0, client.advertise(0, SESSION, Policy(degree=2))
    assert len(message) == 22 + 64
    client.share(advertised, roster(walk, peers=[1, 2], threshold=2))
    with pytest.raises(Refusal, match="fewer than this client demands"):
        client.share(advertised, roster(walk, peers=[1], threshold=1))


def test_clients_refuse_bad_inboxes(walk):
    shared = walk.history[0][1]
    good = walk.inboxes[0]
    client.collect(shared, good)
    entry = 4 + wire.SEALED
    few = good[: 22 + 2 * entry]
    swapped = bytearray(good)
    swapped[22 + 4 : 22 + entry], swapped[22 + entry + 4 : 22 + 2 * entry] = (
        good[22 + entry + 4 : 22 + 2 * entry],
        good[22 + 4 : 22 + entry],
    )
    stranger = good[:22] + struct.pack("<I", 99) + good[26:]
    for message, reason in [
        (few, "below the threshold"),
        (bytes(swapped), "not authentic"),
        (stranger, "not on the roster"),
        (good[:-1], "malformed"),
        (good + good[22 : 22 + entry], "named twice"),
    ]:
        with pytest.raises(Refusal, match=reason):
            client.collect(shared, message)


def test_clients_refuse_bad_unmask_requests(walk):
    masked = walk.states[0]
    for message, reason in [
        (request([1, 2, 3, 4], [4]), "both secrets"),
        (request([1, 2, 3], [4, 1]), "both secrets"),
        (request([1, 2, 3], []), "every neighbour once"),
        (request([1, 2, 3, 4, 4], []), "every neighbour once"),
        (request([1, 2, 3, 4, 9], []), "every neighbour once"),
        (request([1, 2], [3, 4]), "below the threshold"),
        (request([1, 2, 3], [4], survivors=2), "below this client's minimum"),
        (request([1, 2, 3, 4], [], session=b"another session."), "replayed"),
        (request([1, 2, 3, 4], [], u=3), "misdirected"),
        (request([1, 2, 3, 4], [])[:-2], "malformed"),
    ]:
        with pytest.raises(Refusal, match=reason):
            client.unmask(masked, message)
    done, reply = client.unmask(masked, request([1, 2, 3], [4]))
    with pytest.raises(Refusal, match="answers once"):
        client.unmask(done, request([1, 2, 3], [4]))
    with pytest.raises(Refusal, match="answers once"):
        client.unmask(done, request([1, 2, 4], [3]))
    # One share a peer, the self seed's of those alive and the mask key's of those dropped; nothing is left.
    given = wire.read_entries(memoryview(reply)[22:], 16)
    assert given == {u: masked.held[u][0 if u == 4 else 1] for u in (1, 2, 3, 4)}
    assert vars(done) == {"client": 0, "session": SESSION}


def test_every_message_out_of_order_is_refused(walk):
    states = walk.history[0]
    done, _ = client.unmask(walk.states[0], walk.requests[0])
    steps = {
        0: lambda s: client.share(s, walk.rosters[0]),
        1: lambda s: client.collect(s, walk.inboxes[0]),
        2: lambda s: client.submit(s, vector(1), LAYOUT),
        3: lambda s: client.unmask(s, walk.requests[0]),
    }
    for at, state in enumerate([*states, done]):
        for due, step in steps.items():
            if at == due:
                step(state)
            else:
                with pytest.raises(Refusal, match=r"out of order|answers once"):
                    step(state)
    for at, state in enumerate([walk.servers[0], walk.servers[1], walk.servers[2], walk.servers[3]]):
        for message in [m for stage, ms in walk.sent.items() for m in ms if stage != at + 1]:
            if at == 0 or isinstance(state, (server.Keys, server.Shares, server.Inputs)):
                with pytest.raises(Refusal):
                    server.receive(state, message)


def test_the_server_refuses_replays_strangers_and_wrong_sizes(walk, seeded):
    other = Walk(seeded(1), session=b"fedcba9876543210")
    for stage in (1, 2, 3):
        state = walk.servers[stage]
        for message in walk.sent[stage]:
            with pytest.raises(Refusal):
                server.receive(state, message)  # each has answered
    begun = server.begin(server.Terms(frozenset(range(5)), SESSION))
    with pytest.raises(Refusal, match="another session"):
        server.receive(begun, other.sent[1][0])
    with pytest.raises(Refusal, match="no part"):
        server.receive(begun, wire.write(wire.ADVERTISE, SESSION, 77, bytes(64)))
    with pytest.raises(Refusal, match="two keys"):
        server.receive(begun, wire.write(wire.ADVERTISE, SESSION, 1, bytes(63)))
    inputs = server.Inputs(
        walk.server.before.terms, 3, {}, walk.server.before.graph, tuple(LAYOUT), tuple(vector(0))
    )
    with pytest.raises(Refusal, match="wrong size"):
        server.receive(inputs, walk.sent[3][0][:-1])


def test_false_shares_of_a_dropped_client_are_noticed(seeded):
    walk = Walk(seeded(3), vanish=(4,))
    state = walk.server
    for u, message in walk.requests.items():
        _, reply = client.unmask(walk.states[u], message)
        if u == 2:
            place = (
                22 + [v for v, _ in wire.read_entries(memoryview(reply)[22:], 16).items()].index(4) * 20 + 4
            )
            reply = reply[:place] + bytes([reply[place] ^ 1]) + reply[place + 1 :]
        state = server.receive(state, reply)
    with pytest.raises(server.RoundAborted, match="answered falsely"):
        server.finish(state)


def mutate(rng, message, pool):
    """A message that is nearly right, or not at all."""
    data = bytearray(message)
    choice = rng.randrange(8)
    if choice == 0:
        return rng.randbytes(rng.randrange(0, 120))
    if choice == 1:
        return bytes(data[: rng.randrange(len(data))])
    if choice == 2:
        return bytes(data) + rng.randbytes(rng.randrange(1, 40))
    if choice == 3:
        data[1] = rng.randrange(256)
    elif choice == 4:  # counts and thresholds that lie
        place = 22 + 4 * rng.randrange(4)
        data[place : place + 4] = struct.pack("<I", rng.choice([0, 1, 3, 2**16, 2**31, 2**32 - 1]))
    elif choice == 5:  # the head of one message on the body of another
        return bytes(data[:22]) + rng.choice(pool)[22:]
    elif choice == 6:
        return bytes(rng.choice(pool))
    else:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def test_a_hundred_thousand_fuzzed_messages(seeded):
    rng = random.Random(5)
    walk = Walk(seeded(0), clients=4)
    other = Walk(seeded(1), clients=4, session=b"fedcba9876543210")
    pool = [m for w in (walk, other) for ms in w.sent.values() for m in ms]
    pool += [m for w in (walk, other) for box in (w.rosters, w.inboxes, w.requests) for m in box.values()]
    u = 1
    advertised, shared, _, masked = walk.history[u]
    machines = [
        (advertised, client.share, walk.rosters[u], client.Shared),
        (shared, client.collect, walk.inboxes[u], client.Ready),
        (masked, client.unmask, walk.requests[u], client.Done),
    ]
    keys = server.begin(walk.servers[0].terms)
    collecting, _ = server.rosters(walk.servers[1])
    summing, _ = server.inboxes(walk.servers[2], LAYOUT)
    _, reply = client.unmask(masked, walk.requests[u])
    serving = [
        (keys, walk.sent[1][u]),
        (collecting, walk.sent[2][u]),
        (summing, walk.sent[3][u]),
        (walk.server, reply),
    ]
    wrong_time = [client.share, client.collect, client.unmask]
    refused = accepted = 0
    for number in range(100_000):
        if number % 2:
            state, good = serving[rng.randrange(4)]
            message = mutate(rng, good, pool)
            try:
                after = server.receive(state, message)
                assert type(after) is type(state)
                accepted += 1
            except Refusal:
                refused += 1
            continue
        state, step, good, becomes = machines[rng.randrange(3)]
        if rng.randrange(4) == 0:
            step = wrong_time[rng.randrange(3)]
        message = mutate(rng, good, pool)
        try:
            result = step(state, message)
        except Refusal:
            refused += 1
            continue
        accepted += 1
        after = result[0] if isinstance(result, tuple) else result
        assert isinstance(after, becomes)  # a state only ever moves one step on
        if step is client.unmask:
            # Only a well-formed request of this session is answered, once, with one share a peer.
            survivors, alive, dropped = wire.read_survivors(memoryview(message)[22:])
            assert message[2:18] == SESSION and sorted(alive + dropped) == sorted(masked.held)
            assert len(alive) >= masked.threshold and survivors >= 3
            shares = wire.read_entries(memoryview(result[1])[22:], 16)
            assert shares == {v: masked.held[v][v in alive] for v in masked.held}
            with pytest.raises(Refusal):
                client.unmask(after, message)
        if step is client.collect:
            assert message == walk.inboxes[u] or set(after.held) <= {0, 2, 3}
    assert refused + accepted == 100_000 and refused > 60_000 and accepted > 100
