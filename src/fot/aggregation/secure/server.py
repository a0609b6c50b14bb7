"""The server's side of a secure sum: four stages, each open until the driver closes it.

    Keys  --rosters-->  Shares  --inboxes-->  Inputs  --survivors-->  Unmasking  -->  the sum

`receive` takes one client's message; `rosters`, `inboxes`, `survivors` and `finish` close a stage with
whoever has answered, and return what to send. Too few answers are a `RoundAborted`, and no secret is
put together then, not even those whose shares came back.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fot.aggregation.codec import Segment, Words, packed_size, unpack
from fot.aggregation.interface import RoundAborted
from fot.aggregation.secure import primitives, wire
from fot.aggregation.secure.graph import neighbours, threshold_of
from fot.aggregation.secure.shamir import PRIME, Combiner
from fot.aggregation.secure.wire import Peer, Refusal


@dataclass(frozen=True)
class Terms:
    """What the server proposes: the cohort, the degree of the graph (0: complete), the threshold's share."""

    cohort: frozenset[int]
    session: bytes
    minimum: int = 3
    degree: int = 0
    threshold: float = 0.6


@dataclass(frozen=True)
class Keys:
    """Collecting public keys."""

    terms: Terms
    peers: dict[int, Peer]


@dataclass(frozen=True)
class Shares:
    """Collecting sealed shares, {sender: {receiver: sealed}}."""

    terms: Terms
    threshold: int
    peers: dict[int, Peer]
    graph: dict[int, tuple[int, ...]]
    sealed: dict[int, dict[int, bytes]]


@dataclass(frozen=True)
class Inputs:
    """Collecting masked inputs into one running total."""

    terms: Terms
    threshold: int
    peers: dict[int, Peer]
    graph: dict[int, tuple[int, ...]]  # among those who shared
    layout: tuple[Segment, ...]
    total: tuple[Words, ...]
    received: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Unmasking:
    """Collecting shares of the survivors' self seeds and of the dropped clients' mask keys."""

    before: Inputs
    answers: dict[int, dict[int, int]] = field(default_factory=dict)  # {holder: {owner: share}}


State = Keys | Shares | Inputs | Unmasking
Outbox = dict[int, bytes]


def begin(terms: Terms) -> Keys:
    """A new session."""
    if len(terms.cohort) < terms.minimum:
        raise RoundAborted(
            f"a cohort of {len(terms.cohort)}, below the minimum {terms.minimum}: raise training.cohort, "
            "or lower aggregation.minimum"
        )
    return Keys(terms, {})


def receive(state: State, message: bytes) -> State:
    """Take one client's message for the open stage, or refuse it."""
    if isinstance(state, Keys):
        client, body = wire.read(message, wire.ADVERTISE, state.terms.session)
        _expect(client, state.terms.cohort, state.peers)
        if len(body) != 2 * wire.KEY:
            raise Refusal("malformed: an advertisement is two keys")
        peer = Peer(client, bytes(body[: wire.KEY]), bytes(body[wire.KEY :]))
        primitives.check_public(peer.seal_key)
        primitives.check_public(peer.mask_key)
        return replace(state, peers={**state.peers, client: peer})
    if isinstance(state, Shares):
        client, body = wire.read(message, wire.SHARES, state.terms.session)
        _expect(client, state.graph, state.sealed)
        sealed = wire.read_entries(body, wire.SEALED)
        if sealed.keys() != set(state.graph[client]):
            raise Refusal("malformed: shares that are not for the sender's neighbours")
        return replace(state, sealed={**state.sealed, client: sealed})
    if isinstance(state, Inputs):
        client, body = wire.read(message, wire.MASKED, state.terms.session)
        _expect(client, state.graph, state.received)
        if len(body) != sum(map(packed_size, state.layout)):
            raise Refusal("malformed: a masked input of the wrong size")
        total, start = [], 0
        for running, segment in zip(state.total, state.layout, strict=True):
            size = packed_size(segment)
            total.append(np.add(running, unpack(body[start : start + size], segment)))
            start += size
        return replace(state, total=tuple(total), received=state.received | {client})
    before = state.before
    client, body = wire.read(message, wire.UNMASK, before.terms.session)
    _expect(client, before.received, state.answers)
    shares = {u: int.from_bytes(share, "little") for u, share in wire.read_entries(body, wire.SHARE).items()}
    if shares.keys() != set(before.graph[client]) or any(share >= PRIME for share in shares.values()):
        raise Refusal("malformed: not one share for each neighbour of the sender")
    return replace(state, answers={**state.answers, client: shares})


def rosters(state: State) -> tuple[Shares, Outbox]:
    """Close the advertisements: everyone who advertised learns its neighbours' keys."""
    if not isinstance(state, Keys):
        raise Refusal("out of order: the rosters are out")
    terms = state.terms
    _enough(len(state.peers), terms, "advertised their keys")
    graph = neighbours(state.peers, terms.degree, terms.session)
    threshold = threshold_of(min(map(len, graph.values())), terms.threshold)
    outbox = {
        u: wire.write(
            wire.ROSTER,
            terms.session,
            u,
            wire.write_roster(len(graph), threshold, [state.peers[v] for v in graph[u]]),
        )
        for u in graph
    }
    return Shares(terms, threshold, state.peers, graph, {}), outbox


def inboxes(state: State, layout: Sequence[Segment]) -> tuple[Inputs, Outbox]:
    """Close the sharing: everyone who shared receives the shares meant for it. The sum's layout is fixed now.

    A client left with fewer neighbours than the threshold is left out: its masks could not be undone.
    """
    if not isinstance(state, Shares):
        raise Refusal("out of order: no shares were collected")
    graph = {u: tuple(v for v in state.graph[u] if v in state.sealed) for u in state.sealed}
    while weak := [u for u, peers in graph.items() if len(peers) < state.threshold]:
        graph = {u: tuple(v for v in vs if v not in weak) for u, vs in graph.items() if u not in weak}
    _enough(len(graph), state.terms, "shared their keys")
    outbox = {}
    for u, peers in graph.items():
        body = wire.write_entries([(v, state.sealed[v][u]) for v in peers])
        outbox[u] = wire.write(wire.INBOX, state.terms.session, u, body)
    zeros: tuple[Words, ...] = tuple(
        np.zeros(length, np.uint32) if bits <= 32 else np.zeros(length, np.uint64) for bits, length in layout
    )
    return Inputs(state.terms, state.threshold, state.peers, graph, tuple(layout), zeros), outbox


def survivors(state: State) -> tuple[Unmasking, Outbox]:
    """Close the inputs: ask those who sent one for the shares that unmask their sum."""
    if not isinstance(state, Inputs):
        raise Refusal("out of order: no inputs were collected")
    received = state.received
    _enough(len(received), state.terms, "sent a masked input")
    for u, peers in state.graph.items():
        alive = sum(v in received for v in peers)
        if alive < state.threshold and (alive or u in received):
            raise RoundAborted(
                f"client {u} keeps {alive} neighbours of the {state.threshold} it takes to unmask it: "
                f"too many dropped out{_remedy(state.terms)}"
            )
    outbox = {}
    for u in received:
        alive_peers = [v for v in state.graph[u] if v in received]
        dropped = [v for v in state.graph[u] if v not in received]
        body = wire.write_survivors(len(received), alive_peers, dropped)
        outbox[u] = wire.write(wire.SURVIVORS, state.terms.session, u, body)
    return Unmasking(state), outbox


def finish(state: State) -> tuple[tuple[Words, ...], frozenset[int]]:
    """Close the unmasking: the sum in the ring, and the clients it holds."""
    if not isinstance(state, Unmasking):
        raise Refusal("out of order: nothing was asked to be unmasked")
    before = state.before
    session, received = before.terms.session, before.received
    # A dropped client with no neighbour among the survivors left no mask behind.
    needed = [u for u, peers in before.graph.items() if u in received or any(v in received for v in peers)]
    shares = {u: {v + 1: state.answers[v][u] for v in before.graph[u] if v in state.answers} for u in needed}
    for u in needed:
        if len(shares[u]) < before.threshold:
            raise RoundAborted(
                f"{len(shares[u])} of the {before.threshold} shares that unmask client {u} came back: "
                f"too many dropped out{_remedy(before.terms)}"
            )
    combiner = Combiner(before.threshold, (v + 1 for v in state.answers))
    plus: list[bytes] = []
    minus: list[bytes] = []
    for u in needed:
        secret = combiner.combine(shares[u])
        if u in received:
            minus.append(primitives.self_seed(secret, session, u))
            continue
        secret_key = primitives.mask_key(secret, session, u)
        key = primitives.private_key(secret_key)
        if primitives.public_key(secret_key) != before.peers[u].mask_key:
            raise RoundAborted(f"the shares of client {u} do not give its key: a client answered falsely")
        for v in before.graph[u]:
            if v in received:
                shared = primitives.agree(key, before.peers[v].mask_key)
                seed = primitives.pair_seed(shared, session, u, v)
                (minus if v < u else plus).append(seed)  # undo what v added for a higher u, or subtracted
    total = tuple(segment.copy() for segment in before.total)
    primitives.add_masks(total, before.layout, plus, minus)
    return total, received


def _expect(client: int, among: Container[int], already: Container[int]) -> None:
    if client not in among:
        raise Refusal(f"client {client} has no part in this stage")
    if client in already:
        raise Refusal(f"replayed: client {client} has answered this stage")


def _enough(clients: int, terms: Terms, did: str) -> None:
    if clients < terms.minimum:
        raise RoundAborted(
            f"only {clients} clients {did}, below the minimum {terms.minimum}: too many dropped out; "
            "raise training.cohort"
        )


def _remedy(terms: Terms) -> str:
    """What would have borne more dropouts; more than half of the neighbours are needed in any case."""
    remedies = ["more aggregation.neighbours"] if terms.degree else []
    remedies += ["a lower aggregation.threshold"] if terms.threshold > 0.5 else []
    return f"; allow {' or '.join(remedies)}" if remedies else ""
