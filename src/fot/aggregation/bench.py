"""`fot bench secagg`: what a secure sum costs, by stage, beside the plain one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING

import torch

from fot.aggregation import make_aggregation
from fot.aggregation.codec import Segment, packed_size, to_words
from fot.aggregation.secure import client as client_side
from fot.aggregation.secure import primitives, wire
from fot.aggregation.secure.aggregation import COUNT, STAGES, SecureAggregation
from fot.aggregation.secure.client import Policy
from fot.aggregation.secure.graph import degree_needed, threshold_of
from fot.aggregation.secure.wire import Peer

if TYPE_CHECKING:
    from rich.table import Table

COHORTS = (16, 64, 256, 1024)
SIZES = (10_000, 100_000, 1_400_000)


@dataclass(frozen=True)
class Cost:
    """One measurement. Bytes are those of one client; its seconds, the mean over clients, and the server's
    are processor time by stage; `total_seconds` and `plain_seconds` are what all together took by the clock.

    `clients_timed` of the `clients` were run: all, or one alone among peers that only made the keys and
    shares meant for it, where running all would take too long; the server then has nothing to time.
    """

    clients: int
    size: int
    neighbours: int
    client_seconds: dict[str, float]
    server_seconds: dict[str, float]
    total_seconds: float
    bytes_up: int
    bytes_down: int
    plain_seconds: float
    plain_bytes: int
    clients_timed: int

    @property
    def processor_seconds(self) -> float:
        """The work of all clients that were run and of the server, however many cores shared it."""
        return self.clients_timed * sum(self.client_seconds.values()) + sum(self.server_seconds.values())

    @property
    def expansion(self) -> float:
        """Bytes sent and received, as a multiple of the plain upload."""
        return (self.bytes_up + self.bytes_down) / self.plain_bytes


def bench_secagg(cohorts: Sequence[int] = COHORTS, sizes: Sequence[int] = SIZES) -> Iterator[Cost]:
    """Measure secure sums of float32 vectors, on the complete graph and on the sparse one.

    The sparse graph has the degree that a tenth of the clients colluding and a tenth dropping out call for.
    On the complete graph of more than 64 clients a single client is measured.

    Examples
    --------
    >>> costs = list(bench_secagg(cohorts=[16], sizes=[1000]))
    >>> [(cost.clients, cost.neighbours, cost.plain_bytes) for cost in costs]
    [(16, 15, 4000), (16, 6, 4000)]
    """
    for clients in cohorts:
        tenth = clients // 10
        sparse = degree_needed(clients, colluding=tenth, dropping=tenth, share=0.6)
        for size in sizes:
            if clients > 64:
                yield one_client(clients, size)
            else:
                yield whole_cohort(clients, size, 0)
            if sparse < clients - 1:
                yield whole_cohort(clients, size, sparse)


def whole_cohort(clients: int, size: int, neighbours: int, *, bits: int = 32) -> Cost:
    """A round with every client and the server; of small cohorts the second, when all is warm."""
    aggregation = make_aggregation("secure", seed=0, neighbours=neighbours, update_bits=bits)
    assert isinstance(aggregation, SecureAggregation)
    vector = torch.linspace(-1, 1, size).unsqueeze(0)
    members = range(clients)
    total = 0.0
    for number in range(2):
        if number == 0 and clients > 64:
            continue
        began = perf_counter()
        summation = aggregation.open(members, kind="update", path=(0, number))
        batch = vector.expand(min(8, clients), size)
        for start in range(0, clients, len(batch)):
            some = members[start : start + len(batch)]
            summation.add(some, {"vector": batch[: len(some)]})
        sums = summation.close()
        total = perf_counter() - began
    session = aggregation.session
    assert session is not None
    return Cost(
        clients=clients,
        size=size,
        neighbours=neighbours or clients - 1,
        client_seconds={s: t / clients for s, t in zip(STAGES, session.client_seconds, strict=True)},
        server_seconds=dict(zip(STAGES, session.server_seconds, strict=True)),
        total_seconds=total,
        bytes_up=sums.bytes_up,
        bytes_down=sums.bytes_down,
        plain_seconds=_plain_seconds(clients, vector),
        plain_bytes=4 * size,
        clients_timed=clients,
    )


def one_client(clients: int, size: int, *, bits: int = 32, plain_bits: int = 32) -> Cost:
    """One client of a complete graph, with true messages from all of its peers."""
    session, policy, threshold = bytes(16), Policy(), threshold_of(clients - 1, 0.6)
    layout: list[Segment] = [(bits, size), COUNT]
    peers = [client_side.advertise(u, session, policy)[0] for u in range(1, clients)]
    keys = [Peer(p.client, primitives.public_key(p.seal_key), _mask_public(p)) for p in peers]
    seconds = dict.fromkeys(STAGES, 0.0)
    up, down = 0, 0

    began = thread_time()
    advertised, message = client_side.advertise(0, session, policy)
    seconds["advertise"] = thread_time() - began
    up += len(message)

    roster = wire.write(wire.ROSTER, session, 0, wire.write_roster(clients, threshold, keys))
    down += len(roster)
    began = thread_time()
    shared, message = client_side.share(advertised, roster)
    seconds["share"] = thread_time() - began
    up += len(message)

    inbox = wire.write(
        wire.INBOX, session, 0, wire.write_entries([_sealed_for(p, advertised) for p in peers])
    )
    down += len(inbox)
    words = [to_words(torch.arange(size), bits), to_words(torch.zeros(1, dtype=torch.int64), 64)]
    began = thread_time()
    ready = client_side.collect(shared, inbox)
    masked, message = client_side.submit(ready, words, layout)
    seconds["input"] = thread_time() - began
    up += len(message)

    alive = list(range(1, clients))
    request = wire.write(wire.SURVIVORS, session, 0, wire.write_survivors(clients, alive, []))
    down += len(request)
    began = thread_time()
    _, message = client_side.unmask(masked, request)
    seconds["unmask"] = thread_time() - began
    up += len(message)
    return Cost(
        clients=clients,
        size=size,
        neighbours=clients - 1,
        client_seconds=seconds,
        server_seconds={},
        total_seconds=sum(seconds.values()),
        bytes_up=up,
        bytes_down=down,
        plain_seconds=_plain_seconds(1, torch.zeros(1, size)),
        plain_bytes=packed_size((plain_bits, size)),
        clients_timed=1,
    )


def _mask_public(peer: client_side.Advertised) -> bytes:
    return primitives.public_key(primitives.mask_key(peer.mask_secret, peer.session, peer.client))


def _sealed_for(peer: client_side.Advertised, receiver: client_side.Advertised) -> tuple[int, bytes]:
    """What `peer` would seal for `receiver`; random bytes stand for shares: none will be put together."""
    own = primitives.private_key(peer.seal_key)
    secret = primitives.agree(own, primitives.public_key(receiver.seal_key))
    shares = os.urandom(2 * wire.SHARE)
    return peer.client, primitives.seal(secret, peer.session, peer.client, receiver.client, shares)


def _plain_seconds(clients: int, vector: torch.Tensor) -> float:
    summation = make_aggregation("plain", seed=0).open(range(clients), kind="update", path=(0,))
    began = perf_counter()
    for client in range(clients):
        summation.add([client], {"vector": vector})
    summation.close()
    return perf_counter() - began


def bench_table(costs: Iterable[Cost]) -> Table:
    """The measurements as a table for the terminal."""
    from rich.table import Table

    title = (
        "secure sums over n clients with k neighbours each; processor time: stages of one client in ms, "
        "the server and all together in s; by the clock, in s: all together and the plain sum; "
        "x = bytes over the plain upload"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("n", "entries", "k", *STAGES, "server", "all", "clock", "plain", "MB up", "x"):
        table.add_column(heading[:6] if heading != "entries" else heading, justify="right", no_wrap=True)
    for cost in costs:
        table.add_row(
            f"{cost.clients}",
            f"{cost.size:.1e}",
            f"{cost.neighbours}",
            *(f"{1e3 * cost.client_seconds[stage]:.1f}" for stage in STAGES),
            f"{sum(cost.server_seconds.values()):.2f}" if cost.server_seconds else "-",
            *(
                f"{seconds:.2f}" if cost.clients_timed == cost.clients else "-"
                for seconds in (cost.processor_seconds, cost.total_seconds)
            ),
            f"{cost.plain_seconds:.3f}",
            f"{cost.bytes_up / 1e6:.2f}",
            f"{cost.expansion:.2f}",
        )
    return table
