"""The protocol's seven messages as bytes.

Every message opens with a version byte, a type byte, the 16 bytes of the session and the 4 bytes of the
client that sends or is to receive it. Integers are little-endian, lists are of fixed-size entries that run
to the end of the message, and a message is accepted only if it is exactly as long as its contents say.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

VERSION = 1
SESSION = 16
_HEADER = struct.Struct(f"<BB{SESSION}sI")
KEY = 32
SHARE = 16
SEALED = 48  # two shares and a 16-byte tag


class Refusal(Exception):
    """A message that a party does not accept, and why. Its state has not changed."""


ADVERTISE, ROSTER, SHARES, INBOX, MASKED, SURVIVORS, UNMASK = range(1, 8)


@dataclass(frozen=True)
class Peer:
    """A neighbour's two public keys: for sealing shares and for masks."""

    client: int
    seal_key: bytes
    mask_key: bytes


def write(kind: int, session: bytes, client: int, body: bytes) -> bytes:
    """A message."""
    return _HEADER.pack(VERSION, kind, session, client) + body


def read(message: bytes, kind: int, session: bytes, client: int | None = None) -> tuple[int, memoryview]:
    """The client and body of a message of that kind and session (and client), or a refusal."""
    if len(message) < _HEADER.size:
        raise Refusal("malformed: shorter than its header")
    version, found, of, who = _HEADER.unpack_from(message)
    if version != VERSION:
        raise Refusal(f"malformed: version {version}, this is {VERSION}")
    if of != session:
        raise Refusal("replayed: it belongs to another session")
    if found != kind:
        raise Refusal(f"out of order: message type {found} where {kind} is due")
    if client is not None and who != client:
        raise Refusal(f"misdirected: it names client {who}, not {client}")
    return who, memoryview(message)[_HEADER.size :]


def entries(body: memoryview, size: int) -> list[memoryview]:
    """The fixed-size entries of a list."""
    if len(body) % size:
        raise Refusal("malformed: a list with a broken entry")
    return [body[i : i + size] for i in range(0, len(body), size)]


def write_entries(items: Sequence[tuple[int, bytes]]) -> bytes:
    """A list of (client, bytes)."""
    return b"".join(struct.pack("<I", client) + data for client, data in items)


def read_entries(body: memoryview, size: int) -> dict[int, bytes]:
    """The list of (client, `size` bytes); a client named twice is malformed."""
    found: dict[int, bytes] = {}
    for entry in entries(body, 4 + size):
        (client,) = struct.unpack_from("<I", entry)
        if client in found:
            raise Refusal(f"malformed: client {client} is named twice")
        found[client] = bytes(entry[4:])
    return found


def write_roster(clients: int, threshold: int, peers: Sequence[Peer]) -> bytes:
    """The body of a roster: the cohort's size, the threshold, the neighbours' keys."""
    listed = [(peer.client, peer.seal_key + peer.mask_key) for peer in peers]
    return struct.pack("<II", clients, threshold) + write_entries(listed)


def read_roster(body: memoryview) -> tuple[int, int, dict[int, Peer]]:
    """The cohort's size, the threshold, the neighbours by client."""
    if len(body) < 8:
        raise Refusal("malformed: a roster without a threshold")
    clients, threshold = struct.unpack_from("<II", body)
    listed = read_entries(body[8:], 2 * KEY)
    return clients, threshold, {u: Peer(u, keys[:KEY], keys[KEY:]) for u, keys in listed.items()}


def write_survivors(survivors: int, alive: Sequence[int], dropped: Sequence[int]) -> bytes:
    """The body of an unmask request: how many inputs were received, whose of the neighbours, whose not."""
    head = struct.pack("<III", survivors, len(alive), len(dropped))
    return head + struct.pack(f"<{len(alive) + len(dropped)}I", *alive, *dropped)


def read_survivors(body: memoryview) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The number of survivors, the neighbours alive and those dropped."""
    if len(body) < 12:
        raise Refusal("malformed: a request without its counts")
    survivors, alive, dropped = struct.unpack_from("<III", body)
    if len(body) != 12 + 4 * (alive + dropped):
        raise Refusal("malformed: a request that is not as long as it says")
    named = struct.unpack_from(f"<{alive + dropped}I", body, 12)
    return survivors, named[:alive], named[alive:]
