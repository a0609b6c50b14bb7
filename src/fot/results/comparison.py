"""The HTML report that sets several runs side by side: methods, seeds, partitions, benchmarks."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from fot.files import write_whole
from fot.results import charts, metrics, page
from fot.results.charts import Bar, Line
from fot.results.folder import RunFolder
from fot.results.table import COLUMNS, Group, Summary, group_runs, method_name, varied


def write_comparison(dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write the comparison of several finished runs and return its path.

    Parameters
    ----------
    dirs
        The run folders.
    out
        Where to write: a file that ends in ``.html``, or a folder, which then gets ``report.html``. Single
        reports that lie below it are linked.
    """
    target = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    runs = [(RunFolder.open(path), RunFolder.open(path).read_summary()) for path in dirs]
    links = [
        (os.path.relpath(folder.report, target.parent), summary)
        for folder, summary in runs
        if folder.report.exists() and folder.report.resolve().is_relative_to(target.parent.resolve())
    ]
    write_whole(target, comparison_page([summary for _, summary in runs], links).encode())
    return target


def comparison_page(summaries: Sequence[Summary], links: Sequence[tuple[str, Summary]] = ()) -> str:
    """Return the comparison as HTML: a section a benchmark and partition, and links to single reports."""
    groups = group_runs(summaries)
    names = list(dict.fromkeys(group.name for group in groups))
    colours = {name: charts.category(n) for n, name in enumerate(names)}
    places = list(dict.fromkeys((group.benchmark, group.partition) for group in groups))
    body = ""
    for place in places:
        members = [group for group in groups if (group.benchmark, group.partition) == place]
        if len(places) > 1:
            body += f'<h2 class="section">{escape(place[0])} · {escape(place[1])}</h2>'
        body += _versus(members, colours)
    if links:
        items = "".join(
            f'<li><a href="{escape(quote(path))}">{escape(_run_name(summary))}</a></li>'
            for path, summary in links
        )
        body += page.cards([page.card("Single runs", "", f'<ul class="links">{items}</ul>', full=True)])
    where = " · ".join(f"<b>{escape(benchmark)}</b> {escape(partition)}" for benchmark, partition in places)
    lead = f"{len(summaries)} runs. Numbers are means over seeds, with the sample standard deviation."
    return page.page(f"Comparison of {', '.join(names)}", where, _verdict(groups, places), lead, body)


def _run_name(summary: Summary) -> str:
    where = (summary["benchmark"], summary["partition"], *varied(summary), f"seed {summary['seed']}")
    return ", ".join([method_name(summary["method"]), *where])


def _mean(group: Group, key: str) -> float | None:
    values = [run[key] for run in group.runs if run[key] is not None]
    return statistics.fmean(values) if values else None


def _verdict(groups: Sequence[Group], places: Sequence[tuple[str, str]]) -> str:
    """Return what came out, in words: the two ends of the ranking by ACC where there is one place to rank."""
    ranked = sorted(
        (g for g in groups if _mean(g, "acc") is not None), key=lambda g: _mean(g, "acc") or 0.0, reverse=True
    )
    if len(places) > 1 or len(ranked) < 2:
        methods = len({group.method for group in groups})
        return f"{methods} method{'s' * (methods != 1)} on {len(places)} benchmark{'s' * (len(places) != 1)}"
    said = []
    for group in (ranked[0], ranked[-1]):
        lost = _mean(group, "fgt")
        forgot = "" if lost is None else f" with {lost:.1f} points forgotten".replace("-0.0", "0.0")
        said.append(f"{group.name} ends at {_mean(group, 'acc'):.1f} %{forgot}")
    sentence = "; ".join(said) + "."
    return sentence[0].upper() + sentence[1:]


def _label(group: Group, groups: Sequence[Group]) -> str:
    """A group's name in a chart, where room is short: of one method's settings, what differs."""
    one_method = len({other.method for other in groups}) == 1
    return group.mark.strip(" ()") if group.mark and one_method else group.name


def _bars(groups: Sequence[Group], colours: Mapping[str, charts.Colour], key: str, label: str) -> str:
    bars = []
    for group in groups:
        values = [run[key] for run in group.runs if run[key] is not None]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            mean = statistics.fmean(values)
            said = f"{mean:.1f}" + (f" ± {spread:.1f}" if len(values) > 1 else "")
            bars.append(Bar(_label(group, groups), mean, said, colours[group.name], spread))
    if not bars:
        return '<p class="soft">Not defined for one task.</p>'
    return page.chart(lambda width: charts.bar_chart(bars, label=label, width=width))


def _curves(groups: Sequence[Group], colours: Mapping[str, charts.Colour]) -> str:
    lines, longest = [], 1
    for group in groups:
        curves = [metrics.average_curve(run["accuracy"]) for run in group.runs]
        length = min(map(len, curves))
        longest = max(longest, length)
        points = [(t + 1.0, statistics.fmean(curve[t] for curve in curves)) for t in range(length)]
        lines.append(Line(_label(group, groups), colours[group.name], points))
    return page.chart(
        lambda width: charts.line_chart(
            lines,
            label="Mean accuracy over the tasks seen so far, method by method",
            x_name="tasks learnt",
            width=width,
            x_ticks=charts.task_ticks(longest),
        ),
        full=True,
    )


def _table(groups: Sequence[Group]) -> str:
    columns = [column for column in COLUMNS if any(group.cell(column) != "–" for group in groups)]
    head = "".join(
        f'<th scope="col">{escape(name)}</th>' for name in ("Method", "Seeds", *(c.heading for c in columns))
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(group.name)}</th><td>{len(group.runs)}</td>'
        + "".join(f"<td>{escape(group.cell(column))}</td>" for column in columns)
        + "</tr>"
        for group in groups
    )
    table = f'<table class="list"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return charts.scroll("Table of all methods", table)


def _versus(groups: Sequence[Group], colours: Mapping[str, charts.Colour]) -> str:
    """Return the boxes of one benchmark and partition."""
    accuracy = _bars(groups, colours, "acc", "Accuracy at the end, method by method")
    forgotten = _bars(groups, colours, "fgt", "Forgetting, method by method")
    return page.cards(
        [
            page.card("Accuracy", "ACC: mean over tasks at the end, in percent. More is better.", accuracy),
            page.card(
                "Forgetting", "FGT: points lost since each task was learnt. Less is better.", forgotten
            ),
            page.card(
                "Accuracy as tasks arrive",
                "Mean accuracy over the tasks seen so far, in percent, averaged over seeds.",
                _curves(groups, colours),
                full=True,
            ),
            page.card("All numbers", "", _table(groups), full=True),
        ]
    )
