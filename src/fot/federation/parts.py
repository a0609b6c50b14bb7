"""The parts of a run, made ready: what it trains, where, and how it is told and summed up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Self

import torch
from torch import Tensor

from fot import __version__
from fot.aggregation import Aggregation, Kind, make_aggregation
from fot.benchmarks.stream import Stream, Task
from fot.engines.base import Engine, EngineOptions, Training
from fot.engines.sequential import SequentialEngine
from fot.engines.sharded import ShardedEngine, world
from fot.engines.vectorized import VectorizedEngine
from fot.errors import UserError
from fot.federation.experiment import Evaluation, Experiment
from fot.federation.state import State
from fot.methods.base import Method, Server
from fot.network import Network

Observer = Callable[..., None]
"""Called as ``observer(event, **fields)`` for everything that happens."""


class Parts:
    """Stream, network, method, aggregation, engine and state, checked against each other."""

    def __init__(
        self,
        stream: Stream,
        model: torch.nn.Module,
        method: Method,
        *,
        training: Training | None = None,
        aggregation: Aggregation | None = None,
        engine: EngineOptions | None = None,
        evaluation: Evaluation | None = None,
        seed: int = 0,
        names: Mapping[str, str] | None = None,
        observer: Observer | None = None,
    ) -> None:
        options = engine or EngineOptions()
        self.stream = stream
        self.method = method
        self.training = training or Training()
        self.aggregation = aggregation or make_aggregation("plain", seed=seed)
        self.evaluation = evaluation or Evaluation()
        self.seed = seed
        self.names = {
            "benchmark": stream.name,
            "method": type(method).__name__.lower(),
            "partition": "own",
            "aggregation": "own" if aggregation else "plain",
        }
        self.names |= names or {}
        self.tell: Observer = observer or (lambda event, **fields: None)
        if self.aggregation.only_sums and not method.sums_only:
            raise UserError(
                f"aggregation.kind: {self.names['method']} needs more than sums "
                "and cannot run under secure ones"
            )
        ranks = world(options.device)
        self.device = options.resolved_device()
        if self.device.type == "cuda":  # on the server; what clients compute says Network.products
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            if self.device.index is not None:  # streams, events, graphs and kernels go to the current GPU
                torch.cuda.set_device(self.device)
        if options.threads:
            torch.set_num_threads(options.threads)
        self.network = Network(
            model,
            device=self.device,
            dtype=torch.float64 if options.precision == "float64" else torch.float32,
            autocast=options.precision == "bfloat16",
            tf32=options.precision == "tf32",
        )
        if stream.multi_head and not self.network.multi_head:
            raise UserError(
                f"{self.names['benchmark']} has a head for each task and the model has one for all: "
                "set model.multi_head, or wrap the model's body with fot.models.multi_head"
            )
        method.check(self.network)
        kind = VectorizedEngine if options.kind == "vectorized" else SequentialEngine
        self.engine: Engine = kind(self.network, method, self.training)
        if ranks.size > 1:
            self.engine = ShardedEngine(self.engine, ranks)
        self.state = State(Server(self.network.tree(), {}))
        self._initial = dict(self.state.server.params)
        self._tests: list[tuple[Tensor, Tensor]] = []
        self.at = (0, 0)
        """The task and the round that it waits for."""
        self.save: Callable[[bool], None] = lambda task_ended: None
        """Called wherever the run could go on from: after rounds, and after tasks with True."""

    @classmethod
    def of(cls, experiment: Experiment, observer: Observer | None = None) -> Self:
        """The parts that an experiment describes."""
        names = {
            "benchmark": experiment.benchmark["name"],
            "method": experiment.method["name"],
            "partition": str(experiment.benchmark.get("partition", "own")),
            "aggregation": experiment.aggregation["kind"],
        }
        return cls(
            experiment.make_stream(),
            experiment.make_model(),
            experiment.make_method(),
            training=experiment.training,
            aggregation=experiment.make_aggregation(),
            engine=experiment.engine,
            evaluation=experiment.evaluation,
            seed=experiment.seed,
            names=names,
            observer=observer,
        )

    def try_model(self, task: Task) -> None:
        """See that the model takes the task's samples and tells its classes apart, before hours are spent."""
        shape = tuple(task.train_x.shape[1:])
        x = task.train_x[:2].to(self.device, self.network.dtype if task.train_x.is_floating_point() else None)
        try:
            with torch.no_grad():
                logits = self.network(self.state.server.params, x, task.index)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise UserError(
                f"the model does not take samples of shape {shape}: {error}; change [model]"
            ) from error
        if logits.dim() != 2 or logits.shape[1] < task.classes:
            raise UserError(
                f"the model gives outputs of shape {tuple(logits.shape[1:])} for the {task.classes} classes "
                f"of task {task.index + 1}: set model.classes, or a head for each task"
            )

    def sums_to_come(self) -> dict[Kind, int] | None:
        """How many sums of each kind the whole run forms; None where nobody knows how many tasks come."""
        if not isinstance(self.stream, Sized):
            return None
        tasks = len(self.stream)
        updates = sum(self.training.rounds_of(task) for task in range(tasks))
        return {"update": updates, "statistics": tasks - 1 if self.method.extracts else 0}

    def described(self) -> dict[str, Any]:
        return {
            "version": __version__,
            **self.names,
            "seed": self.seed,
            "engine": self.engine.name,
            "device": _device_name(self.device),
        }

    def position(self) -> dict[str, Any]:
        """Where the run stands, for a display that comes in at that point."""
        return {
            "tasks": len(self.stream) if isinstance(self.stream, Sized) else None,
            "task": self.state.task,
            "round": self.state.round,
            "rounds": self.training.rounds_of(self.state.task),
        }

    def summary(self) -> dict[str, Any]:
        """The results so far, as ``summary.json`` holds them."""
        return {
            **self.described(),
            **self.state.measured(),
            "clients": self.stream.num_clients,
            "cohort": self.training.cohort,
            "parameters": self.parameters(),
            "layers": self.method.dimensions(self.network),
            "unprotected": self.method.unprotected(self.network),
            "privacy": self.aggregation.report(),
        }

    def parameters(self) -> int:
        return sum(p.numel() for p in self.network.module.parameters())


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
