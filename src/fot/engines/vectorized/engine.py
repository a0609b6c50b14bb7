"""The engine that trains a whole cohort at once."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from fot.engines.base import Extraction, Round, RoundOutcome, Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized.cohort import Holdings, chunks, cohort_steps
from fot.engines.vectorized.extraction import add_pooled
from fot.engines.vectorized.graph import GraphedRound
from fot.engines.vectorized.local import LocalTraining, stacked_states
from fot.engines.vectorized.pace import NeedsAutograd
from fot.engines.vectorized.stacked import CannotBatch
from fot.engines.vectorized.trial import check_folding
from fot.errors import UserError
from fot.layers.find import is_head
from fot.methods.base import Method
from fot.network import Network, Tree

Piece = tuple[list[int], ...]
"""The clients that train at once: a list for each run, all of one length."""

FINITE = "finite"
"""Among the totals of a round: whether those of each run are finite, ``[R]``."""
CPU_BYTES = 128 << 20
"""Weights of the clients that train at once on a CPU: more brings no speed there."""
CPU_CONVOLVING_BYTES = 4 << 20
"""The same where the network convolves: a CPU does that client by client, and large maps fill its caches."""


class VectorizedEngine(SequentialEngine):
    """Clients train at once: one batched product where the reference makes one a client.

    A model or method that cannot be folded (see ``folding``) is trained by the sequential engine
    instead; ``fallback`` then says why. At the end of a task clients are asked together where their sum is
    formed in the open and the method pools them. Evaluation is the sequential engine's.

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
        self.defers = self.device.type == "cuda"
        """Whether sums may be left provisional: a GPU works while the host goes on."""
        self._last: torch.cuda.Event | None = None
        self.fallback: str | None = None
        """Why the last round was trained one client after another; None where it was not."""
        self._local = LocalTraining(network, method, training)
        self._held: Holdings | None = None
        self._alike: list[str] = []
        self._graphs: dict[object, GraphedRound] = {}
        self._verdicts: dict[object, str | None] = {}

    def train(self, round: Round) -> RoundOutcome:
        """Train the cohort from the server's model and sum the updates."""
        self.fallback = self._verdict([round])
        if self.fallback is None:
            return self._train([round])[0]
        warnings.warn(f"clients train one after another: {self.fallback}", stacklevel=2)
        return super().train(round)

    def train_together(self, rounds: Sequence[Round]) -> list[RoundOutcome] | None:
        """Train the cohorts of several runs at once; None where each run must train by itself.

        The runs' networks, training and local methods must be this engine's; models and data may differ.
        """
        if (
            len(rounds) > self._most(rounds[0].server.params)
            or len({(len(round.cohort), round.task.index) for round in rounds}) > 1
            or self._verdict(rounds) is not None
        ):
            return None
        return self._train(rounds)

    def _train(self, rounds: Sequence[Round]) -> list[RoundOutcome]:
        excluded: list[list[int]] = [[] for _ in rounds]
        local_params: list[dict[int, Tree]] = [{} for _ in rounds]
        unknown: list[Tensor] = []
        pieces = deque(self._pieces(rounds))
        while pieces:
            piece = pieces.popleft()
            try:
                sums = self._totals(rounds, piece, unknown)
                changes = {} if sums else self.local_cohort(rounds, piece, totals=False)
            except torch.OutOfMemoryError:
                sums = changes = None
            if changes is None:  # nothing of the piece is added yet
                pieces.extendleft(reversed(self._in_halves(piece)))
            elif sums:
                if pieces and self._graphs:  # a recording writes the next piece's to the same place
                    sums = {name: total.clone() for name, total in sums.items()}
                self._add_totals(rounds, piece, sums)
            else:
                self._add_each(rounds, piece, changes, excluded, local_params)
        answers: Sequence[Tensor | None] = [None] * len(rounds)
        if unknown:
            answers = torch.stack(unknown).all(0).unbind()
            self._keep_pace()
        return [
            RoundOutcome(
                round.summation.close() if len(out) < len(round.cohort) else None,
                tuple(client for client in round.cohort if client in out),
                own_params,
                answers[r],
            )
            for r, (round, out, own_params) in enumerate(zip(rounds, excluded, local_params, strict=True))
        ]

    def _keep_pace(self) -> None:
        """Wait until the device is done with the round before this one: the host runs one round ahead."""
        if self.device.type == "cuda":
            last, self._last = self._last, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last.record()
            if last is not None:
                last.synchronize()

    def _totals(self, rounds: Sequence[Round], piece: Piece, unknown: list[Tensor]) -> Tree | None:
        """The sums over a piece's clients, where nobody wants their own arrays; else None.

        None, too, where a sum is not finite: then each client is looked at. Where that may come to light
        later, ``[R]``, whether each run's sums are finite, is appended to ``unknown``.
        """
        if any(round.keep_local or round.summation.add_total is None for round in rounds):
            return None
        found = self.local_cohort(rounds, piece, totals=True)
        if self.defers and all(round.provisional for round in rounds):
            unknown.append(found[FINITE].clone())  # the next round overwrites it
        elif not bool(found[FINITE].all()):
            return None
        return {name: total for name, total in found.items() if name != FINITE}

    def _add_totals(self, rounds: Sequence[Round], piece: Piece, changes: Tree) -> None:
        params, losses = rounds[0].server.params, changes[LOSS]
        dtypes = {name: losses.dtype if name == LOSS else params[name].dtype for name in changes}
        sums = changes | {LOSS: losses.view(len(rounds), -1).sum(1, dtype=torch.float64)}
        for r, (round, part) in enumerate(zip(rounds, piece, strict=True)):
            add_total = round.summation.add_total
            assert add_total is not None
            add_total(part, {name: total[r] for name, total in sums.items()}, dtypes)

    def _add_each(
        self,
        rounds: Sequence[Round],
        piece: Piece,
        changes: Tree,
        excluded: list[list[int]],
        local_params: list[dict[int, Tree]],
    ) -> None:
        """Add the updates of a piece's clients one by one; who is left out is appended to ``excluded``."""
        for r, (round, part) in enumerate(zip(rounds, piece, strict=True)):
            own = {name: stack.chunk(len(rounds))[r] for name, stack in changes.items()}
            finite = [True] * len(part) if round.summation.discreet else _finite(own)
            if not all(finite):
                kept = torch.tensor(finite, device=self.device)
                own = {name: stack[kept] for name, stack in own.items()}
            good = [client for client, ok in zip(part, finite, strict=True) if ok]
            excluded[r] += [client for client in part if client not in good]
            if good:
                round.summation.add(good, own)
            if round.keep_local:
                params = round.server.params
                local_params[r] |= {
                    client: {**params, **{n: params[n] + t[row] for n, t in own.items() if n != LOSS}}
                    for row, client in enumerate(good)
                }

    def _in_halves(self, piece: Piece) -> list[Piece]:
        """A piece that does not fit into a GPU's memory as two; no later one is larger than these."""
        runs, clients = len(piece), len(piece[0])
        if clients == 1:
            fewer = f"of {runs} runs do not fit: --together {runs // 2}" if runs > 1 else "does not fit"
            raise UserError(
                f"one client's training {fewer} into the GPU's memory; or lower training.batch_size"
            )
        half = -(-clients // 2)
        self.at_once = runs * half
        self._graphs.clear()
        torch.cuda.empty_cache()
        warnings.warn(
            f"{runs * clients} clients at once do not fit into the GPU's memory: from here on "
            f"{self.at_once} train at once", stacklevel=2,
        )  # fmt: skip
        return [tuple(part[:half] for part in piece), tuple(part[half:] for part in piece)]

    def _pieces(self, rounds: Sequence[Round]) -> Iterator[Piece]:
        """The clients that train at once: as many of each run, those of like numbers of samples together."""
        most = max(1, self._most(rounds[0].server.params) // len(rounds))
        held = self._holdings(rounds)
        return zip(
            *(chunks(round.cohort, held.sizes[r], most) for r, round in enumerate(rounds)), strict=True
        )

    def _holdings(self, rounds: Sequence[Round]) -> Holdings:
        """The data of these rounds' tasks, and with them what is known of training on them."""
        tasks = [round.task for round in rounds]
        if self._held is None or not self._held.of(tasks):
            data = [self._data(tasks[0])] if len(tasks) == 1 else [*map(self._placed, tasks)]
            held, alike = Holdings(tasks, data), self._same_in_all(rounds)
            # What was recorded for one task serves the next, where the same is trained on as many samples,
            # and by a loss that does not look at the task.
            same = self._graphs and self.method.plain and alike == self._alike and not self.network.multi_head
            if not (same and self._held is not None and self._held.take(held)):
                self._held, self._alike = held, alike
                self._graphs.clear()
                self._verdicts.clear()
        return self._held

    def extract(self, extraction: Extraction) -> RoundOutcome:
        """Let clients take part at the end of a task: together where that is possible, the others alone."""
        participants, places, summation = extraction.participants, extraction.places, extraction.summation
        alone, outcome = list(range(len(participants))), RoundOutcome(None)
        if summation.add_total is not None and not extraction.local_params and self.method.pools:
            data = self._data(extraction.task)
            alone = add_pooled(self.network, self.method, extraction, data, summation.add_total)
        if alone:
            those, there = [participants[i] for i in alone], [places[i] for i in alone]
            outcome = super().extract(replace(extraction, participants=those, positions=there))
        if outcome.sums is None and len(alone) < len(participants):
            outcome = replace(outcome, sums=summation.close())
        return outcome

    def _verdict(self, rounds: Sequence[Round]) -> str | None:
        """Why these cohorts cannot train at once, or None.

        It follows from the round alone, not from earlier ones: a resumed run must come to the same.
        """
        self._holdings(rounds)  # another task's forget what was found for the last
        kinds = {
            tuple((name, tuple(t.shape)) for name, t in sorted(round.clients.get(client, {}).items()))
            for round in rounds
            for client in (round.cohort if round.clients else round.cohort[:1])
        }
        if len(kinds) > 1:
            return "clients keep states of different kinds"
        kind = kinds.pop()
        if kind not in self._verdicts:
            self._verdicts[kind] = None
            try:
                check_folding(self, rounds, next(self._pieces(rounds)))
            except CannotBatch as reason:
                self._verdicts[kind] = str(reason)
        return self._verdicts[kind]

    def local_cohort(
        self, rounds: Sequence[Round], piece: Piece, *, totals: bool, recorded: bool = True
    ) -> Tree:
        """What the clients of a piece send: see ``LocalTraining.run``."""
        held = self._holdings(rounds)
        sizes = [held.sizes[r][client] for r, part in enumerate(piece) for client in part]
        # On a GPU one shape, so one graph, for every cohort.
        bounds = held.bounds() if self.device.type == "cuda" else (min(sizes), max(sizes))
        state = stacked_states(
            [round.clients.get(c, {}) for round, part in zip(rounds, piece, strict=True) for c in part]
        )
        models = {
            name: torch.stack([round.server.params[name] for round in rounds])
            if len(rounds) > 1
            else tensor.unsqueeze(0)
            for name, tensor in rounds[0].server.params.items()
            if name not in self._alike
        }
        keys = [(round.keys.order, round.keys.dropout, round.keys.augment) for round in rounds]
        drawn = torch.tensor([(*part, *own) for part, own in zip(piece, keys, strict=True)])
        if self.device.type == "cuda":  # from pinned memory: any other copy waits for all that went before
            drawn = drawn.pin_memory().to(self.device, non_blocking=True)
        inputs = {
            "clients": drawn[:, :-3],
            "keys": drawn[:, -3:],
            **{f"models/{name}": stack for name, stack in models.items()},
            **{f"shared/{name}": rounds[0].server.params[name] for name in self._alike},
            **{f"state/{name}": tensor for name, tensor in state.items()},
        }

        def round_of(given: Tree) -> Tree:
            with self.network.products():
                return self._round(given, *bounds, totals=totals)

        if self.device.type != "cuda" or not recorded:
            return round_of(inputs)
        shape = (totals, *((name, tensor.shape) for name, tensor in inputs.items()))
        if shape not in self._graphs:
            self._graphs[shape] = GraphedRound(round_of, inputs, self._graphs.values())
        return self._graphs[shape](inputs)

    def _round(self, inputs: Tree, shortest: int, longest: int, *, totals: bool) -> Tree:
        """A round as a function of tensors alone, so that a GPU can record it."""
        training, held = self.training, self._held
        assert held is not None
        while True:
            steps = cohort_steps(
                held, inputs["clients"], inputs["keys"], shortest=shortest, longest=longest,
                epochs=training.epochs, batch_size=training.batch_size, dtype=self.network.dtype,
                plain=self.method.plain,
            )  # fmt: skip
            number = training.epochs * longest / min(longest, training.batch_size)
            try:
                changes = self._local.run(
                    _under("models/", inputs), _under("shared/", inputs), held.tasks[0].index,
                    inputs["clients"].numel(), steps, number, _under("state/", inputs), totals=totals,
                )  # fmt: skip
                if totals:
                    runs = len(inputs["keys"])
                    tables = [total.double().reshape(runs, -1) for total in changes.values()]
                    if self.device.type == "cuda":  # which adds up one large table sooner than many
                        tables = [torch.cat(tables, 1)]
                    changes[FINITE] = torch.stack([table.sum(1) for table in tables]).isfinite().all(0)
                return changes
            except NeedsAutograd as weight:
                self._local.by_autograd.add(weight.name)

    def _same_in_all(self, rounds: Sequence[Round]) -> list[str]:
        """What of the model is not trained on this task and is the same in all runs."""
        trained, moving, _ = self._local.names(rounds[0].task.index)
        first, *others = (round.server.params for round in rounds)
        return [
            name
            for name, tensor in first.items()
            if name not in {*trained, *moving}
            # Heads of other tasks may differ: nothing reads them.
            and (is_head(self.network.module, name) or all(torch.equal(tensor, o[name]) for o in others))
        ]

    def _most(self, params: Tree) -> int:
        """How many clients train at once. A rule, not a measurement: a resumed run must choose alike."""
        if self.at_once is not None:
            return self.at_once
        if self.device.type == "cuda":
            return 1 << 30
        convolves = self.network.known("convolves", _convolves)
        size = sum(t.numel() * t.element_size() for t in params.values())
        return max(1, (CPU_CONVOLVING_BYTES if convolves else CPU_BYTES) // size)


def _convolves(module: nn.Module) -> bool:
    return any(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in module.modules())


def _finite(update: Tree) -> list[bool]:
    """Which clients sent finite numbers only. A sum shows it at once; where it does not, look closer."""
    clients = len(update[LOSS])
    if bool(torch.stack([stack.sum() for stack in update.values()]).isfinite().all()):
        return [True] * clients
    return [all(bool(stack[row].isfinite().all()) for stack in update.values()) for row in range(clients)]


def _under(prefix: str, tree: dict[str, Tensor]) -> Tree:
    return {name.removeprefix(prefix): tensor for name, tensor in tree.items() if name.startswith(prefix)}
