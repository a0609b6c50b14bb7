"""Who shares masks and secrets with whom: everybody with everybody, or a random regular graph.

The sparse graph is that of Bell et al. (2020): a ring of the clients in random order, each joined to the
k/2 nearest on either side. It is k-connected (Harary, 1962): it stays in one piece when any k - 1 are gone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from fot.errors import UserError


def neighbours(clients: Iterable[int], degree: int, session: bytes) -> dict[int, tuple[int, ...]]:
    """The neighbours of every client; degree 0, or one too large for the cohort, is the complete graph.

    The order on the ring is a hash of session and client, so a server that follows the protocol does not pick
    a client's neighbours. One that lies can: it names the session, and clients do not see the ring.

    Examples
    --------
    >>> neighbours([3, 5, 9], 0, bytes(16))[5]
    (3, 9)
    >>> [len(peers) for peers in neighbours(range(8), 4, bytes(16)).values()]
    [4, 4, 4, 4, 4, 4, 4, 4]
    """
    members = sorted(clients)
    if degree < 0 or degree % 2:
        raise UserError(f"{degree} neighbours: choose an even number, or 0 for all")
    if degree == 0 or degree >= len(members) - 1:
        return {u: tuple(v for v in members if v != u) for u in members}
    ring = sorted(members, key=lambda u: hashlib.sha256(session + u.to_bytes(4, "little")).digest())
    reach = [step for step in range(-degree // 2, degree // 2 + 1) if step]
    return {u: tuple(sorted(ring[(i + step) % len(ring)] for step in reach)) for i, u in enumerate(ring)}


def threshold_of(degree: int, share: float) -> int:
    """Shares needed of `degree` holders: the given share of them, and always more than half.

    Examples
    --------
    >>> threshold_of(63, 0.6), threshold_of(3, 0.6)
    (38, 2)
    """
    return max(degree // 2 + 1, math.ceil(share * degree - 1e-9))


def degree_needed(
    clients: int, *, colluding: int, dropping: int, share: float, security: int = 40, failure: int = 20
) -> int:
    """The smallest even degree that keeps the sparse graph safe (2**-security) and sound (2**-failure).

    Unsafe: some client has a threshold of colluding neighbours, or the honest clients that stay fall into
    pieces. Unsound: some client keeps fewer neighbours than the threshold. The ring's order is random and
    independent of who colludes and who drops, so neighbours are draws without replacement; the probabilities
    are bounded by a sum over the clients. The honest survivors can only fall into pieces where at least k/2
    clients that lie side by side on the ring are gone, on two sides; one side is counted.

    Examples
    --------
    >>> degree_needed(1024, colluding=51, dropping=51, share=0.6)
    30
    """
    gone = colluding + dropping
    for degree in range(2, clients - 1, 2):
        t = threshold_of(degree, share)
        captured = clients * _tail(clients - 1, colluding, degree, t)
        run = degree // 2
        apart = clients * math.comb(gone, run) / math.comb(clients, run) if run <= gone else 0.0
        stranded = clients * _tail(clients - 1, dropping, degree, degree - t + 1)
        if captured + apart <= 2.0**-security and stranded <= 2.0**-failure:
            return degree
    return clients - 1


def _tail(population: int, marked: int, draws: int, at_least: int) -> float:
    """The chance that at least so many of the draws (without replacement) are marked."""
    ways = sum(
        math.comb(marked, hits) * math.comb(population - marked, draws - hits)
        for hits in range(at_least, min(marked, draws) + 1)
    )
    return ways / math.comb(population, draws)
