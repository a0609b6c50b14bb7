"""Federated Orthogonal Training (Bakman et al., ICLR 2024).

Clients train as usual and keep nothing. The server keeps, for each protected layer, an orthonormal
basis O of the inputs that old tasks gave it, and removes from every mean update what acts on them:

    FedProject (eqs. 5-7)   Delta <- Delta (I - O Oᵀ),  W <- W + mu Delta
    GPSE (eqs. 8-12)        after each task, from the sum of the clients' sketches A = X* G, the
                            principal directions of the new inputs are added to O
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from fot.errors import UserError
from fot.layers import Layer, Protection, find_layers, keeps_samples_apart
from fot.methods.base import ClientData, Method, Server
from fot.network import Network, Tree
from fot.options import Between
from fot.randomness import fold
from fot.subspace import SubspaceMemory, sample_size, sketch, threshold_at

BATCH = {"cpu": 256, "cuda": 2048}  # samples that pass through the network at once in GPSE


@dataclass(frozen=True)
class FOT(Method):
    """Project each mean update orthogonally to the inputs of old tasks."""

    threshold: Annotated[float, Between(0, 1)] = 0.95
    """th_1: the share of the energy of a task's inputs that is to be protected."""
    increment: Annotated[float, Between(0, 1)] = 0.0
    """Added to the threshold after each task."""
    rule: Literal["energy", "authors"] = "energy"
    """How the rank is chosen: by energy as in GPM, or as the authors' code does."""
    sketch: Annotated[int, Between(1)] | str | dict[str, Annotated[int, Between(1)] | str] = "d"
    """The sampling dimension s: a number, a multiple of d ("5d"), or either by layer ({"conv*": "d"})."""
    mu: Annotated[float, Between(0)] = 1.0
    """The server's step along the projected mean update (eq. 7)."""
    protect: tuple[str, ...] | None = None
    """Names or patterns of the layers to protect; by default all Linear and Conv layers but heads."""
    bias: bool = False
    """Protect biases too, as the weights of a constant input; the paper leaves them free."""
    freeze_first: bool = False
    """Freeze the first protected layer, in the order of registration, after the first task (the
    paper's FRZ): its inputs, the samples themselves, then take no part in extraction."""
    participants: Literal["all", "cohort"] = "all"
    model: Literal["global", "local"] = "global"
    shared_sketch_seed: Annotated[int, Between(0)] = 0
    """0: every client draws its own G. n: the k-th client of each of n workers draws the same G, a
    likely artefact of the authors' code."""
    exact: bool = False
    """Sum Gram matrices in place of sketches and let the server draw the sketch: the same law, cheaper in
    a simulation; and the form to use under differential privacy, where sketches drown in the noise."""

    def check(self, network: Network) -> None:
        """Find the layers that ``protect`` names, and the size of each one's sketch."""
        first = Network(network.module)
        first.add_task(2, seed=0, task=0)  # a head may be named, and there is none before the first task
        try:
            layers = self._layers(first)
        except UserError as error:
            raise UserError(f"method.protect: {error}") from None
        try:
            for layer in layers:
                sample_size(layer, self.sketch)
        except UserError as error:
            raise UserError(f"method.sketch: {error}") from None

    def aggregate(self, network: Network, server: Server, mean_update: Tree) -> Server:
        """FedProject, eqs. (6) and (7); running statistics are averaged, whatever mu is."""
        memory, statistics = self._memory(network, server), set(network.carried())
        update = {
            name: delta if name in statistics or self.mu == 1 else self.mu * delta
            for name, delta in memory.project(mean_update).items()
        }
        if self.freeze_first and server.state:
            first = f"{memory.layers[0].name}." if memory.layers[0].name else ""  # its bias is frozen too
            update = {name: delta for name, delta in update.items() if not name.startswith(first)}
        return super().aggregate(network, server, update)

    def broadcast(self, network: Network, server: Server) -> Tree:
        """Clients need the basis O of each layer that they sketch."""
        bases = self._memory(network, server).bases
        return {layer.name: bases[layer.name] for layer in self._sketched(network)} if server.state else {}

    def end_of_task(
        self, network: Network, params: Tree, data: ClientData, client: Tree, broadcast: Tree
    ) -> tuple[Tree, Tree]:
        """GPSE on the client, eqs. (8) and (9)."""
        return client, self._statistics(network, params, [data], broadcast)

    def pooled_statistics(
        self, network: Network, params: Tree, clients: Sequence[ClientData], broadcast: Tree
    ) -> Tree | None:
        """GPSE on several clients, eqs. (8) to (10), where the network keeps their samples apart."""
        held = [data.x for data in clients if len(data.x)]
        if not held:
            return None
        ends = torch.cat([held[0][:2], held[-1][-2:]])
        apart = keeps_samples_apart(
            network.module, self._sketched(network), ends, lambda x: network(params, x, clients[0].task)
        )
        if not apart:
            warnings.warn(
                "clients are asked one by one after a task: what a layer receives depends on the batch",
                stacklevel=2,
            )
            return None
        return self._statistics(network, params, clients, broadcast)

    def _statistics(
        self, network: Network, params: Tree, clients: Sequence[ClientData], broadcast: Tree
    ) -> Tree:
        shared = self.shared_sketch_seed
        x = torch.cat([data.x for data in clients])
        return sketch(
            network.module,
            torch.split(x, BATCH.get(x.device.type, 256)),
            self._sketched(network),
            broadcast,
            size=self.sketch,
            key=[fold(c.key, c.position // shared if shared else c.client) for c in clients],
            exact=self.exact,
            samples=[len(data.x) for data in clients],
            forward=lambda x: network(params, x, clients[0].task),
        )

    def consolidate(
        self, network: Network, server: Server, sums: Tree, task: int, key: int
    ) -> tuple[Server, dict[str, Any]]:
        """GPSE on the server, eq. (12): choose the rank of each layer and grow its basis."""
        memory = self._memory(network, server)
        threshold = threshold_at(task, self.threshold, self.increment)
        part = SubspaceMemory(self._sketched(network), memory.bases)
        size = self.sketch if self.exact else None
        grown, growth = part.expand(sums, threshold=threshold, rule=self.rule, key=key, size=size)
        grown = SubspaceMemory(memory.layers, {**memory.bases, **grown.bases})
        filled = set(grown.frozen()) - set(memory.frozen())
        if self.freeze_first:
            grown = grown.freeze(memory.layers[0].name)
        full = [
            f"layer {name} is full after task {task + 1}: it is frozen from here on"
            for name in sorted(filled)
        ]
        short = [
            f"layer {name}: task {task + 1} took all that its sketch can show, "
            "and the threshold may need more; raise method.sketch"
            for name, g in growth.items()
            if g.exhausted
        ]
        told = ("rank", "dimension", "added", "covered")
        report = {
            "threshold": threshold,
            "layers": {name: {what: getattr(g, what) for what in told} for name, g in growth.items()},
            "warnings": full + short,
        }
        return Server(server.params, grown.bases), report

    def usage(self, network: Network, server: Server) -> dict[str, float]:
        """The rank of each basis over its dimension, in percent."""
        return self._memory(network, server).usage()

    def dimensions(self, network: Network) -> dict[str, int]:
        """The inputs' dimension d of each protected layer (summed over groups)."""
        return {layer.name: layer.groups * layer.dimension for layer in self._layers(network)}

    def unprotected(self, network: Network) -> dict[str, str]:
        """Heads, norm layers, biases, ...: whatever is trained and not projected."""
        return self._protection(network).skipped

    def save_memory(self, network: Network, server: Server, path: Path) -> None:
        """A file that ``SubspaceMemory.load`` reads."""
        self._memory(network, server).save(path)

    def _protection(self, network: Network) -> Protection:
        found = network.known(
            ("protected", self.protect, self.bias),
            lambda module: find_layers(module, self.protect, bias=self.bias),
        )
        return found

    def _layers(self, network: Network) -> tuple[Layer, ...]:
        return self._protection(network).layers

    def _memory(self, network: Network, server: Server) -> SubspaceMemory:
        layers = self._layers(network)
        empty = SubspaceMemory.empty(layers, network.dtype, network.device)
        return SubspaceMemory(layers, {**empty.bases, **server.state})  # a head that is named comes later

    def _sketched(self, network: Network) -> tuple[Layer, ...]:
        """The layers that take part in GPSE: all but a first one that is to be frozen."""
        return self._layers(network)[1 if self.freeze_first else 0 :]
