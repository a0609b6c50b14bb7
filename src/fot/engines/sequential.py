"""The reference engine: one client after another, in the plainest words.

Every other engine is tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fot.benchmarks.stream import Task
from fot.dropout import keyed_dropout
from fot.engines.base import Extraction, Round, RoundOutcome, Training
from fot.errors import NotFinite
from fot.methods.base import Batch, ClientData, Method
from fot.network import Network, Tree
from fot.randomness import fold, permutation, seeded

LOSS = "metric/loss"


class SequentialEngine:
    """Clients train one after another on one device."""

    name = "sequential"

    def __init__(self, network: Network, method: Method, training: Training) -> None:
        self.network = network
        self.method = method
        self.training = training
        self.device = network.device
        self._resident: tuple[Task, Tensor, Tensor] | None = None

    def train(self, round: Round) -> RoundOutcome:
        excluded: list[int] = []
        local_params: dict[int, Tree] = {}
        before, summation = round.server.params, round.summation
        for client in round.cohort:
            with self.network.products(), seeded(fold(round.keys.dropout, client), self.device):
                params, loss = self.local_training(round, client)
            sent = [*self.network.trained(round.task.index), *self.network.carried()]
            update = {name: params[name] - before[name] for name in sent} | {LOSS: loss}
            if not (summation.discreet or all(torch.isfinite(tensor).all() for tensor in update.values())):
                excluded.append(client)
                continue
            summation.add([client], {name: tensor.unsqueeze(0) for name, tensor in update.items()})
            if round.keep_local:
                local_params[client] = params
        sums = summation.close() if len(excluded) < len(round.cohort) else None
        return RoundOutcome(sums, tuple(excluded), local_params)

    def local_training(self, round: Round, client: int) -> tuple[Tree, Tensor]:
        """A client's model after its local epochs of SGD, and its mean loss on the way."""
        task, keys, state = round.task, round.keys, round.clients.get(client, {})
        x, y = self._data(task)
        held = task.clients[client].to(self.device)
        order, dropout, augment = (fold(k, client) for k in (keys.order, keys.dropout, keys.augment))
        trained = self.network.trained(task.index)
        params = {name: tensor.clone() for name, tensor in round.server.params.items()}
        losses: list[Tensor] = []
        for epoch in range(self.training.epochs):
            shuffled = held[permutation(fold(order, epoch), len(held), self.device)]
            for rows in torch.split(shuffled, self.training.batch_size):
                step = len(losses)
                inputs = x[rows]
                if task.augment is not None:
                    positions = torch.arange(len(rows), device=self.device)
                    inputs = task.augment(inputs, fold(fold(augment, step), positions))
                weight = torch.full((len(rows),), 1 / len(rows), dtype=self.network.dtype, device=self.device)
                leaves = {name: params[name].requires_grad_() for name in trained}
                with keyed_dropout(fold(dropout, step)):
                    loss = self.method.loss(
                        self.network, params, Batch(inputs, y[rows], task.index, weight), state
                    )
                found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
                for name, direction in self.method.precondition(self.network, gradients, state).items():
                    old = params[name].detach()
                    params[name] = old - self.training.lr * (direction + self.training.weight_decay * old)
                losses.append(loss.detach())
        return {name: tensor.detach() for name, tensor in params.items()}, torch.stack(losses).mean()

    def extract(self, extraction: Extraction) -> RoundOutcome:
        task, clients, summation = extraction.task, extraction.clients, extraction.summation
        x, y = self._data(task)
        broadcast = self.method.broadcast(self.network, extraction.server)
        excluded: list[int] = []
        sent: Tree = {}
        for position, client in zip(extraction.places, extraction.participants, strict=True):
            held = task.clients[client].to(self.device)
            data = ClientData(x[held], y[held], task.index, extraction.key, client, position)
            params = extraction.local_params.get(client, extraction.server.params)
            try:
                state, statistics = self.method.end_of_task(
                    self.network, params, data, clients.get(client, {}), broadcast
                )
                if not all(torch.isfinite(tensor).all() for tensor in statistics.values()):
                    raise NotFinite(f"client {client} has statistics that are not finite")
            except NotFinite:
                excluded.append(client)
                continue
            if state:
                clients[client] = state
            if statistics:  # a method may keep everything on the clients
                sent = {name: tensor.unsqueeze(0) for name, tensor in statistics.items()}
                summation.add([client], sent)
        if sent and summation.discreet:
            for client in excluded:
                summation.add([client], {name: torch.zeros_like(tensor) for name, tensor in sent.items()})
            excluded.clear()
        return RoundOutcome(summation.close() if sent else None, tuple(excluded))

    def evaluate(self, params: Tree, x: Tensor, y: Tensor, task: int) -> float:
        right = 0
        with torch.no_grad(), self.network.products():
            for inputs, labels in zip(torch.split(x, 1024), torch.split(y, 1024), strict=True):
                logits = self.network(params, _placed(inputs, self.network), task)
                right += int((logits.argmax(1) == labels.to(self.device)).sum())
        return 100 * right / max(len(y), 1)

    def _data(self, task: Task) -> tuple[Tensor, Tensor]:
        """The task's training data on the device; one task at a time is kept."""
        if self._resident is None or self._resident[0] is not task:
            self._resident = (task, *self._placed(task))
        return self._resident[1:]

    def _placed(self, task: Task) -> tuple[Tensor, Tensor]:
        return _placed(task.train_x, self.network), task.train_y.to(self.device)


def _placed(x: Tensor, network: Network) -> Tensor:
    """On the network's device, and in its precision unless the values are whole numbers (tokens)."""
    return x.to(network.device, network.dtype if x.is_floating_point() else x.dtype)
