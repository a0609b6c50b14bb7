"""Secure sums within one process: the server and every client of the cohort, as they would be on a network.

A sum takes four exchanges: keys, shares, inputs, unmasking. In a steady state, where the next cohort is
known, its keys travel with this sum's inputs and its shares with this sum's unmasking, which leaves two. The
two sessions have no key in common, so it does not matter to either that the other shares its envelopes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import thread_time

import torch
from torch import Tensor

from fot.aggregation.codec import Codec, Coding, Words, from_words, to_words
from fot.aggregation.interface import Aggregation, Kind, Ledger, RoundAborted, Sums
from fot.aggregation.secure import client as clients_side
from fot.aggregation.secure import server as server_side
from fot.aggregation.secure.client import Entropy, Policy
from fot.aggregation.secure.server import Terms
from fot.aggregation.secure.wire import Refusal
from fot.errors import UserError

ADVERTISE, SHARE, INPUT, UNMASK = range(4)
COUNT = (64, 1)  # the segment that every sum ends with: how many entries were clipped
STAGES = ("advertise", "share", "input", "unmask")
Dropouts = Callable[[tuple[int, ...]], Mapping[int, int]]  # path of a sum -> {client: stage it vanishes at}


@dataclass
class Session:
    """One session, driven: the newest state of each party, and what each stage cost in processor time.

    `gone` says which client vanishes at which stage; its message of that stage is never sent. A client that
    refuses, or whose message the server refuses, has dropped out too. `up` and `down` are the sizes of the
    messages of each stage.
    """

    server: server_side.State
    clients: dict[int, clients_side.State]
    gone: Mapping[int, int]
    cohort: tuple[int, ...]
    up: list[list[int]] = field(default_factory=lambda: [[], [], [], []])
    down: list[list[int]] = field(default_factory=lambda: [[], [], [], []])
    client_seconds: list[float] = field(default_factory=lambda: [0.0] * 4)
    server_seconds: list[float] = field(default_factory=lambda: [0.0] * 4)
    record: Callable[[int, bytes], None] | None = None  # shown every message, for tests

    def takes_part(self, client: int, stage: int) -> bool:
        """Whether a client is still there at a stage."""
        return client in self.clients and self.gone.get(client, len(STAGES)) > stage

    def cost(self) -> tuple[int, int]:
        """Bytes sent and received by a client that is there to the end: at each stage, by those who were."""
        up, down = (sum(sum(s) / len(s) for s in sizes if s) for sizes in (self.up, self.down))
        return round(up), round(down)

    @contextmanager
    def priced(self) -> Iterator[None]:
        """A session that is aborted tells what it has cost."""
        try:
            yield
        except RoundAborted as reason:
            reason.bytes_up, reason.bytes_down = self.cost()
            raise

    def send(self, stage: int, client: int, message: bytes) -> None:
        """A client's message reaches the server."""
        self.up[stage].append(len(message))
        if self.record:
            self.record(stage, message)
        began = thread_time()
        try:
            self.server = server_side.receive(self.server, message)
        except Refusal:
            del self.clients[client]
        self.server_seconds[stage] += thread_time() - began

    def deliver(self, stage: int, outbox: server_side.Outbox) -> server_side.Outbox:
        """The server's messages go out; those that reach somebody who is still there."""
        for message in outbox.values():
            self.down[stage].append(len(message))
            if self.record:
                self.record(stage, message)
        return {client: m for client, m in outbox.items() if self.takes_part(client, stage)}

    def reply(
        self,
        stage: int,
        inbox: server_side.Outbox,
        answer: Callable[[clients_side.State, bytes], tuple[clients_side.State, bytes]],
    ) -> None:
        """The clients answer, or refuse and are gone."""
        for client, message in inbox.items():
            began = thread_time()
            try:
                self.clients[client], reply = answer(self.clients[client], message)
            except Refusal:
                del self.clients[client]
                continue
            self.client_seconds[stage] += thread_time() - began
            self.send(stage, client, reply)

    def advertise(self, session: bytes, policy: Policy, entropy: Entropy) -> None:
        """Stage 1: keys."""
        for client in self.cohort:
            if self.gone.get(client, len(STAGES)) > ADVERTISE:
                began = thread_time()
                self.clients[client], reply = clients_side.advertise(client, session, policy, entropy)
                self.client_seconds[ADVERTISE] += thread_time() - began
                self.send(ADVERTISE, client, reply)

    def rosters(self) -> server_side.Outbox:
        """The keys go out."""
        began = thread_time()
        self.server, outbox = server_side.rosters(self.server)
        self.server_seconds[SHARE] += thread_time() - began
        return self.deliver(SHARE, outbox)

    def share(self, rosters: server_side.Outbox) -> None:
        """Stage 2: shares."""
        self.reply(SHARE, rosters, clients_side.share)

    def collect(self, layout: Sequence[tuple[int, int]]) -> None:
        """The shares arrive, with the broadcast that opens the sum."""
        began = thread_time()
        self.server, outbox = server_side.inboxes(self.server, layout)
        self.server_seconds[INPUT] += thread_time() - began
        for client, message in self.deliver(INPUT, outbox).items():
            began = thread_time()
            try:
                self.clients[client] = clients_side.collect(self.clients[client], message)
            except Refusal:
                del self.clients[client]
            self.client_seconds[INPUT] += thread_time() - began

    def survivors(self) -> server_side.Outbox:
        """The requests to unmask go out."""
        began = thread_time()
        self.server, outbox = server_side.survivors(self.server)
        self.server_seconds[UNMASK] += thread_time() - began
        return self.deliver(UNMASK, outbox)

    def unmask(self, requests: server_side.Outbox) -> None:
        """Stage 4: shares of what covers the sum."""
        self.reply(UNMASK, requests, clients_side.unmask)

    def finish(self) -> tuple[tuple[Words, ...], tuple[int, ...]]:
        """The sum in the ring, and whose it is."""
        began = thread_time()
        total, included = server_side.finish(self.server)
        self.server_seconds[UNMASK] += thread_time() - began
        return total, tuple(sorted(included))


class SecureAggregation(Aggregation):
    """Sums that nobody can open: the server sees masked inputs, and of them only the sum can be unmasked.

    Parameters
    ----------
    codec : Codec
        The public clips and rings.
    minimum : int
        The least clients that a client agrees to be summed with, itself included; at least 2.
    neighbours : int
        With how many a client shares masks and secrets (even); 0 for the whole cohort.
    threshold : float
        The share of its neighbours that can unmask a client; always more than half are needed.
    workers : int
        Threads that mask inputs; 0 for one a core.
    dropouts : callable, optional
        ``dropouts(path)`` gives {client: stage} of those who vanish, for tests.
    entropy : callable
        Where the secrets come from: the operating system, or a fixed source in tests.

    Examples
    --------
    >>> summation = SecureAggregation(Codec()).open(range(4), kind="update", path=(0, 0))
    >>> summation.add([0, 1, 2], {"weight": torch.tensor([[0.25], [0.5], [1.0]])})
    >>> sums = summation.close()
    >>> sums.arrays["weight"].tolist(), sums.clients
    ([1.75], (0, 1, 2))
    """

    only_sums = True

    def __init__(
        self,
        codec: Codec,
        *,
        minimum: int = 3,
        neighbours: int = 0,
        threshold: float = 0.6,
        workers: int = 0,
        dropouts: Dropouts | None = None,
        entropy: Entropy = os.urandom,
    ) -> None:
        if minimum < 2:
            raise UserError(f"aggregation.minimum: {minimum}; a sum hides nobody but among 2 or more")
        if not 0 <= threshold <= 1:
            raise UserError(f"aggregation.threshold: {threshold:g} is a share; choose from 0 to 1")
        if neighbours < 0 or neighbours % 2:
            raise UserError(f"aggregation.neighbours: {neighbours}; choose an even number, or 0 for all")
        if workers < 0:
            raise UserError(f"aggregation.workers: {workers}; choose a number, or 0 for one a core")
        self.codec = codec
        self.policy = Policy(minimum=minimum, degree=neighbours)
        self.threshold = threshold
        self.workers = workers or os.cpu_count() or 1
        self.dropouts = dropouts
        self.entropy = entropy
        self.record: Callable[[int, bytes], None] | None = None
        self.upcoming: tuple[int, ...] = ()
        self._last: tuple[int, ...] = ()
        self._prepared: Session | None = None
        self.session: Session | None = None  # the newest, for the bench and tests

    def expect(self, cohort: Sequence[int]) -> None:
        """Say who will form the next sum, so that its keys and shares travel with the sum now open."""
        self.upcoming = tuple(sorted(cohort))

    def notes(self) -> list[str]:
        """Clips that were of no use."""
        return self.codec.notes()

    def open(
        self, cohort: Sequence[int], *, kind: Kind, path: tuple[int, ...], drawn_from: int | None = None
    ) -> SecureSummation:
        """Begin a sum over `cohort`: with the session prepared for it, or with a new one."""
        members = tuple(sorted(cohort))
        ledger = Ledger(members)
        gone = self.dropouts(path) if self.dropouts else {}
        session, self._prepared = self._prepared, None
        if (
            session is None
            or session.cohort != members
            or set(session.clients) != set(members)
            or any(stage <= SHARE for stage in gone.values())
        ):
            session = self.new_session(members, gone)
            with session.priced():
                self.advertise(session)
                session.share(session.rosters())
        else:
            session.gone = gone
        # A cohort that has come twice is taken to come again, until `expect` knows better.
        self.upcoming = members if members == self._last else ()
        self._last, self.session = members, session
        return SecureSummation(self, session, ledger, kind)

    def new_session(self, cohort: tuple[int, ...], gone: Mapping[int, int]) -> Session:
        """A session with a fresh name: no key of one is of use in another."""
        name = hashlib.sha256(b"fot session" + self.entropy(32)).digest()[:16]
        terms = Terms(
            cohort=frozenset(cohort),
            session=name,
            minimum=self.policy.minimum,
            degree=self.policy.degree,
            threshold=self.threshold,
        )
        return Session(server_side.begin(terms), {}, gone, cohort, record=self.record)

    def advertise(self, session: Session) -> None:
        """Have the session's clients advertise."""
        assert isinstance(session.server, server_side.Keys)
        session.advertise(session.server.terms.session, self.policy, self.entropy)


class SecureSummation:
    """One secure sum. Inputs are masked as they are added, and held by the server as one running total."""

    discreet = False
    add_total = None

    def __init__(self, parent: SecureAggregation, session: Session, ledger: Ledger, kind: Kind) -> None:
        self.parent = parent
        self.session = session
        self.ledger = ledger
        self.kind = kind
        self.codings: dict[str, Coding] = {}
        self.layout: list[tuple[int, int]] = []
        self.like: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Encode, mask and send one row of each array for each client."""
        self.ledger.enter(clients, arrays)
        session = self.session
        if not self.codings:
            self.codings = self.parent.codec.codings(self.kind, self.ledger.shapes, len(self.ledger.cohort))
            self.like = {name: (array.shape[1:], array.dtype, array.device) for name, array in arrays.items()}
            self.layout = [(self.codings[n].bits, like[0].numel()) for n, like in self.like.items()]
            self.layout.append(COUNT)
            with session.priced():
                session.collect(self.layout)

        def mask(row: int) -> tuple[int, clients_side.Masked, bytes, float]:
            began = thread_time()
            words, clipped = [], 0
            for name, coding in self.codings.items():
                integers, lost = coding.encode(arrays[name][row])
                words.append(to_words(integers, coding.bits))
                clipped += lost
            words.append(to_words(torch.tensor([clipped]), 64))  # under the masks, like all that clients tell
            state, message = clients_side.submit(session.clients[clients[row]], words, self.layout)
            return clients[row], state, message, thread_time() - began

        present = [
            row
            for row, client in enumerate(clients)
            if session.takes_part(client, INPUT) and isinstance(session.clients[client], clients_side.Ready)
        ]
        with ThreadPoolExecutor(min(self.parent.workers, max(len(present), 1))) as pool:
            for start in range(0, len(present), 2 * self.parent.workers):  # a few masked inputs in memory
                for done in pool.map(mask, present[start : start + 2 * self.parent.workers]):
                    client, session.clients[client], message, seconds = done
                    session.client_seconds[INPUT] += seconds
                    session.send(INPUT, client, message)

    def close(self) -> Sums:
        """Unmask and decode the sum; with it, prepare the next one if its cohort is known."""
        self.ledger.close()  # an empty sum is an error
        parent, session = self.parent, self.session
        minimum, upcoming = parent.policy.minimum, None
        if len(parent.upcoming) >= minimum:  # else the next sum will say itself that it is too small
            # Who sent no input has not advertised for the next sum with it.
            silent = self.ledger.cohort - self.ledger.added | session.gone.keys()
            upcoming = parent.new_session(parent.upcoming, dict.fromkeys(silent, ADVERTISE))
            parent.advertise(upcoming)
        with session.priced():
            requests = session.survivors()
            ready = upcoming if upcoming and len(upcoming.clients) >= minimum else None
            rosters = ready.rosters() if ready else {}
            session.unmask(requests)
            if ready:
                ready.share(rosters)
            total, included = session.finish()
        parent._prepared = ready
        arrays = {}
        *vectors, (clipped,) = total
        for words, (name, (shape, dtype, device)) in zip(vectors, self.like.items(), strict=True):
            integers = torch.from_numpy(from_words(words, self.codings[name].bits))
            arrays[name] = self.codings[name].decode(integers, dtype).reshape(shape).to(device)
        up, down = session.cost()
        return Sums(arrays=arrays, clients=included, bytes_up=up, bytes_down=down, clipped=int(clipped))
