"""What is done on a second stream: in which order, and what is kept for it."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from fot.engines.vectorized.aside import Aside

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


def test_work_on_a_second_stream_is_waited_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for what was asked for before it, and whoever needs it waits for it."""
    told: list[str] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: told.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: told.append(f"{name} waits for {event}"),
            record_event=lambda: f"what {name} has done",
        )

    @contextmanager
    def on(there: SimpleNamespace) -> Iterator[None]:
        told.append(f"on {there.name}")
        yield
        told.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("second"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream("first"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    given = torch.ones(2)
    alive = weakref.ref(given)
    wait = Aside(torch.device("cuda")).do(lambda x: told.append(f"sum {x.sum():.0f}"), given)
    del given
    assert told == ["second waits for first", "on second", "sum 2", "back"]
    assert alive() is not None
    wait()
    assert told[4:] == ["first waits for what second has done"] and alive() is None
