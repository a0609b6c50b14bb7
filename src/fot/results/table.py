"""Results as tables: one run, or several side by side, for the terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fot.results.metrics import average_curve, used_subspace

Summary = Mapping[str, Any]

_SPELLING = {"fedavg": "FedAvg", "fot-authors": "FOT-authors", "kronprox": "KronProx", "fedcil": "FedCIL"}


def method_name(method: str) -> str:
    """Return a method's name as papers print it; a user's own ``module:Class`` goes by its class.

    Examples
    --------
    >>> method_name("fot"), method_name("fedavg"), method_name("my.methods:Better"), method_name("frozen")
    ('FOT', 'FedAvg', 'Better', 'frozen')
    """
    name = method.rpartition(":")[2]
    return _SPELLING.get(name, name.upper() if name.islower() and len(name) <= 4 else name)


def format_bytes(count: float) -> str:
    """Return a number of bytes in decimal units.

    Examples
    --------
    >>> format_bytes(999), format_bytes(26_800_000), format_bytes(999_999)
    ('999 B', '26.8 MB', '1.00 MB')
    """
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return (
        f"{value:.0f} B"
        if unit == "B"
        else f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    )


def format_seconds(seconds: float) -> str:
    """Return a duration with two parts at most.

    Examples
    --------
    >>> format_seconds(0.25), format_seconds(59.96), format_seconds(75), format_seconds(7260)
    ('0.2 s', '1 min 00 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 3600:
        return "{} min {:02d} s".format(*divmod(round(seconds), 60))
    return "{} h {:02d} min".format(*divmod(round(seconds / 60), 60))


def _percent(value: float) -> str:
    return f"{value:.2f}"


def total(parts: Mapping[str, float]) -> float:
    """Return the sum of a summary's parts, such as bytes in training and in extraction."""
    return sum(parts.values())


@dataclass(frozen=True)
class Column:
    """One quantity of the comparison: its heading, its value in a summary, how it is printed."""

    heading: str
    value: Callable[[Summary], float | None]
    show: Callable[[float], str]


COLUMNS = (
    Column("ACC %", lambda s: s["acc"], _percent),
    Column("FGT", lambda s: s["fgt"], _percent),
    Column("FGT (max)", lambda s: s["fgt_max"], _percent),
    Column("BWT", lambda s: s["bwt"], _percent),
    Column("Subspace %", lambda s: used_subspace(s["subspace"] or {}), lambda v: f"{v:.1f}"),
    Column("Sent", lambda s: total(s["bytes_up"]), format_bytes),
    Column("Time", lambda s: total(s["seconds"]), format_seconds),
)


@dataclass(frozen=True)
class Group:
    """The runs of one method on one benchmark and partition, over seeds."""

    benchmark: str
    partition: str
    method: str
    runs: tuple[Summary, ...]
    mark: str = ""
    """Set where a method appears with several settings: pooling these as seeds would be wrong."""

    @property
    def name(self) -> str:
        """What tables and charts call it."""
        return method_name(self.method) + self.mark

    def cell(self, column: Column) -> str:
        """Return ``mean ± sample standard deviation``, the mean if all agree, a dash where undefined."""
        values = [v for v in map(column.value, self.runs) if v is not None]
        if not values:
            return "–"
        mean = column.show(statistics.fmean(values))
        return f"{mean} ± {column.show(statistics.stdev(values))}" if len(set(values)) > 1 else mean


def group_runs(summaries: Sequence[Summary]) -> list[Group]:
    """Group runs by benchmark, partition, method and settings but the seed, in order of first appearance."""
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Summary]]] = {}
    for run in summaries:
        methods = groups.setdefault((run["benchmark"], run["partition"]), {})
        methods.setdefault((run["method"], run.get("settings", "")), []).append(run)
    return [
        Group(benchmark, partition, method, tuple(runs), _mark(settings, method, runs[0], methods))
        for (benchmark, partition), methods in groups.items()
        for (method, settings), runs in methods.items()
    ]


def _mark(settings: str, method: str, run: Summary, methods: Mapping[tuple[str, str], Any]) -> str:
    """What tells apart two groups of one method: what a sweep varied, or the digest of their settings."""
    if sum(name == method for name, _ in methods) == 1:
        return ""
    return f" ({', '.join(varied(run)) or settings[:6]})"


def varied(run: Summary) -> list[str]:
    """The settings that a sweep varied, as people read them."""
    return [f"{key.rpartition('.')[2]} {value}" for key, value in run.get("sweep", {}).items()]


def comparison_rows(summaries: Sequence[Summary]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the comparison, as text."""
    headings = ["Benchmark", "Partition", "Method", "Seeds", *(column.heading for column in COLUMNS)]
    rows = [
        [
            g.benchmark,
            g.partition,
            g.name,
            str(len(g.runs)),
            *(g.cell(c) for c in COLUMNS),
        ]
        for g in group_runs(summaries)
    ]
    return headings, rows


def run_rows(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return the accuracy matrix of one run as text, with the mean over the tasks seen as its last row."""
    accuracy = summary["accuracy"]
    digits = 2 if len(accuracy) <= 6 else 1  # ten tasks then fit a terminal of 80 columns
    headings = ["after task", *(str(t + 1) for t in range(len(accuracy)))]
    rows = [
        [f"{i + 1} {name}", *("" if value is None else f"{value:.{digits}f}" for value in row)]
        for i, (name, row) in enumerate(zip(summary["tasks"], accuracy, strict=True))
    ]
    return headings, [*rows, ["mean", *(f"{mean:.{digits}f}" for mean in average_curve(accuracy))]]


def _rich(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int, title: str | None) -> Table:
    table = Table(
        title=title and Text(title),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for position, heading in enumerate(headings):
        if position < words:
            table.add_column(heading, overflow="fold", min_width=6)
        else:
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # as text, since rich reads [x] in a plain string as markup
    return table


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    rule = ["---" if position < words else "---:" for position in range(len(headings))]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (headings, rule, *rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in escaped) + "\n"


def comparison_table(summaries: Sequence[Summary], title: str | None = None) -> Table:
    """Return the comparison of several runs as a table for the terminal, fit for 80 columns.

    The benchmark and the partition go to the title where all runs share them, deviations stand below
    their means, and BWT, which is -FGT by its definition, is left out.
    """
    headings, rows = comparison_rows(summaries)
    shared = [n for n in range(2) if len({row[n] for row in rows}) == 1]
    title = title or ", ".join(rows[0][n] for n in shared) or None
    dropped = {*shared, headings.index("BWT")}  # by its definition BWT is -FGT
    headings, *rows = ([cell for n, cell in enumerate(row) if n not in dropped] for row in (headings, *rows))
    stacked = [[cell.replace(" ± ", "\n± ") for cell in row] for row in rows]
    return _rich(headings, stacked, words=headings.index("Seeds"), title=title)


def comparison_markdown(summaries: Sequence[Summary]) -> str:
    """Return the comparison of several runs as Markdown.

    Examples
    --------
    >>> run = {"benchmark": "digits", "partition": "iid", "method": "fot", "acc": 90.0, "fgt": None,
    ...        "fgt_max": None, "bwt": None, "subspace": {}, "bytes_up": {"training": 1000},
    ...        "seconds": {"train": 2.0}}
    >>> print(comparison_markdown([run, {**run, "acc": 92.0}]).splitlines()[2])
    | digits | iid | FOT | 2 | 91.00 ± 1.41 | – | – | – | – | 1.00 kB | 2.0 s |
    """
    return _markdown(*comparison_rows(summaries), words=3)


def headline(summary: Summary) -> str:
    """Return one sentence on what was run and what came out.

    Examples
    --------
    >>> headline({"method": "fot", "tasks": ["a", "b"], "clients": 20, "acc": 90.14, "fgt": 6.26})
    'FOT learnt 2 tasks over 20 clients: 90.1 % on average at the end, 6.3 points forgotten.'
    """
    tasks, clients, fgt = len(summary["tasks"]), summary["clients"], summary["fgt"]
    plural = "tasks" if tasks != 1 else "task"
    said = f"{method_name(summary['method'])} learnt {tasks} {plural} over {clients} clients"
    acc = "no accuracy" if summary["acc"] is None else f"{summary['acc']:.1f} %"
    if fgt is None:
        return f"{said}: {acc}."
    lost = f"{fgt:.1f} points forgotten" if fgt > -0.05 else f"{-fgt:.1f} points gained on earlier tasks"
    return f"{said}: {acc} on average at the end, {lost.replace('-0.0', '0.0')}."


def run_table(summary: Summary) -> Table:
    """Return the accuracy matrix of one run as a table for the terminal, under its headline."""
    return _rich(*run_rows(summary), words=1, title=headline(summary))


def run_markdown(summary: Summary) -> str:
    """Return the accuracy matrix of one run as Markdown, under its headline."""
    return headline(summary) + "\n\n" + _markdown(*run_rows(summary), words=1)
