"""Federated Orthogonal Training in one file: the algorithm, all of it, and nothing else.

Bakman, Yaldiz, Ezzeldin, Avestimehr, "Federated Orthogonal Training", ICLR 2024; numbers in
parentheses are the paper's equations. Needs only torch. Run it: ``python reference/fot_minimal.py``.

Tasks come one after another, and the data of an old task are gone. A layer computes H = W X (2), so
an update ΔW leaves the old outputs alone when ΔW X = 0 for the old inputs X (3, 4). FOT keeps, for
each layer, an orthonormal basis O (d x k) of where the old inputs mostly lie, and the server removes
from every averaged update what acts on span(O). Clients train as in FedAvg. At the end of a task they
send one random sketch of their layer inputs, and from the sum of these the server extends O.

The symbols: W weights by name, δ an update (the paper's sign is the gradient's; here δ = W_local - W,
so that it is added), O bases by layer, X the inputs of a layer (d x N, one column a sample or a patch),
X* what of X is outside span(O), G Gaussian (N x s), A = X* G the sketch (d x s), th the threshold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, unfold

Weights = dict[str, Tensor]  # every parameter, by name
Bases = dict[str, Tensor]  # O of every protected layer, by the layer's name: float64, d x k


class Task(NamedTuple):
    """One task of the stream; ``clients[i]`` are the rows of ``train_x`` that client i holds."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    clients: Sequence[Tensor]


@dataclass(frozen=True)
class Settings:
    """What a run may choose. The defaults are the paper's local training."""

    rounds: int = 20  # of each task
    cohort: int = 5  # clients in a round
    epochs: int = 1
    batch: int = 16
    lr: float = 0.01
    weight_decay: float = 1e-5
    threshold: float = 0.95  # th of the first task, a share of the energy of X
    increment: float = 0.0  # th of task t is threshold + (t - 1) increment, t = 1, 2, ...
    sampling: int = 1  # s = sampling · d
    rule: str = "energy"  # how (12) is read: "energy" or "authors"
    sketch_batch: int = 256  # samples a client passes through the network at once in GPSE


class Draws:
    """Every random choice of a run. Tasks, rounds and batches count from 0.

    Training and sketching draw from two generators, so that FedAvg and FOT with the same seed train the
    same cohorts on the same batches. Override the methods to draw from elsewhere.
    """

    def __init__(self, seed: int = 0) -> None:
        self.training = torch.Generator().manual_seed(2 * seed)
        self.sketching = torch.Generator().manual_seed(2 * seed + 1)

    def cohort(self, task: int, round: int, clients: Sequence[int], size: int) -> list[int]:
        """``size`` of ``clients`` (those that hold data of the task), or all if they are fewer."""
        order = torch.randperm(len(clients), generator=self.training)
        return [clients[j] for j in order[:size].tolist()]

    def order(self, task: int, round: int, client: int, epoch: int, n: int) -> Tensor:
        """The order in which the client passes through its n samples."""
        return torch.randperm(n, generator=self.training)

    def gaussian(self, task: int, client: int, layer: str, batch: int, n: int, s: int) -> Tensor:
        """G, n x s, for the n columns of X that the client's batch gives the layer."""
        return torch.randn(n, s, generator=self.sketching, dtype=torch.float64)


def protected(model: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The layers FOT protects: every Linear and Conv2d outside ``model.heads``. Biases stay free."""
    body = ((name, layer) for name, layer in model.named_modules() if not name.startswith("heads."))
    return {name: layer for name, layer in body if isinstance(layer, nn.Linear | nn.Conv2d)}


def columns(layer: nn.Module, x: Tensor) -> Tensor:
    """X (d x N): what multiplies the flattened weight, a column a sample or, in a convolution, a patch."""
    if isinstance(layer, nn.Conv2d):
        assert layer.groups == 1 and not isinstance(layer.padding, str), "plain convolutions only"
        x = unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # B x d x patches
        x = x.transpose(1, 2)
    return x.reshape(-1, x.shape[-1]).T


def predict(model: nn.Module, W: Weights, x: Tensor, t: int) -> Tensor:
    """The logits of task t under the weights W; a model with ``heads`` is told which to use."""
    output: Tensor = functional_call(model, W, (x, t) if hasattr(model, "heads") else (x,))
    return output


@torch.no_grad()
def layer_inputs(model: nn.Module, W: Weights, x: Tensor, t: int) -> list[tuple[str, Tensor]]:
    """(layer, X) of every protected layer for the samples x, in the order of the forward pass."""
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, x, name=name: seen.append((name, columns(m, x[0]))))
        for name, layer in protected(model).items()
    ]
    predict(model, W, x, t)
    for hook in hooks:
        hook.remove()
    return seen


def local_update(
    model: nn.Module, W: Weights, x: Tensor, y: Tensor, t: int, orders: Sequence[Tensor], o: Settings
) -> Weights:
    """A client's δ_i: SGD from the global W over its samples, once through for each of ``orders``."""
    w = {name: value.clone().requires_grad_() for name, value in W.items()}
    for rows in (rows for order in orders for rows in torch.split(order, o.batch)):
        loss = cross_entropy(predict(model, w, x[rows], t), y[rows])
        gradients = torch.autograd.grad(loss, list(w.values()), allow_unused=True)
        with torch.no_grad():
            for value, g in zip(w.values(), gradients, strict=True):
                if g is not None:  # other tasks' heads have none, and do not decay either
                    value -= o.lr * (g + o.weight_decay * value)
    return {name: w[name].detach() - W[name] for name in W}


def project(δ: Tensor, O: Tensor) -> Tensor:
    """δ (I - O Oᵀ) (6): from the right, since the rows of δ are what meets the inputs."""
    rows = δ.flatten(1).to(O)
    return (rows - (rows @ O) @ O.T).reshape(δ.shape).to(δ)


def fed_project(W: Weights, δ_sum: Weights, cohort: int, O: Bases, μ: float = 1.0) -> Weights:
    """The server's round (5-7). With bases that are still empty this is FedAvg."""
    δ = {name: value / cohort for name, value in δ_sum.items()}  # (5)
    for layer, basis in O.items():
        δ[f"{layer}.weight"] = project(δ[f"{layer}.weight"], basis)  # (6)
    return {name: W[name] + μ * δ[name] for name in W}  # (7)


class Sketch(NamedTuple):
    """What a client tells of one layer. Sketches add up entry by entry; the server sees the sum alone."""

    A: Tensor  # X* G
    e_star: Tensor  # ‖X*‖²
    e: Tensor  # ‖X‖²
    n_w: Tensor  # n_i ‖X*_i‖ / ‖X_i‖
    n: Tensor  # n_i, the client's samples


def sketch(
    model: nn.Module, W: Weights, x: Tensor, t: int, client: int, O: Bases, o: Settings, draws: Draws
) -> dict[str, Sketch]:
    """The client's side of GPSE: one pass over its data, in memory d x s a layer, never d x N."""
    A = {name: torch.zeros(basis.shape[0], o.sampling * basis.shape[0]).to(x) for name, basis in O.items()}
    e_star, e = ({name: torch.zeros(()).to(x) for name in O} for _ in range(2))
    for b, samples in enumerate(torch.split(x, o.sketch_batch)):
        for name, X in layer_inputs(model, W, samples, t):
            basis = O[name].to(X)
            X_star = X - basis @ (basis.T @ X)  # (8)
            G = draws.gaussian(t, client, name, b, X.shape[1], A[name].shape[1]).to(X)
            A[name] += X_star @ G  # (9)
            e_star[name] += X_star.square().sum()
            e[name] += X.square().sum()
    n = torch.tensor(len(x)).to(x)
    n_w = {name: n * ratio(e_star[name], e[name]).sqrt() for name in O}
    return {name: Sketch(A[name], e_star[name], e[name], n_w[name], n) for name in O}


def add(p: dict[str, Sketch], q: dict[str, Sketch]) -> dict[str, Sketch]:
    """The sum of two clients' sketches (10), the only way in which sketches meet."""
    return {name: Sketch(*(a + b for a, b in zip(p[name], q[name], strict=True))) for name in p}


def ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 0 where there is nothing: a layer without input has nothing left to cover."""
    return part / whole.clamp_min(torch.finfo(whole.dtype).tiny)


def rank(σ2: Tensor, total: Sketch, th: float, rule: str) -> int:
    """The smallest r whose directions bring the covered share of the inputs up to th (12).

    As printed, (12) adds ‖X*‖/‖X‖, which is the share *not* covered, so it cannot be taken literally.
    ``energy`` counts squared norms throughout: (1 - ρ) + ρ · share_r >= th with ρ = Σ‖X*_i‖² / Σ‖X_i‖².
    ``authors`` weighs with the clients' mean of unsquared ratios, asks for > th, and always adds a vector.
    """
    share = torch.cat([σ2.new_zeros(1), ratio(σ2.cumsum(0), σ2.sum())])  # of A's energy, r = 0, ..., d
    if rule == "energy":
        ρ = ratio(total.e_star, total.e).to(σ2)
        return int(((1 - ρ) + ρ * share < th).sum())
    if rule == "authors":
        w = (total.n_w / total.n).to(σ2)
        return max(1, int(((1 - w) + w * share <= th).sum()))
    raise ValueError(f"no rank rule is called {rule!r}: choose energy or authors")


def expand(O: Tensor, total: Sketch, th: float, rule: str) -> Tensor:
    """The server's side of GPSE for one layer: O extended by the principal directions of A."""
    A = total.A.double()
    σ2, U = torch.linalg.eigh(A @ A.T)  # A = U Σ Vᵀ, and only U and Σ² are needed; s >= d
    σ2, U = σ2.flip(0).clamp_min(0), U.flip(1)  # largest first
    r = min(rank(σ2, total, th, rule), O.shape[0] - O.shape[1])
    Q, R = torch.linalg.qr(torch.cat([O, U[:, :r]], dim=1))  # GramSchmidt, stably
    return torch.where(R.diagonal() < 0, -Q, Q)  # R's diagonal positive: the columns of O stay as they were


class Result(NamedTuple):
    """The end of a run: ``accuracy[i][t]`` is a_{i,t} in percent, for t >= i (row i starts at t = i)."""

    W: Weights
    O: Bases
    accuracy: list[list[float]]

    @property
    def acc(self) -> float:
        """ACC (13): the mean over tasks of the final accuracy."""
        return sum(row[-1] for row in self.accuracy) / len(self.accuracy)

    @property
    def fgt(self) -> float:
        """FGT (13): the mean over all tasks but the last of what was lost since they were learnt."""
        old = self.accuracy[:-1]
        return sum(row[0] - row[-1] for row in old) / len(old)


@torch.no_grad()
def evaluate(model: nn.Module, W: Weights, task: Task, t: int) -> float:
    """Test accuracy of the global model on task t, in percent."""
    hits = predict(model, W, task.test_x, t).argmax(1) == task.test_y
    return 100 * hits.double().mean().item()


def run(
    model: nn.Module, tasks: Sequence[Task], o: Settings, method: str = "fot", draws: Draws | None = None
) -> Result:
    """Train on the tasks in turn, by ``fot`` or ``fedavg``. The weights of ``model`` are where it starts."""
    draws = draws or Draws()
    W = {name: value.detach().clone() for name, value in model.named_parameters()}
    dimension = {name: layer.weight[0].numel() for name, layer in protected(model).items()}
    O = {name: torch.zeros(d, 0, dtype=torch.float64) for name, d in dimension.items()}
    accuracy: list[list[float]] = [[] for _ in tasks]
    for t, task in enumerate(tasks):
        holders = [i for i, rows in enumerate(task.clients) if len(rows)]
        model.train()
        for r in range(o.rounds):
            cohort = draws.cohort(t, r, holders, o.cohort)
            δ_sum = {name: torch.zeros_like(value) for name, value in W.items()}
            for i in cohort:
                x, y = task.train_x[task.clients[i]], task.train_y[task.clients[i]]
                orders = [draws.order(t, r, i, epoch, len(x)) for epoch in range(o.epochs)]
                δ = local_update(model, W, x, y, t, orders, o)
                δ_sum = {name: δ_sum[name] + δ[name] for name in W}
            W = fed_project(W, δ_sum, len(cohort), O)
        model.eval()
        if method == "fot" and t + 1 < len(tasks):  # nothing follows the last task
            parts = (sketch(model, W, task.train_x[task.clients[i]], t, i, O, o, draws) for i in holders)
            total = reduce(add, parts)
            O = {name: expand(O[name], total[name], o.threshold + t * o.increment, o.rule) for name in O}
        for i in range(t + 1):
            accuracy[i].append(evaluate(model, W, tasks[i], i))
    return Result(W, O, accuracy)


def toy_tasks(tasks: int = 2, clients: int = 10, seed: int = 0) -> list[Task]:
    """Ten Gaussian classes near a 12-dimensional subspace of R^32; later tasks shuffle the coordinates."""
    g = torch.Generator().manual_seed(seed)
    centres, lift = torch.randn(10, 12, generator=g), torch.randn(12, 32, generator=g) / 12**0.5
    stream = []
    for t in range(tasks):
        y = torch.randint(10, (3000,), generator=g)
        x = (centres[y] + 0.6 * torch.randn(3000, 12, generator=g)) @ lift
        x = x + 0.05 * torch.randn(x.shape, generator=g)
        x = x[:, torch.randperm(32, generator=g)] if t else x
        stream.append(Task(x[:2000], y[:2000], x[2000:], y[2000:], torch.arange(2000).chunk(clients)))
    return stream


if __name__ == "__main__":
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 50), nn.ReLU(), nn.Linear(50, 10))
    for method in ("fedavg", "fot"):
        result = run(network, toy_tasks(), Settings(lr=0.1, rounds=40), method)
        ranks = ", ".join(f"{O.shape[1]} of {O.shape[0]}" for O in result.O.values())
        print(f"{method:7} ACC {result.acc:5.1f}  FGT {result.fgt:5.1f}  directions held: {ranks}")
