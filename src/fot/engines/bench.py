"""How fast the engines are on this machine: ``fot bench engine``.

The vectorised engine, the sequential one and a loop over clients written by hand train the same cohorts
in one process, and must reach the same model. The floor is the round's own arithmetic at the speed that
one large matrix product reaches here; a share above 100 % means that the library's convolutions beat it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fot.aggregation import make_aggregation
from fot.benchmarks.stream import Task
from fot.dropout import keyed_dropout
from fot.engines.base import Round, RoundKeys, Training
from fot.engines.sequential import LOSS, SequentialEngine
from fot.engines.vectorized import VectorizedEngine
from fot.errors import UserError
from fot.methods.base import Method, Server
from fot.models import alexnet, mlp, resnet18, resnet18_norm
from fot.network import Network, Tree
from fot.randomness import fold, permutation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table


ENOUGH = 10.0
"""Seconds after which a way has been timed well enough."""


@dataclass(frozen=True)
class Work:
    """A round's work: the network, and a cohort's share of a benchmark in samples of the right shape."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    cohort: int
    samples: int
    batch: int
    classes: int = 10


WORKS = {
    "digits": Work(lambda: mlp(hidden=(200, 200)), (64,), 10, 72, 16),
    "pmnist": Work(
        lambda: mlp(inputs=784, hidden=(400, 400, 400), dropout=(0.2, 0.5, 0.5)), (784,), 64, 480, 64
    ),
    "cifar100": Work(alexnet, (3, 32, 32), 25, 100, 16),
    "5datasets": Work(resnet18, (3, 32, 32), 64, 333, 16),
    "miniimagenet": Work(resnet18_norm, (3, 84, 84), 25, 50, 16, 5),
}


def work_named(name: str) -> Work:
    """One of ``WORKS``."""
    if name not in WORKS:
        raise UserError(f"no such work '{name}': choose {', '.join(WORKS)}")
    return WORKS[name]


@dataclass(frozen=True)
class Row:
    """What one way of training took."""

    name: str
    seconds: float
    """Seconds a round: on a CPU the median, on a GPU the mean."""
    memory: int
    """Peak bytes above what was there before."""
    floor: float
    """Share of the time that the arithmetic alone would take, in percent."""
    difference: float
    """Largest difference of a parameter from the sequential engine's, in float64."""


def bench_engine(
    work: str = "digits",
    *,
    device: str = "cpu",
    precision: str = "tf32",
    rounds: int = 5,
    cohort: int | None = None,
) -> list[Row]:
    """Measure one round of a benchmark's work, three ways.

    Parameters
    ----------
    work
        ``digits``, ``pmnist``, ``cifar100``, ``5datasets`` or ``miniimagenet``.
    device, precision
        As in ``[engine]``.
    rounds
        Rounds to time, after one that is not; fewer of a slow way, once they have taken ten seconds.
    cohort
        Clients in a round; the benchmark's own by default.
    """
    chosen = work_named(work)
    chosen = chosen if cohort is None else replace(chosen, cohort=cohort)
    network, task, training = _set_up(chosen, device, precision)
    with network.products():
        least = _floor(network, task, training)
    differences = _differences(chosen, device)
    rows = []
    for name, train in _ways(network, training).items():
        with _peak_memory(network.device) as memory:
            took = _seconds(train, network, task, rounds)
        rows.append(Row(name, took, memory[0], 100 * least / took, differences[name]))
    return rows


def _seconds(train: Train, network: Network, task: Task, rounds: int) -> float:
    """Seconds a round in steady state, each going on from the one before."""
    server, cohort = Server(network.tree(), {}), list(range(len(task.clients)))
    server = train(server, task, cohort, _keys(0))  # warms up
    _wait(network.device)
    times = [time.perf_counter()]
    while len(times) <= rounds and times[-1] - times[0] < ENOUGH:
        server = train(server, task, cohort, _keys(len(times)))
        times.append(time.perf_counter())
    _wait(network.device)
    if network.device.type == "cpu":  # which other work shares
        return median(after - before for before, after in pairwise(times))
    return (time.perf_counter() - times[0]) / (len(times) - 1)  # a GPU is still at it when the host is not


def bench_table(rows: Sequence[Row], title: str) -> Table:
    """The measurements as a table for the terminal."""
    from rich.table import Table

    table = Table("engine", "rounds/s", "ms a round", "peak MB", "% of the floor", "difference", title=title)
    for row in rows:
        table.add_row(
            row.name, f"{1 / row.seconds:.2f}", f"{1e3 * row.seconds:.1f}", f"{row.memory / 1e6:.0f}",
            f"{row.floor:.0f}", f"{row.difference:.0e}",
        )  # fmt: skip
    return table


Train = Callable[[Server, Task, list[int], RoundKeys], Server]


def _ways(network: Network, training: Training, *, exact: bool = False) -> dict[str, Train]:
    """The three ways to train a cohort; each gives the server after the round."""

    def by(engine: SequentialEngine) -> Train:
        def train(server: Server, task: Task, cohort: list[int], keys: RoundKeys) -> Server:
            summation = make_aggregation("plain", seed=0).open(cohort, kind="update", path=(0, 0))
            # As in a run, a GPU is given a round while it is at the one before.
            sums = engine.train(Round(server, task, cohort, keys, {}, summation, provisional=True)).sums
            assert sums is not None
            names = [name for name in sums.arrays if name != LOSS]
            means = torch._foreach_div([sums.arrays[name] for name in names], len(cohort))
            return engine.method.aggregate(network, server, dict(zip(names, means, strict=True)))

        return train

    return {
        "vectorized": by(VectorizedEngine(network, Method(), training)),
        "sequential": by(SequentialEngine(network, Method(), training)),
        "by hand": _Loop(network, training, exact),
    }


class _Loop:
    """What one would write by hand: a module, an optimiser, a loop over clients; data on the device."""

    def __init__(self, network: Network, training: Training, exact: bool) -> None:
        self.network, self.training, self.exact = network, training, exact
        self.data: tuple[Task, Tensor, Tensor] | None = None

    def __call__(self, server: Server, task: Task, cohort: list[int], keys: RoundKeys) -> Server:
        with self.network.products():
            update = self._train(server, task, cohort, keys)
        return Server({**server.params, **{n: server.params[n] + t for n, t in update.items()}}, {})

    def _train(self, server: Server, task: Task, cohort: list[int], keys: RoundKeys) -> Tree:
        network, device = self.network, self.network.device
        if self.data is None or self.data[0] is not task:
            self.data = (task, task.train_x.to(device, network.dtype), task.train_y.to(device))
        _, x, y = self.data
        names = network.trained(0)
        module = network.module.train()
        parameters = dict(module.named_parameters())
        own = [parameters[name] for name in names]
        optimiser = torch.optim.SGD(own, lr=self.training.lr, weight_decay=self.training.weight_decay)
        total = [torch.zeros_like(server.params[name]) for name in names]
        for client in cohort:
            with torch.no_grad():
                for name, parameter in zip(names, own, strict=True):
                    parameter.copy_(server.params[name])
            order = permutation(fold(fold(keys.order, client), 0), len(task.clients[client]), device)
            batches = torch.split(task.clients[client].to(device)[order], self.training.batch_size)
            for step, rows in enumerate(batches):
                mask = keyed_dropout(fold(fold(keys.dropout, client), step)) if self.exact else nullcontext()
                with mask, torch.autocast(device.type, torch.bfloat16, enabled=network.autocast):
                    logits = module(x[rows], 0) if network.multi_head else module(x[rows])
                loss = F.cross_entropy(logits.to(network.dtype), y[rows])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            with torch.no_grad():
                for name, parameter, amount in zip(names, own, total, strict=True):
                    amount.add_(parameter - server.params[name])
        return {name: amount / len(cohort) for name, amount in zip(names, total, strict=True)}


def _set_up(work: Work, device: str, precision: str) -> tuple[Network, Task, Training]:
    torch.manual_seed(0)
    dtype = torch.float64 if precision == "float64" else torch.float32
    network = Network(
        work.model(), device=device, dtype=dtype, autocast=precision == "bfloat16", tf32=precision == "tf32"
    )
    network.add_task(work.classes, 0, 0)
    number = work.cohort * work.samples
    x, y = torch.randn(number, *work.shape), torch.randint(0, work.classes, (number,))
    task = Task(0, "bench", work.classes, x, y, x[:1], y[:1], torch.split(torch.arange(number), work.samples))
    return network, task, Training(batch_size=work.batch, lr=0.01, weight_decay=1e-5)


def _differences(work: Work, device: str) -> dict[str, float]:
    """Two clients of the work, each way in float64: how far each new model is from the reference's."""
    few = replace(work, cohort=2, samples=min(work.samples, 2 * work.batch + 1))
    network, task, training = _set_up(few, device, "float64")
    server = Server(network.tree(), {})
    found = {
        name: train(server, task, [0, 1], _keys(0)).params
        for name, train in _ways(network, training, exact=True).items()
    }
    return {
        name: max(float((params[n] - t).abs().max()) for n, t in found["sequential"].items())
        for name, params in found.items()
    }


def _floor(network: Network, task: Task, training: Training) -> float:
    """Seconds that the products of a round take at the speed of one large product on this device."""
    x, y = (
        task.train_x[: training.batch_size].to(network.device, network.dtype),
        task.train_y[: training.batch_size],
    )
    counter = FlopCounterMode(display=False)
    with counter:
        module = network.module.train()
        logits = module(x, 0) if network.multi_head else module(x)
        F.cross_entropy(logits, y.to(network.device)).backward()  # type: ignore[no-untyped-call]
    work = counter.get_total_flops() * len(task.train_x) / len(x)
    size = 4096 if network.device.type == "cuda" else 1024
    square = torch.randn(
        size, size, device=network.device, dtype=torch.bfloat16 if network.autocast else network.dtype
    )
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        square @ square
        _wait(network.device)
        seconds.append(time.perf_counter() - start)
    return work * min(seconds) / (2 * size**3)


def _keys(r: int) -> RoundKeys:
    return RoundKeys(fold(1, r), fold(2, r), fold(3, r))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _peak_memory(device: torch.device) -> Iterator[list[int]]:
    """Peak bytes in use within the block, above those at its start: of the device, or of the process."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    with suppress(OSError, AttributeError):  # give back what earlier work freed, or it would hide ours
        ctypes.CDLL(None).malloc_trim(0)
    before, done = _resident(), threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], _resident() - before)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def _resident() -> int:
    """Bytes of the process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0


__all__: Any = ["Row", "WORKS", "bench_engine", "bench_table"]
