"""Work that a GPU does beside what it goes on with, on a second stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Aside:
    """A second stream of a GPU; elsewhere work is done at once.

    A layer's new filters are wanted when the layer is used again, and not before: they are stepped while the
    way back goes on below. That pays where the kernels of few clients do not fill a GPU.

    Examples
    --------
    >>> done = []
    >>> wait = Aside(torch.device("cpu")).do(done.append, 1)
    >>> wait(), done
    (None, [1])
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def do(self, work: Callable[..., None], *given: Any) -> Callable[[], None]:
        """Start ``work(*given)`` when all that was asked for so far is done.

        Who reads what it writes, or writes what it reads, calls what this returns first. Until then what it
        was given is kept, so that its memory serves nothing else.
        """
        if self.stream is None:
            work(*given)
            return nothing
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work(*given)
        return _Wait(self.stream.record_event(), given)


class _Wait:
    def __init__(self, event: torch.cuda.Event, given: tuple[Any, ...]) -> None:
        self.event, self.given = event, given

    def __call__(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
        self.given = ()


def nothing() -> None:
    """What waits for nothing."""
