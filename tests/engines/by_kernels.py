"""Cohorts that train by kernels: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cohorts import assert_engines_agree
from torch import nn

from fot.engines.base import Training
from fot.engines.vectorized import engine, kernels
from fot.methods.base import Method
from fot.models import alexnet

pytest.importorskip("triton")
from fot.engines.vectorized.kernels import convolve, tails

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
TRAINING = Training(batch_size=2, lr=0.05, weight_decay=0.02)


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU kernels are interpreted: by large tiles, for each of their operations takes a while."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(kernels, "at_hand", lambda device: True)
        monkeypatch.setattr(convolve, "SMALL", convolve.Tiles(512, 64, 256))
        monkeypatch.setattr(tails, "BLOCK", 1 << 13)
        interpreter = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
        unchecked = replace(
            interpreter.options, sanitize_overflow=False
        )  # the tests of single kernels have these checks
        monkeypatch.setattr(interpreter, "options", unchecked)
    assert kernels.at_hand(DEVICE)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the trial, and without a recording: what a round does is done once."""
    monkeypatch.setattr(engine, "check_folding", lambda *rest: None)
    monkeypatch.setattr(engine, "GraphedRound", lambda function, *_: function)


def agree(model: Callable[[], nn.Module], method: Method, *rest: Any, **more: Any) -> None:
    assert_engines_agree(model, method, *rest, device=DEVICE.type, **{"training": TRAINING, **more})


def small_alexnet() -> nn.Module:
    return alexnet(channels=(3, 4), kernels=(3, 2), hidden=(9,), dropout=(0.2, 0.3, 0.5), size=10)


SMALL_MAPS = (3, 10, 10)
