"""The engine that trains a whole cohort at once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fot.aggregation import Summation
from fot.benchmarks.stream import Task
from fot.engines.base import RoundKeys, RoundOutcome, Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized.cohort import Holdings, chunks, cohort_steps
from fot.engines.vectorized.graph import GraphedRound
from fot.engines.vectorized.local import LocalTraining, stacked_states
from fot.engines.vectorized.stacked import CannotBatch
from fot.engines.vectorized.steps import NeedsAutograd
from fot.methods.base import Method, Server
from fot.network import Network, Tree

CPU_BYTES = 128 << 20
"""Weights of the clients that train at once on a CPU: more brings no speed there."""
CPU_CONVOLVING_BYTES = 4 << 20
"""The same where the network convolves: a CPU does that client by client, and large maps fill its caches."""


class VectorizedEngine(SequentialEngine):
    """Clients train at once: one batched product where the reference makes one a client.

    A model or method that cannot be folded (see ``folding``) is trained by the sequential engine
    instead; ``fallback`` then says why. The end of a task and evaluation are the sequential engine's.

    Parameters
    ----------
    network, method, training
        As for ``SequentialEngine``.
    at_once
        The most clients to train at once; by default the whole cohort on a GPU, and on a CPU as many
        as its caches bear.
    """

    name = "vectorized"

    def __init__(
        self, network: Network, method: Method, training: Training, *, at_once: int | None = None
    ) -> None:
        super().__init__(network, method, training)
        self.at_once = at_once
        self.fallback: str | None = None
        """Why the last round was trained one client after another; None where it was not."""
        self._local = LocalTraining(network, method, training)
        self._held: Holdings | None = None
        self._graphs: dict[object, GraphedRound] = {}
        self._verdicts: dict[object, str | None] = {}

    def train(
        self,
        server: Server,
        task: Task,
        cohort: Sequence[int],
        keys: RoundKeys,
        clients: dict[int, Tree],
        summation: Summation,
        *,
        keep_local: bool = False,
    ) -> RoundOutcome:
        """Train the cohort from the server's model and sum the updates."""
        if self._held is None or self._held.task is not task:
            self._held = Holdings(task, self.device)
            self._graphs.clear()
            self._verdicts.clear()
        pieces = list(chunks(cohort, self._held.sizes, self._most(server.params)))
        self.fallback, states = self._verdict(server, task, pieces, keys, clients)
        if self.fallback is not None:
            warnings.warn(f"clients train one after another: {self.fallback}", stacklevel=2)
            return super().train(server, task, cohort, keys, clients, summation, keep_local=keep_local)
        excluded: list[int] = []
        local_params: dict[int, Tree] = {}
        for piece, state in zip(pieces, states, strict=True):
            after = self.local_cohort(server, task, piece, keys, state)
            own = {client: {n: t[row].clone() for n, t in after.items() if n != LOSS}
                   for row, client in enumerate(piece) if keep_local}  # fmt: skip
            update = {name: t.sub_(server.params[name]) if name != LOSS else t for name, t in after.items()}
            finite = [True] * len(piece) if summation.discreet else _finite(update)
            if not all(finite):
                kept = torch.tensor(finite, device=self.device)
                update = {name: stack[kept] for name, stack in update.items()}
            good = [client for client, ok in zip(piece, finite, strict=True) if ok]
            excluded += [client for client in piece if client not in good]
            if good:
                summation.add(good, update)
            local_params |= {client: {**server.params, **own[client]} for client in good if keep_local}
        sums = summation.close() if len(excluded) < len(cohort) else None
        return RoundOutcome(sums, tuple(c for c in cohort if c in excluded), local_params)

    def _verdict(
        self, server: Server, task: Task, pieces: list[list[int]], keys: RoundKeys, clients: dict[int, Tree]
    ) -> tuple[str | None, list[Tree]]:
        """Why this cohort cannot train at once, or None, and its states stacked.

        It follows from the round alone, not from earlier ones: a resumed run must come to the same.
        """
        own = [clients.get(client, {}) for piece in pieces for client in piece]
        kinds = {tuple((name, tuple(t.shape)) for name, t in sorted(state.items())) for state in own}
        if len(kinds) > 1:
            return "clients keep states of different kinds", []
        kind = kinds.pop()
        if kind not in self._verdicts:
            self._verdicts[kind] = None
            try:
                check_folding(self, server, task, pieces[0], keys, clients)
            except CannotBatch as reason:
                self._verdicts[kind] = str(reason)
        return self._verdicts[kind], [stacked_states([clients.get(c, {}) for c in piece]) for piece in pieces]

    def local_cohort(
        self,
        server: Server,
        task: Task,
        piece: Sequence[int],
        keys: RoundKeys,
        state: Tree,
        *,
        recorded: bool = True,
    ) -> Tree:
        """What the clients send, ``[C, *shape]`` each: their models after local training, their losses."""
        sizes = [len(task.clients[client]) for client in piece]
        bounds = min(sizes), max(sizes)
        if self.device.type == "cuda":  # one shape, so one graph, for every cohort
            sizes = [len(held) for held in task.clients if len(held)]
            bounds = min(sizes), max(sizes)
        inputs = {
            "clients": torch.tensor(piece, device=self.device),
            "keys": torch.tensor([keys.order, keys.dropout, keys.augment], device=self.device),
            **{f"params/{name}": tensor for name, tensor in server.params.items()},
            **{f"state/{name}": tensor for name, tensor in state.items()},
        }

        def round_of(given: Tree) -> Tree:
            return self._round(given, task, *bounds)

        if self.device.type != "cuda" or not recorded:
            return round_of(inputs)
        shape = tuple((name, tensor.shape) for name, tensor in inputs.items())
        if shape not in self._graphs:
            self._graphs[shape] = GraphedRound(round_of, inputs)
        return self._graphs[shape](inputs)

    def _round(self, inputs: Tree, task: Task, shortest: int, longest: int) -> Tree:
        """A round as a function of tensors alone, so that a GPU can record it."""
        training = self.training
        assert self._held is not None
        count = len(inputs["clients"])
        while True:
            steps = cohort_steps(
                task, self._data(task), self._held, inputs["clients"], inputs["keys"],
                shortest=shortest, longest=longest, epochs=training.epochs, batch_size=training.batch_size,
                dtype=self.network.dtype,
            )  # fmt: skip
            number = -(-longest // training.batch_size) * training.epochs
            try:
                return self._local.run(
                    _under("params/", inputs), task.index, count, steps, number, _under("state/", inputs)
                )
            except NeedsAutograd as weight:
                self._local.by_autograd.add(weight.name)

    def _most(self, params: Tree) -> int:
        """How many clients train at once. A rule, not a measurement: a resumed run must choose alike."""
        if self.at_once is not None:
            return self.at_once
        if self.device.type == "cuda":
            return 1 << 30
        convolves = any(
            isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in self.network.module.modules()
        )
        size = sum(t.numel() * t.element_size() for t in params.values())
        return max(1, (CPU_CONVOLVING_BYTES if convolves else CPU_BYTES) // size)


def check_folding(
    engine: VectorizedEngine,
    server: Server,
    task: Task,
    cohort: Sequence[int],
    keys: RoundKeys,
    clients: dict[int, Tree],
    tolerance: float = 1e-10,
) -> None:
    """Train a tiny cohort folded and client by client, in float64, and compare.

    Some operations mix samples without meeting a parameter (a mean over the batch, say), and no rule
    sees them; a method may do so too. This does: three clients, with four, six and two of their samples.

    Raises
    ------
    CannotBatch
        Where the two differ by more than ``tolerance``, or something has no rule.
    """
    few = list(cohort)[:3]
    # Even numbers: a batch-norm must not be left with a last batch of one sample, which it refuses.
    number = {c: min(n, len(task.clients[c]) // 2 * 2 or 1) for c, n in zip(few, (6, 4, 2), strict=False)}
    cut = {client: task.clients[client][:n] for client, n in number.items()}
    rows = torch.cat(list(cut.values()))
    begin, held = 0, {}
    for client, own in cut.items():
        held[client] = torch.arange(begin, begin + len(own))
        begin += len(own)
    small = replace(
        task,
        train_x=task.train_x[rows.to(task.train_x.device)],
        train_y=task.train_y[rows.to(task.train_y.device)],
        clients=tuple(held.get(client, rows[:0]) for client in range(max(few) + 1)),
    )
    network = Network(engine.network.module, device=engine.device, dtype=torch.float64)
    training = replace(engine.training, batch_size=4, epochs=min(2, engine.training.epochs))
    exact = Server(_double(server.params), _double(server.state))
    own_states = {client: _double(clients[client]) for client in few if client in clients}
    one_by_one = SequentialEngine(network, engine.method, training)
    at_once = VectorizedEngine(network, engine.method, training)
    at_once._local.by_autograd = engine._local.by_autograd
    at_once._held = Holdings(small, engine.device)
    state = stacked_states([own_states.get(client, {}) for client in few])
    try:
        folded = at_once.local_cohort(exact, small, few, keys, state, recorded=False)
        alone = [one_by_one.local_training(exact, small, c, keys, own_states.get(c, {})) for c in few]
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise CannotBatch(f"the folded cohort fails ({str(error).splitlines()[0]})") from error
    for row, (params, loss) in enumerate(alone):
        wanted = params | ({LOSS: loss} if engine._local.plain else {})  # else a share of the loss is spread
        for name in (name for name in folded if name in wanted):
            if not torch.allclose(
                folded[name][row], wanted[name], rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                raise CannotBatch(f"trained at once, clients differ from clients trained alone (in {name})")


def _finite(update: Tree) -> list[bool]:
    """Which clients sent finite numbers only. A sum shows it at once; where it does not, look closer."""
    clients = len(update[LOSS])
    if bool(torch.stack([stack.sum() for stack in update.values()]).isfinite().all()):
        return [True] * clients
    return [all(bool(stack[row].isfinite().all()) for stack in update.values()) for row in range(clients)]


def _double(tree: Tree) -> Tree:
    return {name: t.double() if t.is_floating_point() else t for name, t in tree.items()}


def _under(prefix: str, tree: dict[str, Tensor]) -> Tree:
    return {name.removeprefix(prefix): tensor for name, tensor in tree.items() if name.startswith(prefix)}
