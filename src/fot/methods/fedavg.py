"""Federated averaging (McMahan et al., 2017): the paper's row "FL", with nothing against forgetting."""

from __future__ import annotations

from dataclasses import dataclass

from fot.methods.base import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """The server adds the mean of the clients' updates."""
