from __future__ import annotations

import io
import math

import pytest
from results_synthetic import make_run
from rich.console import Console

from fot.results import RunFolder
from fot.results.comparison import comparison_page
from fot.results.table import (
    comparison_markdown,
    comparison_rows,
    comparison_table,
    format_bytes,
    group_runs,
    headline,
    run_markdown,
    run_table,
)


def printed(table, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_groups_are_means_with_the_sample_standard_deviation(tmp_path):
    runs = [
        make_run(tmp_path / f"{m}{s}", method=m, seed=s, tasks=2)
        for m in ("fedavg", "fot")
        for s in (0, 1, 2)
    ]
    for run, acc in zip(runs, [70.0, 71.0, 75.0, 90.0, 90.0, 90.0], strict=True):
        run["acc"] = acc
    headings, rows = comparison_rows(runs)
    assert [row[:4] for row in rows] == [
        ["permuted-mnist", "iid", "FedAvg", "3"],
        ["permuted-mnist", "iid", "FOT", "3"],
    ]
    column = headings.index("ACC %")
    # The sample deviation divides by n - 1: squares 4 + 1 + 9 = 14, over 2, is 7.
    assert rows[0][column] == f"72.00 ± {math.sqrt(7):.2f}"
    assert rows[1][column] == "90.00"
    used = headings.index("Subspace %")
    assert rows[0][used] == "–" and rows[1][used] != "–"
    assert rows[1][headings.index("Sent")] == format_bytes(5_110_480_000 + 42_600_000)


def test_partitions_and_benchmarks_are_kept_apart(tmp_path):
    run = make_run(tmp_path / "run", tasks=2)
    rows = comparison_rows([run, {**run, "partition": "shards"}, {**run, "benchmark": "digits"}, run])[1]
    assert [row[:4] for row in rows] == [
        ["permuted-mnist", "iid", "FOT", "2"],
        ["permuted-mnist", "shards", "FOT", "1"],
        ["digits", "iid", "FOT", "1"],
    ]


def test_the_terminal_and_markdown_say_the_same(tmp_path):
    run = make_run(tmp_path / "run", tasks=3, partition="a|b [red]")
    shown, markdown = printed(comparison_table([run], title="a [b]")), comparison_markdown([run])
    assert "a [b]" in shown and "permuted-mnist, a|b [red]" in printed(comparison_table([run]))
    other = {**run, "benchmark": "other", "partition": "iid"}
    shown = printed(comparison_table([run, other]), width=120)
    headings, rows = comparison_rows([run])
    for heading, cell in zip(headings, rows[0], strict=True):
        assert heading == "BWT" or cell in shown
        assert cell.replace("|", r"\|") in markdown
    lines = markdown.splitlines()
    assert len(lines) == 3 and len({line.replace(r"\|", "").count("|") for line in lines}) == 1


@pytest.mark.parametrize("partitions", [["iid"], ["iid", "shards"]])
def test_the_comparison_fits_a_terminal_of_80_columns_unbroken(tmp_path, partitions):
    runs = [
        make_run(tmp_path / f"{m}{s}{p}", method=m, seed=s, partition=p)
        for p in partitions
        for m in ("fedavg", "fot")
        for s in (0, 1)
    ]
    shown = printed(comparison_table(runs))
    assert "…" not in shown
    headings, rows = comparison_rows(runs)
    for row in rows:
        for heading, cell in zip(headings, row, strict=True):
            assert heading == "BWT" or all(part in shown for part in cell.split(" ± "))


def test_ten_tasks_fit_a_terminal_of_80_columns(tmp_path):
    run = make_run(tmp_path / "run", tasks=10)
    shown = printed(run_table(run))
    assert "…" not in shown and "10 permutation 9" in shown
    assert all(f"{value:.1f}" in shown for row in run["accuracy"] for value in row if value is not None)


def test_one_run_shows_its_matrix(tmp_path):
    run = make_run(tmp_path / "run", tasks=3)
    for text in (printed(run_table(run)), run_markdown(run)):
        assert headline(run) in " ".join(text.split())  # the terminal wraps it to the table
        for row in run["accuracy"]:
            for value in row:
                assert value is None or f"{value:.2f}" in text


@pytest.mark.parametrize(
    ("fgt", "said"),
    [
        (None, ": 90.1 %."),
        (6.26, ": 90.1 % on average at the end, 6.3 points forgotten."),
        (-0.01, ": 90.1 % on average at the end, 0.0 points forgotten."),
        (-1.25, ": 90.1 % on average at the end, 1.2 points gained on earlier tasks."),
    ],
)
def test_the_headline_reads_well_at_every_sign(fgt, said):
    run = {"method": "fot", "tasks": ["a"], "clients": 20, "acc": 90.14, "fgt": fgt}
    assert headline(run) == "FOT learnt 1 task over 20 clients" + said


def test_runs_of_other_settings_are_not_taken_for_other_seeds(tmp_path):
    run = make_run(tmp_path / "run", tasks=3)
    one, same, other = (
        {**run, "seed": s, "settings": d} for s, d in ((0, "aaaaaaa1"), (1, "aaaaaaa1"), (0, "bbbbbbb2"))
    )
    headings, rows = comparison_rows([one, other, same])
    assert [row[headings.index("Seeds")] for row in rows] == ["2", "1"]
    assert [row[headings.index("Method")] for row in rows] == ["FOT (aaaaaa)", "FOT (bbbbbb)"]
    assert comparison_rows([one, same])[1][0][2] == "FOT"


def test_runs_of_a_sweep_are_told_apart_by_what_it_varied(tmp_path):
    make_run(tmp_path, method="fot", seed=0, tasks=2)
    base = RunFolder.open(tmp_path).read_summary()
    runs = [
        {**base, "settings": f"digest{v}", "sweep": {"method.threshold": v}, "seed": s}
        for v in (0.9, 0.95)
        for s in (0, 1)
    ]
    assert [(g.name, len(g.runs)) for g in group_runs(runs)] == [
        ("FOT (threshold 0.9)", 2),
        ("FOT (threshold 0.95)", 2),
    ]
    html = comparison_page(runs, [("a", runs[0])])
    assert "FOT (threshold 0.95) ends at" in html and ">threshold 0.95</text>" in html
    assert "FOT, permuted-mnist, iid, threshold 0.9, seed 0" in html
