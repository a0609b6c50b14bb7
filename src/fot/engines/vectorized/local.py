"""The local training of a cohort, all clients at once: the reference's loop on stacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from fot.engines.base import Training
from fot.engines.sequential import LOSS
from fot.engines.vectorized.aside import Aside
from fot.engines.vectorized.cohort import FoldedBatch, Step
from fot.engines.vectorized.folding import Fold
from fot.engines.vectorized.masks import cohort_dropout
from fot.engines.vectorized.pace import Pace, spread, total_change
from fot.engines.vectorized.pending import settled
from fot.engines.vectorized.stacked import Stacked
from fot.engines.vectorized.steps import LocalWeight
from fot.engines.vectorized.tail import LocalBias
from fot.methods.base import Method
from fot.network import Network, Tree


class FoldedNetwork(Network):
    """A network called with stacks of parameters and a folded batch."""

    def __init__(self, network: Network, clients: int, stacked: set[str]) -> None:
        self.__dict__.update(vars(network))  # the same module, not a copy
        self.clients = clients
        self.stacked = stacked
        self.local: dict[str, LocalWeight | LocalBias] = {}
        self.padded: tuple[Tensor, Tensor | None] | None = None
        """The batch's samples, and which of them count."""
        self._mode: bool | None = None
        self._tied = len(list(self.module.parameters())) < len(
            list(self.module.named_parameters(remove_duplicate=False))
        )

    def __call__(self, params: Tree, x: Tensor, task: int, *, training: bool = False) -> Tensor:
        """The logits of a folded batch."""
        folded = {
            name: Stacked.of(tensor, self.local.get(name)) if name in self.stacked else tensor
            for name, tensor in params.items()
        }
        valid = self.padded[1] if self.padded and x is self.padded[0] else None
        if self._mode is not training:  # once a round: walking the module costs more than a small layer
            self.module.train(training)
            self._mode = training
        inputs = (x, task) if self.multi_head else (x,)
        with (
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast),
            Fold(self.clients, valid),
        ):
            logits: Tensor = settled(functional_call(self.module, folded, inputs, tie_weights=self._tied))
        return logits.to(self.dtype)


@dataclass
class LocalTraining:
    """How a cohort trains: the network, the method and the settings, known for a whole run."""

    network: Network
    method: Method
    training: Training
    by_autograd: set[str] = field(default_factory=set)
    """Weights found to need their gradients: used twice, or not by a layer alone."""

    def run(
        self,
        models: Tree,
        shared: Tree,
        task: int,
        clients: int,
        steps: Iterator[Step],
        number: float,
        state: Tree,
        *,
        totals: bool,
    ) -> Tree:
        """Train from the models that the clients were sent: R runs' models, C/R clients of each.

        Parameters
        ----------
        models
            What the runs' servers sent, ``[R, *shape]`` each; left as it is.
        shared
            What of the model is the same in all runs and is not trained.
        steps, number
            The steps of the round, and how many there are, counted in the first one's samples.
        state
            The clients' own states, stacked.
        totals
            Whether the sums over each run's clients are wanted, or each client's own update.

        Returns
        -------
        Tree
            What clients send: the changes of trained parameters and running statistics, ``[C, *shape]``
            each, or their sums ``[R, *shape]`` in float64; and ``metric/loss`` ``[C]``, the mean loss on
            the way. The tensors are the caller's own.
        """
        trained, _, sent = self.names(task)
        pace = Pace(self.training.lr, number, Aside(self.network.device))
        network = FoldedNetwork(self.network, clients, set(models))
        tick = torch.zeros((), device=self.network.device, requires_grad=True)
        if self.method.plain:
            weights, biases = self.network.known("layers", _layers)
            free = [name for name in trained if name not in self.by_autograd]
            network.local = {
                **{n: LocalWeight(n, models[n], clients, pace, tick) for n in free if n in weights},
                **{n: LocalBias(n, models[n], clients, pace) for n in free if biases.get(n) in free},
            }
        leaves = [name for name in trained if name not in network.local]
        buffers = {name for name, _ in self.network.module.named_buffers()}
        params = {name: tensor.clone() if name in buffers else tensor for name, tensor in shared.items()}
        for name, model in models.items():
            if name in network.local:  # stands for the clients' weights, which the layer itself holds
                params[name] = model[0].expand(clients, *model.shape[1:])
            else:
                params[name] = spread(model, clients).clone()
        losses: list[Tensor] = []
        taken: list[Tensor | int] = []
        for step in steps:
            network.padded = (step.batch.x, step.valid)
            pace.keep = self._keep(step)
            for name in leaves:
                params[name].requires_grad_()
            with cohort_dropout(step.dropout):
                loss = self.method.loss(network, params, step.batch, state)
            wanted = [tick, *(params[n] for n in leaves)]
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
            gradients = {name: g for name, g in zip(leaves, found[1:], strict=True) if g is not None}
            self._step(params, self.method.precondition(network, gradients, state), step)
            losses.append(_own_losses(loss.detach(), step, self.method.plain))
            taken.append(1 if step.active is None else step.active)
        changes = {LOSS: (torch.stack(losses).sum(0) / sum(taken)).detach()}
        for name in sent:
            own, base = network.local.get(name), models.get(name)
            if base is None:  # a buffer that nobody moves
                rows = len(models[trained[0]]) if totals else clients
                changes[name] = shared[name].new_zeros(rows, *shared[name].shape)
            elif totals:
                changes[name] = own.total() if own else total_change(params[name].detach(), base)
            else:
                stack = own.stack() if own else params[name].detach()
                changes[name] = stack - spread(base, clients)
        return changes

    def names(self, task: int) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """What a task trains, what else it moves (running statistics), and what clients send."""
        trained = self.network.trained(task)
        return trained, self.network.known("moving", _moving), (*trained, *self.network.carried())

    def _step(self, params: Tree, directions: Tree, step: Step) -> None:
        """W <- W - lr (direction + decay·W) for what is left to autograd: few calls for many small stacks."""
        if not directions:
            return
        old = [params[name].detach() for name in directions]
        along = list(directions.values())
        if self.training.weight_decay:
            along = list(torch._foreach_add(along, old, alpha=self.training.weight_decay))
        new = list(torch._foreach_sub(old, along, alpha=self.training.lr))
        if step.active is not None:
            new = [torch.where(_along(step.active, o), n, o) for n, o in zip(new, old, strict=True)]
        params.update(zip(directions, new, strict=True))

    def _keep(self, step: Step) -> float | Tensor:
        decay = self.training.lr * self.training.weight_decay
        return 1 - decay * (1 if step.active is None or decay == 0 else step.active.to(self.network.dtype))


def _own_losses(total: Tensor, step: Step, plain: bool) -> Tensor:
    """Each client's loss: its own means, and an even share of what else the method's loss holds."""
    batch: FoldedBatch = step.batch
    first, *others = batch.means or [total.new_zeros(batch.clients)]
    own = sum(others, first)
    if plain:
        return own
    rest = (total - own.sum()).nan_to_num(0, 0, 0) / batch.clients
    return own + (rest if step.active is None else rest * step.active)


def _moving(module: nn.Module) -> tuple[str, ...]:
    """Running statistics, which each client moves on its own."""
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, _NormBase) and layer.track_running_stats
        for name, buffer in layer.named_buffers(recurse=False)
    )


def _layers(module: nn.Module) -> tuple[set[str], dict[str, str]]:
    """What a backward pass can step: weights of layers that are products, and the biases of linear ones."""
    weights: set[str] = set()
    biases: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            weight, bias = (f"{prefix}.{name}" if prefix else name for name in ("weight", "bias"))
            weights.add(weight)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                biases[bias] = weight
    return weights, biases


def _along(clients: Tensor, stack: Tensor) -> Tensor:
    return clients.reshape(-1, *[1] * (stack.dim() - 1))


def stacked_states(states: list[Tree]) -> Tree:
    """The clients' states with a client axis.

    Examples
    --------
    >>> stacked_states([{"a": torch.zeros(3)}, {"a": torch.ones(3)}])["a"].shape
    torch.Size([2, 3])
    """
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
