"""More than one GPU or machine: a cohort sharded over the ranks of ``torchrun``.

    torchrun --nproc-per-node 2 -m fot.cli run digits
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m fot.cli run cifar100

Every rank runs the same loop on the same keys. Of each cohort a rank computes every n-th client, n the
number of ranks; the partial sums, in float64 or in integers, are added up by an all-reduce. So the
result does not depend on the number of ranks beyond rounding: encoded sums are the same integers in any
order, plain ones move by the rounding of float64, and clients that train at once round as their number
has it.

Rank 0 is the server: before each round it hands its model and memory to the others, so that ranks on
unlike hardware cannot drift apart; it alone tests the model, writes the run folder and prints. Tests are
not shared out: they are a small part of a run, and batches cut otherwise round otherwise. Each rank holds
a copy of the data. Where there are GPUs, each rank takes the one of its ``LOCAL_RANK``.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fot.aggregation import Summation, Sums
from fot.aggregation.encoded import EncodedSummation
from fot.aggregation.plain import PlainSummation
from fot.aggregation.private import PrivateSummation
from fot.engines.base import Engine, Extraction, Round, RoundOutcome
from fot.errors import UserError
from fot.methods.base import Server
from fot.network import Tree


@dataclass(frozen=True)
class World:
    """The ranks that work on a run, and which of them this process is.

    What passes between ranks is tensors and JSON, never a pickle.

    Examples
    --------
    >>> World().told({"lr": 0.1})
    {'lr': 0.1}
    """

    rank: int = 0
    size: int = 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in JSON's types, by rank."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        padded = torch.zeros(max(map(int, lengths)), dtype=torch.uint8)
        padded[: len(text)] = text
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [json.loads(t[: int(n)].numpy().tobytes()) for t, n in zip(texts, lengths, strict=True)]

    def told(self, value: Any) -> Any:
        """The value of rank 0."""
        return self.gather(value)[0]

    def sum_(self, tensor: Tensor) -> None:
        """Add up a tensor over the ranks, in place: alike to the last bit on every rank."""
        if self.size > 1 and tensor.numel():
            dist.all_reduce(tensor)

    def share(self, trees: Mapping[int, Tree]) -> dict[int, Tree]:
        """The trees of all ranks, by their numbers, of which no two ranks give the same."""
        if self.size == 1:
            return dict(trees)
        shared: dict[int, Tree] = {}
        forms = self.gather([[number, _form(tree)] for number, tree in trees.items()])
        for source, given in enumerate(forms):
            for number, form in given:
                shared[number] = {}
                for name, (shape, dtype, device) in form.items():
                    if source == self.rank:
                        tensor = trees[number][name].contiguous()
                    else:
                        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                    if tensor.numel():
                        dist.broadcast(tensor, source)
                    shared[number][name] = tensor
        return shared


def world(device: str = "auto") -> World:
    """The ranks that ``torchrun`` started, joined at the first call; one rank where it did not.

    Parameters
    ----------
    device
        ``engine.device``: with "auto" and "cuda" a rank takes the GPU of its ``LOCAL_RANK``.

    Examples
    --------
    >>> world().size
    1
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1 and not dist.is_initialized():
        if "MASTER_ADDR" not in os.environ:
            raise UserError("WORLD_SIZE is set and MASTER_ADDR is not: start the ranks with torchrun")
        if device not in ("auto", "cuda", "cpu"):
            raise UserError(
                f"engine.device: {device!r} would put all ranks there; under torchrun take auto or cpu"
            )
        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        if gpus and local >= gpus:
            raise UserError(
                f"more ranks than the {gpus} GPUs here: torchrun --nproc-per-node {gpus}, or --device cpu"
            )
        if gpus:
            torch.cuda.set_device(local)  # "cuda" means this one from here on
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
        atexit.register(lambda: dist.destroy_process_group() if dist.is_initialized() else None)
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()


class ShardedEngine:
    """Another engine, given every n-th client of a cohort on each of n ranks.

    All ranks make the same calls with the same arguments and are answered alike.

    Parameters
    ----------
    engine
        The engine that computes on this rank.
    world
        The ranks.
    """

    def __init__(self, engine: Engine, world: World) -> None:
        self.engine = engine
        self.world = world
        self.name = engine.name
        self.device = engine.device

    def train(self, round: Round) -> RoundOutcome:
        """Train this rank's share of the cohort; the sum is over all of it."""
        part, own = PartSummation(round.summation), self._own(round.cohort)
        server = self._server(round.server)
        outcome = RoundOutcome(None)
        if own:
            share = replace(round, server=server, cohort=own, summation=part, provisional=False)
            outcome = self.engine.train(share)
        local_params = self.world.share(outcome.local_params) if round.keep_local else {}
        return self._whole(part, round.cohort, outcome.excluded, local_params)

    def extract(self, extraction: Extraction) -> RoundOutcome:
        """Let this rank's share of the clients take part; sums and clients' states are those of all."""
        part, own = PartSummation(extraction.summation), self._own(extraction.participants)
        server, clients = self._server(extraction.server), extraction.clients
        outcome = RoundOutcome(None)
        if own:
            places = self._own(extraction.places)
            share = replace(extraction, server=server, participants=own, summation=part, positions=places)
            outcome = self.engine.extract(share)
        clients.update(self.world.share({client: clients[client] for client in own if client in clients}))
        return self._whole(part, extraction.participants, outcome.excluded, {})

    def evaluate(self, params: Tree, x: Tensor, y: Tensor, task: int) -> float:
        """Accuracy in percent, of rank 0's model."""
        accuracy = self.engine.evaluate(params, x, y, task) if self.world.rank == 0 else None
        return float(self.world.told(accuracy))

    def _own(self, whole: Sequence[int]) -> Sequence[int]:
        return whole[self.world.rank :: self.world.size]

    def _server(self, server: Server) -> Server:
        """The server as rank 0 has it."""
        shared = self.world.share({0: server.params, 1: server.state} if self.world.rank == 0 else {})
        return Server(shared[0], shared[1])

    def _whole(
        self,
        part: PartSummation,
        cohort: Sequence[int],
        excluded: Sequence[int],
        local_params: dict[int, Tree],
    ) -> RoundOutcome:
        everywhere = {client for own in self.world.gather(list(excluded)) for client in own}
        any_left = part.merge(self.world, self.device)
        if any_left and everywhere and part.discreet:  # where a rank had none to go by, it knew no shapes
            part.add_zeros(sorted(everywhere), self.device)
            everywhere.clear()
        sums = part.outer.close() if any_left else None
        return RoundOutcome(sums, tuple(c for c in cohort if c in everywhere), local_params)


class PartSummation:
    """A rank's part of a sum that is opened over the whole cohort and closed when all ranks have added."""

    def __init__(self, summation: Summation) -> None:
        self.outer = summation
        self.discreet = summation.discreet
        self.add_total = summation.add_total
        inner = summation.inner if isinstance(summation, PrivateSummation) else summation
        if not isinstance(inner, (PlainSummation, EncodedSummation)):
            raise UserError(
                "aggregation.kind: plain and encoded sums can be sharded, a secure one takes one process; "
                "take encoded, which gives the same sums, or start without torchrun"
            )
        self.inner = inner

    def add(self, clients: Sequence[int], arrays: dict[str, Tensor]) -> None:
        """Add the arrays of clients of this rank."""
        self.outer.add(clients, arrays)

    def add_zeros(self, clients: Sequence[int], device: torch.device) -> None:
        """Once all is merged, add clients that had nothing finite to send to a discreet sum."""
        assert isinstance(self.outer, PrivateSummation)
        shapes, dtypes, n = self.inner.ledger.shapes, self.outer.dtypes, len(clients)
        zeros = {name: torch.zeros((n, *shapes[name]), dtype=dtypes[name], device=device) for name in dtypes}
        self.outer.add(clients, zeros)

    def close(self) -> Sums:
        """Nothing yet: a rank's part of the sum is nobody's result."""
        return Sums({}, (), 0, 0)

    def merge(self, world: World, device: torch.device) -> bool:
        """Add up the parts, as if every client had been added on every rank; False where none was."""
        inner, outer = self.inner, self.outer
        encoded = inner if isinstance(inner, EncodedSummation) else None
        private = outer if isinstance(outer, PrivateSummation) else None
        told = world.gather(
            {
                "clients": sorted(inner.ledger.added),
                "shapes": inner.ledger.shapes,
                "dtypes": _names(inner.ledger.dtypes),
                "private": _names(private.dtypes) if private else {},
                "clipped": encoded.clipped if encoded else 0,
            }
        )
        filled = [part for part in told if part["clients"]]
        if not filled:
            return False
        first = filled[0]
        if any(part[of] != first[of] for part in filled for of in ("shapes", "dtypes")):
            raise UserError("clients differ in names, shapes or types of arrays: all must send the same")
        ledger = inner.ledger
        ledger.added = {client for part in filled for client in part["clients"]}
        ledger.shapes = {name: tuple(shape) for name, shape in first["shapes"].items()}
        ledger.dtypes = {name: getattr(torch, dtype) for name, dtype in first["dtypes"].items()}
        if private:
            private.dtypes = {name: getattr(torch, dtype) for name, dtype in first["private"].items()}
        if encoded:
            encoded.codings = encoded.codec.codings(encoded.kind, ledger.shapes, len(ledger.cohort))
            encoded.clipped = sum(part["clipped"] for part in filled)
        totals: Tree = {}
        for name, shape in ledger.shapes.items():  # in the order of `first`, so alike on every rank
            if name in inner.totals:
                totals[name] = inner.totals[name].contiguous()
            else:
                dtype = torch.int64 if encoded else torch.float64
                totals[name] = torch.zeros(shape, dtype=dtype, device=device)
            world.sum_(totals[name])
        inner.totals = totals
        return True


def _form(tree: Tree) -> dict[str, tuple[list[int], str, str]]:
    """What another rank needs to make room for a tree."""
    return {n: (list(t.shape), str(t.dtype).removeprefix("torch."), t.device.type) for n, t in tree.items()}


def _names(dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
