"""What a method is: a few functions over trees of tensors, of which FedAvg takes all the defaults.

Only sums leave the clients. A method's server side receives the sum (or mean) over clients of named
arrays, never one client's arrays; how that sum is formed is not the method's business.

One definition serves one client and a whole cohort. Where an engine trains a cohort at once, every
tensor of a client (parameters, gradients, client state) carries a leading client axis, samples are
folded into one batch, and a loss is the sum of the clients' losses, which has the gradient of each
client's loss in that client's slice. Write ``loss`` with ``batch.mean`` and plain sums, and
``precondition`` with operations on the last axes, and both hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fot.network import Network, Tree, save_tree


@dataclass(frozen=True)
class Batch:
    """Samples of one client, or of a cohort folded into one batch.

    ``weight`` is 1/n for each of a client's n samples and 0 for padding.
    """

    x: Tensor
    y: Tensor
    task: int
    weight: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """The mean over a client's samples, summed over the clients of the batch."""
        return (values * self.weight).sum()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """The mean cross-entropy of the samples' labels: the default loss."""
        return self.mean(functional.cross_entropy(logits, self.y, reduction="none"))


@dataclass(frozen=True)
class ClientData:
    """What a client sees at the end of a task: its samples, in order, and its own key."""

    x: Tensor
    y: Tensor
    task: int
    key: int
    """Key of (seed, purpose, task): fold the client's index, or what it shares a draw with."""
    client: int
    position: int
    """Place of the client among those that take part."""

    def batches(self, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples in pieces of at most ``size``."""
        yield from zip(torch.split(self.x, size), torch.split(self.y, size), strict=True)


@dataclass(frozen=True)
class Server:
    """The server's whole state: the global model and what the method keeps between tasks."""

    params: Tree
    state: Tree


class Method:
    """FedAvg's behaviour, to be overridden where a method differs from it.

    Options of a method are the fields of a frozen dataclass; recipes and the command line check
    names, types and ranges against them.
    """

    participants: Literal["all", "cohort"] = "all"
    """Who takes part at the end of a task: every client with data, or the last round's cohort."""
    model: Literal["global", "local"] = "global"
    """Which model they use there: the server's, or each client's own after the last local training."""
    sums_only: ClassVar[bool] = True
    """Whether sums are all the server needs; a method that needs more is refused under secure sums."""

    def check(self, network: Network) -> None:
        """Refuse options that do not suit the network, with a UserError, before anything is trained."""
        return None

    def loss(self, network: Network, params: Tree, batch: Batch, client: Tree) -> Tensor:
        """The client's training loss on a batch."""
        return batch.cross_entropy(network(params, batch.x, batch.task, training=True))

    def precondition(self, network: Network, gradients: Tree, client: Tree) -> Tree:
        """What a client steps along instead of the gradient."""
        return gradients

    def broadcast(self, network: Network, server: Server) -> Tree:
        """What the server sends, besides the model, before the end of a task."""
        return {}

    def end_of_task(
        self, network: Network, params: Tree, data: ClientData, client: Tree, broadcast: Tree
    ) -> tuple[Tree, Tree]:
        """The client's new state, and the statistics to be summed over clients."""
        return client, {}

    def pooled_statistics(
        self, network: Network, params: Tree, clients: Sequence[ClientData], broadcast: Tree
    ) -> Tree | None:
        """The statistics of clients that use one model, summed already; None where each is to be asked alone.

        For a method whose ``end_of_task`` leaves a client's state as it is and gives these statistics.
        """
        return None

    def aggregate(self, network: Network, server: Server, mean_update: Tree) -> Server:
        """The server after a round, from the mean of the clients' updates."""
        old = [server.params[name] for name in mean_update]
        moved = torch._foreach_add(old, list(mean_update.values())) if old else []  # all in one call
        return Server({**server.params, **dict(zip(mean_update, moved, strict=True))}, server.state)

    def consolidate(
        self, network: Network, server: Server, sums: Tree, task: int, key: int
    ) -> tuple[Server, dict[str, Any]]:
        """The server after a task, from the summed statistics, and what to tell of it.

        ``key`` is the server's own, for what it may draw.
        """
        return server, {}

    def usage(self, network: Network, server: Server) -> dict[str, float]:
        """The share of each layer's input space that is taken, in percent."""
        return {}

    def dimensions(self, network: Network) -> dict[str, int]:
        """The protected layers and the dimension of their inputs."""
        return {}

    def unprotected(self, network: Network) -> dict[str, str]:
        """What the method leaves free to change, and why."""
        return {}

    def save_memory(self, network: Network, server: Server, path: Path) -> None:
        """Write what the method keeps, for the run folder's ``memory.safetensors``."""
        if server.state:
            save_tree(server.state, path)

    @property
    def plain(self) -> bool:
        """Whether clients train by plain SGD on the plain loss, as in federated averaging."""
        kind = type(self)
        return kind.loss is Method.loss and kind.precondition is Method.precondition

    @property
    def extracts(self) -> bool:
        """Whether clients have anything to do at the end of a task."""
        return type(self).end_of_task is not Method.end_of_task

    @property
    def pools(self) -> bool:
        """Whether ``pooled_statistics`` is meant for this ``end_of_task``, not for one that it overrides."""
        both = {"end_of_task", "pooled_statistics"}
        newest = next(kind for kind in type(self).__mro__ if both & vars(kind).keys())
        return newest is not Method and "pooled_statistics" in vars(newest)
