"""No two draws of a run share a key: they differ by purpose, task, round, client and what is drawn."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fot.benchmarks.stream import Task, TaskStream
from fot.engines.base import EngineOptions, Training
from fot.federation.run import Run
from fot.methods import FOT

TASKS, ROUNDS, CLIENTS, EPOCHS, BATCHES, BATCH = 3, 2, 3, 2, 2, 4


def test_every_draw_of_a_run_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[int]] = {}

    def spy(purpose: str, where: str, name: str) -> None:
        """Note the key, the first argument, of each call."""
        module = import_module(where)
        draw: Callable[..., Any] = getattr(module, name)

        def noted(key: int, *rest: Any) -> Any:
            seen.setdefault(purpose, []).append(key)
            return draw(key, *rest)

        monkeypatch.setattr(module, name, noted)

    spy("cohort", "fot.federation.run", "permutation")
    spy("order", "fot.engines.sequential", "permutation")
    spy("dropout", "fot.engines.sequential", "keyed_dropout")
    spy("sketch", "fot.subspace.sketch", "generator")

    def augment(x: Tensor, keys: Tensor) -> Tensor:
        seen.setdefault("augment", []).extend(keys.tolist())
        return x

    class Noted(FOT):
        def consolidate(self, network: Any, server: Any, sums: Any, task: int, key: int) -> Any:
            seen.setdefault("consolidation", []).append(key)
            return super().consolidate(network, server, sums, task, key)

    torch.manual_seed(0)
    n = CLIENTS * BATCHES * BATCH
    x, y, held = torch.randn(n, 6), torch.arange(n) % 3, tuple(torch.arange(n).chunk(CLIENTS))
    stream = TaskStream(
        "own", CLIENTS, False, (6,), TASKS, lambda i: Task(i, f"{i}", 3, x, y, x, y, held, augment)
    )
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
    run = Run(
        stream, model, Noted(threshold=0.5),
        training=Training(rounds=ROUNDS, cohort=CLIENTS, epochs=EPOCHS, batch_size=BATCH),
        engine=EngineOptions(kind="sequential", device="cpu"),
    )  # fmt: skip
    run()

    seen["cohort"] = list(set(seen["cohort"]))  # a round's cohort may be asked for again
    passes = TASKS * ROUNDS * CLIENTS * EPOCHS
    extractions = TASKS - 1  # none after the last task
    assert {purpose: len(keys) for purpose, keys in seen.items()} == {
        "cohort": TASKS * ROUNDS,
        "order": passes,
        "dropout": passes * BATCHES,
        "augment": passes * BATCHES * BATCH,
        "sketch": extractions * CLIENTS * 2,  # layers
        "consolidation": extractions,
    }
    every = [key for keys in seen.values() for key in keys]
    assert len(set(every)) == len(every)
