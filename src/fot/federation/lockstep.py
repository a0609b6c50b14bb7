"""Runs side by side: what several of them train at the same moment is trained at once.

Three seeds, or five thresholds, are as many runs of the same local work on other models and data. Their
cohorts make one large batch, which shares the cost of every call and fills more of a GPU. No run notices:
its draws come from its own keys, its sums are over its own clients, and its results differ
from those of a run alone by rounding.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fot.aggregation import RoundAborted
from fot.engines.base import Round, RoundOutcome
from fot.engines.vectorized import VectorizedEngine

if TYPE_CHECKING:
    from fot.federation.run import Run


def lockstep(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Walk runs to their ends side by side; returns their summaries.

    Those furthest behind go on first, so that runs that were taken up at different rounds meet again.
    Several runs must share one network, training and local method: see ``fot.federation.launch.alike``.

    Examples
    --------
    >>> from fot.benchmarks.catalogue import build
    >>> from fot.engines.base import Training
    >>> from fot.federation.run import Run
    >>> from fot.methods import FOT, FedAvg
    >>> from fot.models import mlp
    >>> stream, model, training = build("digits", tasks=2), mlp(), Training(rounds=1)
    >>> runs = [Run(stream, model, method, training=training) for method in (FedAvg(), FOT())]
    >>> [summary["rounds"] for summary in lockstep(runs)]
    [2, 2]
    """
    walks = [run.walk() for run in runs]
    waiting: dict[int, Round] = {}
    summaries: dict[int, dict[str, Any]] = {}
    active: list[Run] = []

    def tell_all(message: object, *_: object, **__: object) -> None:
        for run in active:
            run.tell("warning", message=str(message))

    def go_on(number: int, outcome: RoundOutcome | RoundAborted | None) -> None:
        walk, active[:] = walks[number], [runs[number]]
        try:
            if isinstance(outcome, RoundAborted):
                waiting[number] = walk.throw(outcome)
            else:
                waiting[number] = walk.send(outcome) if outcome else next(walk)
        except StopIteration as end:
            summaries[number] = end.value

    with warnings.catch_warnings():  # of Python's, too, observers and run folders are told
        warnings.showwarning = tell_all
        for number in range(len(runs)):
            go_on(number, None)
        while waiting:
            furthest_behind = min(runs[number].at for number in waiting)
            behind = [number for number in waiting if runs[number].at == furthest_behind]
            active[:] = [runs[number] for number in behind]
            outcomes = list(_trained(active, [waiting.pop(number) for number in behind]))
            for number, outcome in zip(behind, outcomes, strict=True):
                go_on(number, outcome)
    return [summaries[number] for number in range(len(runs))]


def _trained(runs: Sequence[Run], rounds: Sequence[Round]) -> Iterable[RoundOutcome | RoundAborted]:
    """What comes of the runs' rounds: of all at once, or of each by itself."""
    engine = runs[0].engine
    if len(runs) > 1 and isinstance(engine, VectorizedEngine):
        with _shared_clock(runs):
            outcomes = engine.train_together(rounds)
        if outcomes is not None:
            return outcomes
    return (_alone(run, round) for run, round in zip(runs, rounds, strict=True))


def _alone(run: Run, round: Round) -> RoundOutcome | RoundAborted:
    try:
        with _shared_clock([run]):
            return run.engine.train(round)
    except RoundAborted as reason:
        return reason


class _shared_clock:
    """Seconds of training, an equal share for each run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        share = (time.perf_counter() - self.start) / len(self.runs)
        for run in self.runs:
            run.state.seconds["train"] += share
