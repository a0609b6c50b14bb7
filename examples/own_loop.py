"""FOT's two steps in a training loop of one's own: nothing of the package but `layers` and `subspace`.

    python examples/own_loop.py

Whatever carries updates from clients to the server, two lines are added to it: the mean update is projected
(FedProject), and at the end of a task the memory grows by a sum of sketches (GPSE).
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from fot.layers import find_layers
from fot.subspace import SubspaceMemory, sketch

Data = tuple[Tensor, Tensor]
TASKS, CLIENTS, ROUNDS = 3, 5, 15


def make_tasks() -> list[tuple[list[Data], Data]]:
    """For each task what every client holds, and the test data: digits, their pixels in another order."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(t)) for t in range(TASKS)]
    rows = torch.arange(1500).chunk(CLIENTS)
    return [([(x[held][:, o], y[held]) for held in rows], (x[1500:, o], y[1500:])) for o in orders]


def local_update(model: nn.Module, start: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A client's plain SGD from the server's weights; what it sends is the difference."""
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in torch.randperm(len(x)).split(16):
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return {name: p.detach() - start[name] for name, p in model.named_parameters()}


def total(trees: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum over clients: all that the server needs, so secure aggregation can form it."""
    return {name: torch.stack([tree[name] for tree in trees]).sum(0) for name in trees[0]}


def train(fot: bool) -> list[list[float]]:
    """The accuracy on every task so far, after each task."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))
    memory = SubspaceMemory.empty(find_layers(model).layers)
    tasks, accuracies = make_tasks(), []
    for t, (clients, _) in enumerate(tasks):
        for _ in range(ROUNDS):
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            summed = total([local_update(model, start, x, y) for x, y in clients])
            mean = {name: delta / len(clients) for name, delta in summed.items()}
            if fot:
                mean = memory.project(mean)  # FedProject: Delta (I - O Oᵀ)
            model.load_state_dict({name: start[name] + mean[name] for name in start})
        if fot:  # GPSE: each client sends a sketch of its layer inputs, under a key of its own
            sketches = [
                sketch(model, [x], memory.layers, memory.bases, size="d", key=t * CLIENTS + client)
                for client, (x, _) in enumerate(clients)
            ]
            memory, _ = memory.expand(total(sketches), threshold=0.95)
        with torch.no_grad():
            right = [(model(x).argmax(1) == y).float().mean() for _, (x, y) in tasks[: t + 1]]
        accuracies.append([100 * float(share) for share in right])
    return accuracies


def main() -> dict[str, list[list[float]]]:
    """Both ways, from the same weights."""
    results = {"FedAvg": train(fot=False), "FOT": train(fot=True)}
    for name, accuracies in results.items():
        print(f"{name:7} accuracy on task 1 after each task:", *(f"{row[0]:.1f}" for row in accuracies))
    return results


if __name__ == "__main__":
    main()
