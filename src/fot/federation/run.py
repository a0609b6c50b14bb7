"""The loop: tasks, rounds, the end of each task; and what is measured on the way.

Data flow one way: the engine runs the cohort's local training, the aggregation forms the sum, the
method updates the server, an event tells of it. At a task's end the same walk carries statistics.

A run is a walk from round to round that stops where clients train: it yields the round and is sent what
came of it. So one run, or several side by side, are driven by the same few lines (``lockstep``). On a GPU a
round is settled, that is read, told of and saved, while the next one trains (``flight``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Any

import torch

from fot.aggregation import RoundAborted, Sums
from fot.benchmarks.stream import Stream, Task
from fot.engines.base import Extraction, Round, RoundKeys, RoundOutcome
from fot.engines.sequential import LOSS
from fot.errors import UserError
from fot.federation.flight import Flight
from fot.federation.lockstep import lockstep
from fot.federation.parts import Parts
from fot.methods.base import Server
from fot.network import Tree
from fot.randomness import key, permutation


class Run(Parts):
    """One run, from its parts to its summary.

    Parameters
    ----------
    stream
        The tasks, one after another, and which client holds what.
    model
        Any module; it is copied, and the run begins at its weights.
    method, training, aggregation, engine, evaluation, seed
        What the tables of a recipe of these names say.
    names
        What the summary calls the benchmark, the method and the partition.
    observer
        Told of every event as it happens.

    Examples
    --------
    >>> from fot.benchmarks.catalogue import build
    >>> from fot.engines.base import Training
    >>> from fot.methods import FOT
    >>> from fot.models import mlp
    >>> summary = Run(build("digits", tasks=2), mlp(), FOT(threshold=0.9), training=Training(rounds=1))()
    >>> summary["rounds"], summary["accuracy"][1][0]
    (2, None)
    """

    def __call__(self) -> dict[str, Any]:
        """Run from where ``state`` stands to the end; returns the summary."""
        return lockstep([self])[0]

    def walk(self) -> Generator[Round, RoundOutcome, dict[str, Any]]:
        """The run from where ``state`` stands to the end, round by round; returns the summary."""
        self._told = self.state.seconds["train"]
        self._drawn: tuple[tuple[int, int], list[int]] = ((-1, -1), [])
        self.aggregation.plan(self.sums_to_come())
        if not self.state.names:
            about = {
                "tasks": len(self.stream) if isinstance(self.stream, Sized) else None,
                "clients": self.stream.num_clients,
                "parameters": self.parameters(),
            }
            self.tell("run_started", **self.described(), **about)
        for task, last in _with_last(self.stream):
            head = self.network.add_task(task.classes, self.seed, task.index)
            self.state.server = Server({**head, **self.state.server.params}, self.state.server.state)
            self._tests.append((task.test_x, task.test_y))
            if task.index >= self.state.task:  # else a resumed run has it behind itself
                yield from self._task(task, last)
        if self.state.clipped:
            clipped = f"{self.state.clipped} entries of the clients' arrays exceeded the public clip"
            self.tell(
                "warning", message=f"{clipped} of the encoded sums; raise aggregation.update_clip or .clips"
            )
        for note in self.aggregation.notes():
            self.tell("warning", message=note)
        summary = self.summary()
        self.tell("run_finished", acc=summary["acc"], fgt=summary["fgt"])
        return summary

    def _task(self, task: Task, last: bool) -> Generator[Round, RoundOutcome, None]:
        state = self.state
        rounds = self.training.rounds_of(task.index)
        if state.round == 0:
            self._begin(task, rounds)
        holders = [client for client, held in enumerate(task.clients) if len(held)]
        if not holders:
            raise UserError(f"task {task.index + 1} ({task.name}): no client holds any of its data")
        extracts = self.method.extracts and not last
        outcome = RoundOutcome(None)
        left_out: set[int] = set()
        missing = -state.excluded
        flying: deque[Flight] = deque()
        provisional = True
        while state.round < rounds:
            number = state.round + len(flying)
            if number < rounds and (not flying or (flying[0].open and len(flying) == 1)):
                server = flying[-1].server if flying else state.server
                trained = yield from self._train(task, number, server, holders, extracts, provisional)
                flying.append(trained)
            elif self._settle(task, flight := flying.popleft()):
                outcome = flight.outcome
                left_out |= set(self._named(outcome))
            else:  # and so may be the next: each is looked at before the server goes on from it
                flying.clear()
                provisional = False
        missing += state.excluded
        if missing and not left_out:
            left = f"task {task.index + 1}: {missing} updates are missing from its sums"
            self.tell("warning", message=f"{left}: clients dropped out, or their numbers were not finite")
        elif left_out:
            listed = ", ".join(map(str, sorted(left_out)))
            left = f"task {task.index + 1}: updates of client(s) {listed} were not finite and were left out"
            self.tell("warning", message=f"{left}; lower training.lr, or check their data")
        if extracts:
            self._extract(task, self._participants(task.index, holders), outcome.local_params)
        for layer, share in self.method.usage(self.network, state.server).items():
            state.usage.setdefault(layer, [0.0] * task.index).append(share)
        accuracies = self._evaluate(task.index, None)
        for row in state.accuracy:
            row.append(None)
        state.accuracy.append([None] * (task.index + 1))
        for i, value in enumerate(accuracies):
            state.accuracy[i][task.index] = value
        state.task, state.round = task.index + 1, 0
        self.save(True)

    def _cohort(self, task: int, round: int, holders: Sequence[int]) -> list[int]:
        """The clients that train in a round, among those that hold data of the task."""
        where = (task, round)
        if self._drawn[0] != where:  # it is wanted twice: when it is expected, and when it trains
            order = permutation(key(self.seed, "cohort", *where), len(holders))[: self.training.cohort]
            self._drawn = (where, sorted(holders[i] for i in order.tolist()))
        return self._drawn[1]

    def _participants(self, task: int, holders: Sequence[int]) -> list[int]:
        """The clients that take part at the end of a task."""
        if self.method.participants == "all":
            return list(holders)
        return self._cohort(task, self.training.rounds_of(task) - 1, holders)

    def _begin(self, task: Task, rounds: int) -> None:
        state = self.state
        self.tell("task_started", task=task.index, name=task.name, classes=task.classes, rounds=rounds)
        for note in task.notes:
            self.tell("warning", message=note)
        self.try_model(task)
        state.names.append(task.name)
        if not self.network.multi_head:
            with self._clock("evaluate"):
                state.initial.append(self._test(self._initial, task.index))
                state.zero_shot.append(self._test(state.server.params, task.index))

    def _train(
        self,
        task: Task,
        round: int,
        server: Server,
        holders: Sequence[int],
        extracts: bool,
        provisional: bool,
    ) -> Generator[Round, RoundOutcome, Flight]:
        """Train a round from a server, and let the method take its sum."""
        keys = RoundKeys(
            *(key(self.seed, purpose, task.index, round) for purpose in ("order", "dropout", "augment"))
        )
        cohort, loss = self._cohort(task.index, round, holders), None
        last = round + 1 == self.training.rounds_of(task.index)
        # A cohort that is asked again at the end was not drawn for this one sum.
        again = extracts and last and self.method.participants == "cohort"
        keep_local = extracts and last and self.method.model == "local"
        self.at = (task.index, round)
        try:
            with self._clock("train"):
                summation = self.aggregation.open(
                    cohort, kind="update", path=self.at, drawn_from=None if again else len(holders)
                )
                if not last:
                    self.aggregation.expect(self._cohort(task.index, round + 1, holders))
                else:  # nobody is asked after the last task
                    self.aggregation.expect(self._participants(task.index, holders) if extracts else [])
            outcome = yield Round(
                server, task, cohort, keys, self.state.clients, summation, keep_local, provisional
            )
        except RoundAborted as reason:
            outcome = self._aborted(f"task {task.index + 1}, round {round + 1}", cohort, reason)
        with self._clock("train"):
            sums = outcome.sums
            if sums is not None and len(sums.clients) >= self.training.min_clients:
                means = torch._foreach_div(list(sums.arrays.values()), len(sums.clients))
                mean = dict(zip(sums.arrays, means, strict=True))
                loss = mean.pop(LOSS)
                server = self.method.aggregate(self.network, server, mean)
            return Flight(round, cohort, outcome, server, loss)

    def _settle(self, task: Task, flight: Flight) -> bool:
        """Take over what a round came to, and tell of it; False where it is to be trained anew."""
        state, outcome = self.state, flight.outcome
        with self._clock("train"):
            finite, loss = flight.landed()
        if not finite:
            return False
        state.server = flight.server
        sums = outcome.sums
        up, down = self._count("training", sums, _bytes(self._sent(task.index)))
        state.rounds += 1
        missing = self._missing(flight.cohort, outcome)
        state.excluded += missing
        seconds, self._told = state.seconds["train"] - self._told, state.seconds["train"]
        self.tell(
            "round_finished", task=task.index, round=flight.round, loss=loss,
            clients=len(sums.clients) if sums else 0, excluded=self._named(outcome), missing=missing,
            void=flight.void, bytes_up=up, bytes_down=down, seconds=seconds,
        )  # fmt: skip
        state.round += 1
        if state.round < self.training.rounds_of(task.index):
            if self.evaluation.every and state.round % self.evaluation.every == 0:
                self._evaluate(task.index, flight.round)
            self.save(False)  # past the last round, the clients' local models may be wanted still
        return True

    def _aborted(self, what: str, cohort: Sequence[int], reason: RoundAborted) -> RoundOutcome:
        """The sum of nobody, at the cost it had."""
        self.tell("warning", message=f"{what} is void: {reason}")
        return RoundOutcome(Sums({}, (), reason.bytes_up, reason.bytes_down), tuple(cohort))

    def _named(self, outcome: RoundOutcome) -> list[int]:
        """The clients that were left out, where the server can know why they are missing."""
        return [] if self.aggregation.only_sums else list(outcome.excluded)

    def _missing(self, cohort: Sequence[int], outcome: RoundOutcome) -> int:
        """How many clients a sum lacks."""
        if self.aggregation.only_sums and outcome.sums:
            return len(cohort) - len(outcome.sums.clients)
        return len(outcome.excluded)

    def _extract(self, task: Task, participants: Sequence[int], local_params: dict[int, Tree]) -> None:
        state = self.state
        start = time.perf_counter()
        with self._clock("extract"):
            path = (task.index, self.training.rounds_of(task.index))
            try:
                summation = self.aggregation.open(participants, kind="statistics", path=path)
                self.aggregation.expect([])  # who comes next, only the next task tells
                drawn = key(self.seed, "extraction", task.index)
                outcome = self.engine.extract(
                    Extraction(
                        state.server, task, participants, drawn, state.clients, summation, local_params
                    )
                )
            except RoundAborted as reason:
                outcome = self._aborted(f"the extraction of task {task.index + 1}", participants, reason)
            down = _bytes(self.method.broadcast(self.network, state.server))
            if self.method.model == "global":
                down += _bytes(self._sent(task.index))
            report: dict[str, Any] = {}
            void = len(outcome.excluded) == len(participants)
            named, missing = self._named(outcome), self._missing(participants, outcome)
            if named:
                listed = ", ".join(map(str, named))
                left = f"statistics of client(s) {listed} were not finite and were left out; check their data"
                self.tell("warning", message=f"task {task.index + 1}: {left}")
            elif missing and not void:
                left = f"the statistics of {missing} clients are missing: they dropped out or were not finite"
                self.tell("warning", message=f"task {task.index + 1}: {left}")
            if not void:
                state.server, report = self.method.consolidate(
                    self.network, state.server, outcome.sums.arrays if outcome.sums else {}, task.index,
                    key(self.seed, "consolidation", task.index),
                )  # fmt: skip
        up, down = self._count("extraction", outcome.sums, down)
        state.excluded += missing
        for message in report.pop("warnings", []):
            self.tell("warning", message=message)
        self.tell(
            "extracted", task=task.index, **report, clients=len(outcome.sums.clients) if outcome.sums else 0,
            excluded=named, missing=missing, void=void, bytes_up=up, bytes_down=down,
            seconds=time.perf_counter() - start,
        )  # fmt: skip

    def _evaluate(self, task: int, round: int | None) -> list[float]:
        with self._clock("evaluate"):
            accuracies = [self._test(self.state.server.params, seen) for seen in range(task + 1)]
        named = {str(seen): value for seen, value in enumerate(accuracies)}
        self.tell("evaluated", task=task, round=round, accuracies=named)
        return accuracies

    def _test(self, params: Tree, task: int) -> float:
        return self.engine.evaluate(params, *self._tests[task], task)

    def _sent(self, task: int) -> Tree:
        """What of the model a client receives: the parts that it trains, and running statistics."""
        names = [*self.network.trained(task), *self.network.carried()]
        return {name: self.state.server.params[name] for name in names}

    def _count(self, part: str, sums: Sums | None, broadcast: int) -> tuple[int, int]:
        up, down = (sums.bytes_up, sums.bytes_down + broadcast) if sums else (0, broadcast)
        self.state.clipped += sums.clipped if sums else 0
        self.state.bytes_up[part] += up
        self.state.bytes_down[part] += down
        return up, down

    @contextmanager
    def _clock(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda" and part != "train":  # rounds are waited for where they are settled
            torch.cuda.synchronize(self.device)
        self.state.seconds[part] += time.perf_counter() - start


def _with_last(stream: Stream) -> Iterator[tuple[Task, bool]]:
    """Each task, and whether it is the last: nothing is extracted after that one.

    A stream with a length is never asked for a task before its time; one without is looked ahead in.
    """
    if isinstance(stream, Sized):
        last = len(stream) - 1
        yield from ((task, task.index == last) for task in stream)
        return
    tasks = iter(stream)
    current = next(tasks, None)
    while current is not None:
        following = next(tasks, None)
        yield current, following is None
        current = following


def _bytes(tree: Tree) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
