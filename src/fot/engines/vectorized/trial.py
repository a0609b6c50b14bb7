"""A trial before a cohort is trained at once: does it come to what its clients come to one by one?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fot.engines.base import Round
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized.stacked import CannotBatch
from fot.methods.base import Server
from fot.network import Network, Tree

if TYPE_CHECKING:
    from fot.engines.vectorized.engine import Piece, VectorizedEngine


def check_folding(
    engine: VectorizedEngine, rounds: Sequence[Round], piece: Piece, tolerance: float = 1e-10
) -> None:
    """Train a tiny cohort folded and client by client, in float64, and compare.

    Some operations mix samples without meeting a parameter (a mean over the batch, say), and no rule
    sees them; a method may do so too. This does: a few clients, with six, four and two of their samples.

    Raises
    ------
    CannotBatch
        Where the two differ by more than ``tolerance``, or something has no rule.
    """
    few = [
        _tiny(round, part[: 3 if len(rounds) == 1 else 2])
        for round, part in zip(rounds[:2], piece[:2], strict=True)
    ]
    network = Network(engine.network.module, device=engine.device, dtype=torch.float64)
    training = replace(engine.training, batch_size=4, epochs=min(2, engine.training.epochs))
    one_by_one = SequentialEngine(network, engine.method, training)
    at_once = type(engine)(network, engine.method, training)
    at_once._local.by_autograd = engine._local.by_autograd
    own = tuple(list(round.cohort) for round in few)
    try:
        folded = at_once.local_cohort(few, own, totals=False, recorded=False)
        totals = at_once.local_cohort(few, own, totals=True, recorded=False)
        alone = [(one_by_one.local_training(r, c), r) for r in few for c in r.cohort]
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise CannotBatch(f"the folded cohort fails ({str(error).splitlines()[0]})") from error
    if not engine.method.plain:  # of another loss only a share is told
        del folded[LOSS]
    for name, stack in folded.items():
        wanted = torch.stack(
            [loss if name == LOSS else params[name] - r.server.params[name] for (params, loss), r in alone]
        )
        sums = wanted if name == LOSS else wanted.view(len(few), -1, *wanted.shape[1:]).sum(1)
        for got, right in ((stack, wanted), (totals[name], sums)):
            if not torch.allclose(got, right.to(got), rtol=tolerance, atol=tolerance, equal_nan=True):
                raise CannotBatch(f"trained at once, clients differ from clients trained alone (in {name})")


def _tiny(round: Round, few: Sequence[int]) -> Round:
    """A round of a few clients with a few samples each, in float64."""
    task = round.task
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
    return replace(
        round,
        server=Server(_double(round.server.params), _double(round.server.state)),
        task=small,
        cohort=list(few),
        clients={client: _double(round.clients[client]) for client in few if client in round.clients},
    )


def _double(tree: Tree) -> Tree:
    return {name: t.double() if t.is_floating_point() else t for name, t in tree.items()}
