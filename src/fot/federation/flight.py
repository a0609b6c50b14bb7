"""A round between its training and its settling: a GPU may still be at it while the next one is prepared.

A round's sums are nearly always finite. So the server goes on from them at once, and only then asks whether
they were: the host prepares a round while the device trains the one before. Where they were not, what was
trained since is dropped and the round is trained anew, so that what a run comes to does not depend on this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fot.engines.base import RoundOutcome
from fot.methods.base import Server


class Reading:
    """Numbers on their way from a device to the host, which goes on meanwhile.

    Examples
    --------
    >>> Reading(torch.tensor(True), torch.tensor(0.25))()
    [1.0, 0.25]
    """

    def __init__(self, *numbers: Tensor) -> None:
        self.there = torch.stack([number.double() for number in numbers]) if numbers else torch.zeros(0)
        self.done: torch.cuda.Event | None = None
        if self.there.is_cuda:
            here = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
            self.there = here.copy_(self.there, non_blocking=True)
            self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.done.record()

    def __call__(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self.done is not None:
            self.done.synchronize()
        return self.there.tolist()


class Flight:
    """A round that was trained, and the server that it comes to.

    Parameters
    ----------
    round, cohort, outcome
        Which round, who trained, and what came of it.
    server
        The server after the round.
    loss
        The cohort's mean loss; None where the round is void.
    """

    def __init__(
        self, round: int, cohort: list[int], outcome: RoundOutcome, server: Server, loss: Tensor | None
    ) -> None:
        self.round, self.cohort, self.outcome, self.server = round, cohort, outcome, server
        self.void = loss is None
        self._reading = Reading(*(n for n in (loss, outcome.finite) if n is not None))

    @property
    def open(self) -> bool:
        """Whether it is not known yet that the sums are finite."""
        return self.outcome.finite is not None

    def landed(self) -> tuple[bool, float | None]:
        """Whether the sums are finite, and the loss: waits for both."""
        numbers = self._reading()
        finite = bool(numbers.pop()) if self.open else True
        return finite, numbers.pop() if numbers else None
