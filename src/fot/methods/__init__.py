"""Methods by name: one a file, each readable beside its paper."""

from __future__ import annotations

from fot.methods.base import Batch, ClientData, Method, Server
from fot.methods.fedavg import FedAvg
from fot.methods.fot import FOT
from fot.methods.fot_authors import FOTAuthors

METHODS: dict[str, type[Method]] = {"fedavg": FedAvg, "fot": FOT, "fot-authors": FOTAuthors}

__all__ = ["FOT", "METHODS", "Batch", "ClientData", "FOTAuthors", "FedAvg", "Method", "Server"]
