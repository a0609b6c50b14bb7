"""The client's side of a secure sum: five states, each a function of the one before and a message.

    Advertised  --roster-->  Shared  --inbox-->  Ready  --own input-->  Masked  --survivors-->  Done

A function returns the new state and the reply, or raises `Refusal` and nothing has changed. States are
values: whoever keeps them must keep the newest only, for a client that answers twice from an old state
could be made to reveal both secrets of a peer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fot.aggregation.codec import Segment, Words, pack
from fot.aggregation.secure import primitives, wire
from fot.aggregation.secure.shamir import PRIME, split
from fot.aggregation.secure.wire import Peer, Refusal

Entropy = Callable[[int], bytes]


@dataclass(frozen=True)
class Policy:
    """What a client insists on, whatever the server says.

    Attributes
    ----------
    minimum : int
        The least clients in a sum, at its start and at its end.
    degree : int
        The least neighbours it shares masks with; 0 demands the whole cohort.
    """

    minimum: int = 3
    degree: int = 0


@dataclass(frozen=True)
class Advertised:
    """Keys sent. All of the client's randomness was drawn here."""

    client: int
    session: bytes
    policy: Policy
    seal_key: bytes = field(repr=False)
    mask_secret: int = field(repr=False)
    self_secret: int = field(repr=False)
    polynomial_seed: bytes = field(repr=False)


@dataclass(frozen=True)
class Shared:
    """Shares sent to the neighbours of the roster."""

    before: Advertised
    threshold: int
    peers: dict[int, Peer]
    sealing: dict[int, bytes] = field(repr=False)


@dataclass(frozen=True)
class Ready:
    """The neighbours' shares received: {peer: (share of its mask key, share of its self seed)}."""

    before: Advertised
    threshold: int
    held: dict[int, tuple[bytes, bytes]] = field(repr=False)
    seeds: dict[int, bytes] = field(repr=False)


@dataclass(frozen=True)
class Masked:
    """Masked input sent; the client's own secrets are gone, its shares of the peers' remain."""

    client: int
    session: bytes
    minimum: int
    threshold: int
    held: dict[int, tuple[bytes, bytes]] = field(repr=False)


@dataclass(frozen=True)
class Done:
    """One answer given, nothing kept, nothing more to say."""

    client: int
    session: bytes


State = Advertised | Shared | Ready | Masked | Done


def advertise(
    client: int, session: bytes, policy: Policy | None = None, entropy: Entropy = os.urandom
) -> tuple[Advertised, bytes]:
    """Draw the secrets of one session and advertise the two public keys."""
    state = Advertised(
        client=client,
        session=session,
        policy=policy or Policy(),
        seal_key=entropy(32),
        mask_secret=_field_element(entropy(32)),
        self_secret=_field_element(entropy(32)),
        polynomial_seed=entropy(32),
    )
    mask_key = primitives.mask_key(state.mask_secret, session, client)
    keys = primitives.public_key(state.seal_key) + primitives.public_key(mask_key)
    return state, wire.write(wire.ADVERTISE, session, client, keys)


def share(state: State, message: bytes) -> tuple[Shared, bytes]:
    """On the roster: split the mask key and the self seed over the neighbours, sealed for each."""
    if not isinstance(state, Advertised):
        raise Refusal("out of order: a roster is not due")
    _, body = wire.read(message, wire.ROSTER, state.session, state.client)
    clients, threshold, peers = wire.read_roster(body)
    policy = state.policy
    if clients < policy.minimum:
        raise Refusal(f"a cohort of {clients}, below this client's minimum of {policy.minimum}")
    if state.client in peers or len(peers) > clients - 1:
        raise Refusal("malformed: a roster that names its receiver, or more peers than clients")
    if len(peers) < min(policy.degree or clients - 1, clients - 1):
        raise Refusal(f"{len(peers)} neighbours, fewer than this client demands")
    if 2 * threshold <= len(peers):
        raise Refusal(f"a threshold of {threshold} among {len(peers)} neighbours, at or below half")
    if threshold > len(peers):
        raise Refusal(f"a threshold of {threshold} that {len(peers)} neighbours cannot meet")
    own = primitives.private_key(state.seal_key)
    sealing = {u: primitives.agree(own, peer.seal_key) for u, peer in peers.items()}
    points = [u + 1 for u in peers]
    stream = primitives.expand(state.polynomial_seed, 2 * 32 * (threshold - 1))
    random = [_field_element(stream[i : i + 32]) for i in range(0, len(stream), 32)]
    of_key = split(state.mask_secret, random[: threshold - 1], points)
    of_seed = split(state.self_secret, random[threshold - 1 :], points)
    sealed = [
        (u, primitives.seal(sealing[u], state.session, state.client, u, _bytes(a) + _bytes(b)))
        for u, a, b in zip(peers, of_key, of_seed, strict=True)
    ]
    reply = wire.write(wire.SHARES, state.session, state.client, wire.write_entries(sealed))
    return Shared(before=state, threshold=threshold, peers=peers, sealing=sealing), reply


def collect(state: State, message: bytes) -> Ready:
    """On the inbox: open the neighbours' shares and agree on a mask with each of them."""
    if not isinstance(state, Shared):
        raise Refusal("out of order: an inbox is not due")
    own = state.before
    _, body = wire.read(message, wire.INBOX, own.session, own.client)
    inbox = wire.read_entries(body, wire.SEALED)
    if not inbox.keys() <= state.peers.keys():
        raise Refusal("malformed: shares from a client that is not on the roster")
    if len(inbox) < state.threshold:
        raise Refusal(f"shares from {len(inbox)} neighbours, below the threshold of {state.threshold}")
    held = {}
    for u, sealed in inbox.items():
        opened = primitives.unseal(state.sealing[u], own.session, u, own.client, sealed)
        held[u] = (opened[: wire.SHARE], opened[wire.SHARE :])
    key = primitives.private_key(primitives.mask_key(own.mask_secret, own.session, own.client))
    seeds = {
        u: primitives.pair_seed(primitives.agree(key, state.peers[u].mask_key), own.session, own.client, u)
        for u in inbox
    }
    return Ready(before=own, threshold=state.threshold, held=held, seeds=seeds)


def submit(state: State, words: Sequence[Words], layout: Sequence[Segment]) -> tuple[Masked, bytes]:
    """Mask the client's own input: its self mask, plus the masks of higher peers, minus those of lower."""
    if not isinstance(state, Ready):
        raise Refusal("out of order: an input is not due")
    own = state.before
    masked = [segment.copy() for segment in words]
    plus = [seed for u, seed in state.seeds.items() if u > own.client]
    minus = [seed for u, seed in state.seeds.items() if u < own.client]
    own_seed = primitives.self_seed(own.self_secret, own.session, own.client)
    primitives.add_masks(masked, layout, [own_seed, *plus], minus)
    body = b"".join(pack(segment, bits) for segment, (bits, _) in zip(masked, layout, strict=True))
    reply = wire.write(wire.MASKED, own.session, own.client, body)
    after = Masked(own.client, own.session, own.policy.minimum, state.threshold, state.held)
    return after, reply


def unmask(state: State, message: bytes) -> tuple[Done, bytes]:
    """On the survivors: one share a neighbour, of its self seed if alive, of its mask key if dropped."""
    if isinstance(state, Done):
        raise Refusal("a second unmask request: this client answers once")
    if not isinstance(state, Masked):
        raise Refusal("out of order: an unmask request is not due")
    _, body = wire.read(message, wire.SURVIVORS, state.session, state.client)
    survivors, alive, dropped = wire.read_survivors(body)
    if set(alive) & set(dropped):
        raise Refusal("a request for both secrets of one peer")
    if sorted((*alive, *dropped)) != sorted(state.held):
        raise Refusal("malformed: a request that does not name every neighbour once")
    if len(alive) < state.threshold:
        raise Refusal(f"{len(alive)} neighbours alive, below the threshold of {state.threshold}")
    if survivors < max(state.minimum, len(alive) + 1):
        raise Refusal(f"{survivors} survivors, below this client's minimum of {state.minimum}")
    answer = [(u, state.held[u][1]) for u in alive] + [(u, state.held[u][0]) for u in dropped]
    reply = wire.write(wire.UNMASK, state.session, state.client, wire.write_entries(answer))
    return Done(state.client, state.session), reply


def _field_element(random: bytes) -> int:
    return int.from_bytes(random, "little") % PRIME  # of 32 bytes: uniform to within 2**-128


def _bytes(element: int) -> bytes:
    return element.to_bytes(wire.SHARE, "little")
