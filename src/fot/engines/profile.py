"""What a device does in a round, kernel by kernel: ``fot bench engine --profile``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity, profile

from fot.engines.bench import _keys, _set_up, _wait, _ways, work_named
from fot.methods.base import Server

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Cost:
    """What one kernel, or on a CPU one operation, costs a round."""

    name: str
    launches: float
    microseconds: float


def profile_round(
    work: str = "digits",
    *,
    device: str = "cpu",
    precision: str = "tf32",
    rounds: int = 5,
    cohort: int | None = None,
) -> list[Cost]:
    """What a round of the vectorised engine is made of, dearest first; arguments as of ``bench_engine``."""
    chosen = work_named(work)
    chosen = chosen if cohort is None else replace(chosen, cohort=cohort)
    network, task, training = _set_up(chosen, device, precision)
    train, everyone = _ways(network, training)["vectorized"], list(range(chosen.cohort))
    server = Server(network.tree(), {})
    for r in range(2):  # the trial, kernels that are compiled, the recording
        server = train(server, task, everyone, _keys(r))
    _wait(network.device)
    on_gpu = network.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for r in range(rounds):
            server = train(server, task, everyone, _keys(2 + r))
        _wait(network.device)
    costs = [
        Cost(
            e.key, e.count / rounds, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / rounds
        )
        for e in seen.key_averages()
        if (e.device_type.name == "CUDA") == on_gpu
    ]
    return sorted(costs, key=lambda cost: -cost.microseconds)


def profile_table(costs: Sequence[Cost], title: str, most: int = 30) -> Table:
    """The dearest as a table for the terminal, the rest in one row."""
    from rich.table import Table

    table = Table("kernel", "launches a round", "µs a round", "%", title=title)
    rest = costs[most:]
    others = Cost(f"{len(rest)} others", sum(c.launches for c in rest), sum(c.microseconds for c in rest))
    total = Cost("all", sum(c.launches for c in costs), sum(c.microseconds for c in costs))
    for cost in (*costs[:most], *([others] if rest else []), total):
        share = 100 * cost.microseconds / (total.microseconds or 1)
        table.add_row(cost.name[:90], f"{cost.launches:.1f}", f"{cost.microseconds:.1f}", f"{share:.1f}")
    return table
