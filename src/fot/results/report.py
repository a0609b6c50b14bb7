"""The HTML report of one run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from fot.files import write_whole
from fot.results import charts, metrics, page
from fot.results.charts import Bar, Line
from fot.results.folder import RunFolder
from fot.results.table import Summary, format_bytes, format_seconds, headline, method_name, total

Events = Sequence[Mapping[str, Any]]


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` of a finished run into its folder and return its path."""
    folder = RunFolder.open(run_dir)
    html = run_page(folder.read_summary(), folder.read_events(), folder.read_experiment())
    write_whole(folder.report, html.encode())
    return folder.report


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{round(value, 1) + 0.0:.1f}{unit}".replace("-", "−")  # + 0.0 turns -0.0 into 0.0


def run_page(summary: Summary, events: Events, experiment: str) -> str:
    """Return the report of one run as HTML."""
    where = f"<b>{escape(summary['benchmark'])}</b> · {escape(summary['partition'])} · seed {summary['seed']}"
    lead = (
        f"{min(summary['cohort'], summary['clients'])} of {summary['clients']} clients took part in each "
        f"of {_rounds(summary):,} rounds, on a network of {summary['parameters']:,} parameters."
    )
    boxes = [
        _matrix(summary),
        _over_time(summary, events),
        _average(summary),
        _forgetting(summary),
        _subspace(summary),
        _unprotected(summary),
        _bytes(summary),
        _seconds(summary),
        _privacy(summary),
        _settings(experiment),
        _warnings(events),
        _made(summary),
    ]
    title = f"{method_name(summary['method'])} on {summary['benchmark']}"
    return page.page(title, where, headline(summary), lead, _tiles(summary) + page.cards(boxes))


def _rounds(summary: Summary) -> int:
    rounds = summary["rounds"]
    return int(rounds) if isinstance(rounds, (int, float)) else sum(rounds)


def _tiles(summary: Summary) -> str:
    used = metrics.used_subspace(summary["subspace"] or {})
    up, spent = total(summary["bytes_up"]), total(summary["seconds"])
    best = f"{_number(summary['fgt_max'])} from the best moment"
    return page.tiles(
        [
            page.tile("ACC", _number(summary["acc"], " %"), "mean accuracy at the end"),
            page.tile("FGT", _number(summary["fgt"], " points"), best),
            page.tile("BWT", _number(summary["bwt"], " points"), "backward transfer"),
            page.tile("FWT", _number(summary["fwt"], " points"), "forward transfer"),
            page.tile("Used subspace", _number(used, " %"), "mean over layers"),
            page.tile("Sent", format_bytes(up), "by a client in every round"),
            page.tile("Time", format_seconds(spent), f"{summary['engine']}, {summary['device']}"),
        ]
    )


def _matrix(summary: Summary) -> str:
    accuracy, names = summary["accuracy"], summary["tasks"]
    values = [value for row in accuracy for value in row if value is not None]
    ticks = charts.round_ticks(min(values, default=0), max(values, default=100))
    tips = [
        ["" if value is None else f"{name} after task {t + 1}: {value:.2f} %" for t, value in enumerate(row)]
        for name, row in zip(names, accuracy, strict=True)
    ]
    table = charts.heat_map(
        accuracy,
        names,
        tips,
        caption="Accuracy on every task after every task, in percent",
        bounds=(ticks[0], ticks[-1]),
        footer=("Mean", metrics.average_curve(accuracy)),
        numbered=True,
    )
    note = (
        "Test accuracy in percent: a row for each task, a column for each moment after which it was measured."
    )
    return page.card("Accuracy after each task", note, table, full=True)


def _over_time(summary: Summary, events: Events) -> str:
    count = len(summary["tasks"])
    points, bands = _measured(events, count)
    unit = "rounds"
    if not points:  # no evaluation was logged: the matrix holds one point a task
        unit = "tasks"
        bands = [(float(t), t + 1.0, name) for t, name in enumerate(summary["tasks"])]
        points = {
            i: [(t + 1.0, row[t]) for t in range(i, count) if row[t] is not None]
            for i, row in enumerate(summary["accuracy"])
        }
    lines = [
        Line(f"{i + 1} {summary['tasks'][i]}", charts.ramp(i, count), _thin(points[i]), str(i + 1))
        for i in sorted(points)
        if points[i]
    ]
    label = "Accuracy of each task over the rounds"
    final = [value for row in summary["accuracy"] for value in row if value is not None]
    floor = min(final) - max(2.0, 0.25 * (max(final) - min(final)))
    chart = page.chart(
        lambda width: charts.line_chart(
            lines, label=label, x_name=unit, width=width, bands=bands, floor=floor
        ),
        full=True,
    )
    note = "Each line is one task, in percent, from when it was learnt to the end; bands mark the tasks. "
    cut = "The steep first rounds of a task may lie below the axis."
    return page.card("Accuracy over time", note + cut, chart, full=True)


def _measured(
    events: Events, count: int
) -> tuple[dict[int, list[charts.Point]], list[tuple[float, float, str]]]:
    """Return each task's accuracy over the rounds of the whole run, and where each task begins and ends."""
    starts: dict[int, tuple[int, int]] = {}
    points: dict[int, list[charts.Point]] = {i: [] for i in range(count)}
    bands: list[tuple[float, float, str]] = []
    passed = 0
    for event in events:
        if event["event"] == "task_started":
            starts[event["task"]] = (passed, passed + event["rounds"])
            bands.append((float(passed), float(passed + event["rounds"]), event["name"]))
            passed += event["rounds"]
        elif event["event"] == "evaluated" and event["task"] in starts:
            start, end = starts[event["task"]]
            x = float(end if event["round"] is None else start + event["round"] + 1)
            for name, value in event["accuracies"].items():
                i = int(name)
                if value is not None and i <= event["task"]:  # a task not yet trained has no line
                    points[i].append((x, value))
    return (points if any(points.values()) else {}), bands


def _thin(points: Sequence[charts.Point], most: int = 300) -> list[charts.Point]:
    step = -(-len(points) // most)
    return [*points[: -1 : max(step, 1)], *points[-1:]]


def _average(summary: Summary) -> str:
    curve = metrics.average_curve(summary["accuracy"])
    points = [(t + 1.0, value) for t, value in enumerate(curve)]
    chart = page.chart(
        lambda width: charts.line_chart(
            [Line("", charts.ACCENT, points)],
            label="Mean accuracy over the tasks seen so far",
            x_name="tasks learnt",
            width=width,
            x_ticks=charts.task_ticks(len(points)),
        )
    )
    return page.card("Average accuracy", "Mean over the tasks seen so far, in percent.", chart)


def _forgetting(summary: Summary) -> str:
    lost = metrics.forgetting_by_task(summary["accuracy"])
    bars = [
        Bar(f"{i + 1} {name}", value, _number(value), charts.LOSS if value > 0 else charts.ACCENT)
        for i, (name, value) in enumerate(zip(summary["tasks"], lost, strict=False))
    ]
    note = "Points that each task lost between the end of its own training and the end of the run."
    if not bars:
        return page.card("Forgetting", note, '<p class="soft">One task alone has nothing to forget.</p>')
    return page.card("Forgetting", note, _bars(bars, "Points forgotten, task by task"))


def _bars(bars: Sequence[Bar], label: str) -> str:
    return page.chart(lambda width: charts.bar_chart(bars, label=label, width=width))


def _subspace(summary: Summary) -> str:
    subspace = {name: shares for name, shares in (summary["subspace"] or {}).items() if shares}
    if not subspace:
        return ""
    tips = [
        [
            f"{name} after task {t + 1}: {share / 100 * dimension:.0f} of {dimension} directions"
            for t, share in enumerate(shares)
        ]
        for name, shares in subspace.items()
        for dimension in [summary["layers"][name]]
    ]
    length = min(len(shares) for shares in subspace.values())
    means = [metrics.used_subspace(subspace, t) or 0.0 for t in range(length)]
    table = charts.heat_map(
        list(subspace.values()),
        list(subspace),
        tips,
        caption="Share of each layer's input space in use after every task, in percent",
        corner="Layer",
        bounds=(0, 100),
        footer=("Mean", means),
    )
    note = "Share of each layer's input space, in percent, kept for the tasks learnt so far, after each task."
    return page.card("Subspace in use", note, table, full=True)


def _unprotected(summary: Summary) -> str:
    """What was left free to change, and why; nothing where the method protects nothing."""
    found = summary.get("unprotected")
    note = "These parameters were trained without protection, and may cause forgetting."
    return page.card("Not protected", note, _facts(found), full=True) if found else ""


def _bytes(summary: Summary) -> str:
    bars = [
        Bar(f"{way}, {part}", value, format_bytes(value), colour)
        for way, key, colour in (("up", "bytes_up", charts.ACCENT), ("down", "bytes_down", charts.QUIET))
        for part in ("training", "extraction")
        for value in [summary[key][part]]
    ]
    note = "What one client sends and receives if it takes part in every round."
    return page.card("Bytes", note, _bars(bars, "Bytes up and down for one client"))


def _seconds(summary: Summary) -> str:
    bars = [
        Bar(name, summary["seconds"][part], format_seconds(summary["seconds"][part]))
        for name, part in (("training", "train"), ("extraction", "extract"), ("evaluation", "evaluate"))
    ]
    return page.card("Time", "Where the run's time went.", _bars(bars, "Seconds by phase"))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested settings as ``a.b: value`` with TOML's spelling of true and false."""
    flat: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value).lower() if isinstance(value, bool) else str(value)
    return flat


def _settings(experiment: str) -> str:
    if not experiment.strip():
        return ""
    try:
        settings = tomllib.loads(experiment)
    except tomllib.TOMLDecodeError:
        return page.card("Settings", "", f"<pre>{escape(experiment)}</pre>", full=True)
    loose = {name: value for name, value in settings.items() if not isinstance(value, Mapping)}
    groups: dict[str, Mapping[str, Any]] = {"run": loose}
    groups |= {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    content = "".join(
        f"<section><h3>{escape(name)}</h3><dl>"
        + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _flat(values).items())
        + "</dl></section>"
        for name, values in groups.items()
        if values
    )
    return page.card("Settings", "", f'<div class="settings">{content}</div>', full=True)


def _warnings(events: Events) -> str:
    found = [event["message"] for event in events if event["event"] == "warning"]
    items = "".join(f"<li>{escape(message)}</li>" for message in found)
    return page.card("Warnings", "", f'<ul class="warnings">{items}</ul>', full=True) if found else ""


def _privacy(summary: Summary) -> str:
    """What differential privacy the run kept; nothing where none was asked for."""
    privacy = summary.get("privacy")
    if not privacy:
        return ""
    bound = {
        name: "no bound" if privacy.get(name) is None else f"{privacy[name]:.3g}"
        for name in ("epsilon", "epsilon_released")
    }
    facts = {
        "Epsilon": f"{bound['epsilon']} at delta {privacy['delta']:g}, "
        f"over {privacy['releases']} released sums",
        "Released": f"{bound['epsilon_released']} against somebody who does not know the cohorts",
        "Asked for": f"{privacy['asked']:g}, by the {privacy['calibration']} calibration",
        "Noise": f"{privacy['noise']:.3g} times the clip",
        "Covers": ", ".join(privacy["covers"]),
    }
    note = "What the sums may tell of any one client; what is not covered has no such bound."
    if "updates" not in privacy["covers"]:
        note += " The training updates are not covered: this run as a whole is not private."
    return page.card("Differential privacy", note, _facts(facts), full=True)


def _facts(facts: Mapping[str, Any]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    return f'<dl class="facts">{rows}</dl>'


def _made(summary: Summary) -> str:
    facts = {
        "Version": f"fot {summary['version']}",
        "Method": summary["method"],
        "Seed": summary["seed"],
        "Engine": summary["engine"],
        "Device": summary["device"],
        "Sums": summary.get("aggregation", "plain"),
        "Excluded": f"{summary['excluded']} client updates were left out as invalid",
    }
    if summary.get("clipped"):
        facts["Clipped"] = f"{summary['clipped']} entries exceeded the public clip of the encoded sums"
    return page.card("How it was made", "", _facts(facts), full=True)
