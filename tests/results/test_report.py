from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import results_browser
from results_browser import Browser
from results_synthetic import make_run

from fot.errors import UserError
from fot.results import RunFolder, charts, write_comparison, write_report
from fot.results.report import run_page

VOID = {"meta", "link", "br"}


class Balanced(HTMLParser):
    """Fails where a tag is closed that was not the last to be opened; gathers text and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("href", "src")]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def heat_cells(html: str) -> list[str]:
    table = html.split("<table", 2)[1]
    return re.findall(r'<td class="ink heat"[^>]*>([^<]*)</td>', table)


def test_the_report_holds_every_accuracy_and_the_headline(tmp_path):
    summary = make_run(tmp_path, tasks=5)
    html = write_report(tmp_path).read_text()
    page = Balanced(html)
    assert heat_cells(html) == [f"{v:.1f}" for row in summary["accuracy"] for v in row if v is not None]
    assert (
        f"FOT learnt 5 tasks over 125 clients: {summary['acc']:.1f}\N{NO-BREAK SPACE}% on average"
        in page.text
    )
    for said in ("permutation 3", "body.4", "5.15 GB", "weight_decay", "1e-05", "vectorized"):
        assert said in page.text
    assert page.links == ["data:,"]
    assert "<script" not in html and "url(" not in html and "@import" not in html


def test_whatever_a_run_is_named_cannot_alter_the_page(tmp_path):
    evil = "<script>alert(1)</script>\"'&"
    make_run(
        tmp_path, tasks=2, method=evil, benchmark=evil, partition=evil, device=evil,
        layers={evil: 10}, subspace={evil: [10.0, 20.0]},
    )  # fmt: skip
    folder = RunFolder.open(tmp_path)
    folder.write_experiment(f"['''{evil[:-3]}''']\nvalue = '''{evil[:-3]}'''\n")
    html = write_report(tmp_path).read_text()
    assert "<script" not in html
    assert Balanced(html).text.count("<script>alert(1)</script>") >= 5
    folder.write_experiment(f"{evil} is no TOML")
    assert "<script" not in write_report(tmp_path).read_text()
    assert "<script" not in write_comparison([tmp_path], tmp_path / "all.html").read_text()


def test_one_task_no_subspace_and_no_events_still_make_a_page(tmp_path):
    make_run(tmp_path, tasks=1, method="fedavg", fwt=None, subspace=None, layers={}, rounds=10)
    RunFolder.open(tmp_path).events.unlink()
    page = Balanced(write_report(tmp_path).read_text())
    assert "nothing to forget" in page.text and "Subspace in use" not in page.text
    assert "Accuracy over time" in page.text


def test_without_logged_evaluations_the_matrix_is_drawn_and_ends_are_the_same(tmp_path):
    make_run(tmp_path, tasks=3)
    said = re.compile(r"<title>(\d [^<]*: [\d.]+ % at the end)</title>")
    logged = said.findall(write_report(tmp_path).read_text())
    RunFolder.open(tmp_path).events.write_text("")
    assert logged == said.findall(write_report(tmp_path).read_text())
    assert len(logged) == 9  # three tasks, drawn for three widths of page


def test_an_unfinished_run_has_no_report(tmp_path):
    RunFolder.create(tmp_path)
    with pytest.raises(UserError, match="no finished run"):
        write_report(tmp_path)


def test_the_comparison_links_the_reports_below_it_alone(tmp_path):
    below, beside = tmp_path / "out" / "fot 1", tmp_path / "beside"
    for path, method in ((below, "fot"), (beside, "fedavg")):
        make_run(path, method=method, tasks=3)
        write_report(path)
    target = write_comparison([below, beside], tmp_path / "out")
    assert target == tmp_path / "out" / "report.html"
    page = Balanced(target.read_text())
    assert page.links == ["data:,", "fot%201/report.html"]
    assert "FedAvg" in page.text and "Accuracy as tasks arrive" in page.text


def test_a_method_on_two_partitions_has_a_section_for_each(tmp_path):
    for n, partition in enumerate(("iid", "shards")):
        make_run(tmp_path / str(n), partition=partition, tasks=2)
    html = write_comparison([tmp_path / "0", tmp_path / "1"], tmp_path / "both.html").read_text()
    assert re.findall(r'<h2 class="section">([^<]*)<', html) == [
        "permuted-mnist · iid",
        "permuted-mnist · shards",
    ]


def contrast(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def rgb(text: str) -> tuple[float, ...]:
    if text.startswith("#"):
        return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(map(float, re.findall(r"[\d.]+", text)))


def test_lines_stand_out_from_either_page():
    colours = [charts.category(n) for n in range(8)] + [charts.ramp(n, 20) for n in range(20)]
    for light, dark in [*colours, charts.ACCENT, charts.LOSS, charts.QUIET]:
        assert contrast(rgb(light), rgb("#ffffff")) > 3
        assert contrast(rgb(dark), rgb("#171b20")) > 3
    assert len({charts.ramp(n, 20) for n in range(20)}) == 20


def test_ticks_enclose_the_data_and_labels_keep_their_order():
    for low, high in ((0.0, 100.0), (91.2, 91.3), (50.0, 50.0), (-3.0, 12.0)):
        ticks = charts.round_ticks(low, high)
        assert ticks[0] <= low and high <= ticks[-1] and 2 <= len(ticks) <= 6
    placed = charts._spread([50.0, 49.0, 51.0, 200.0], 10, 0, 100)
    assert placed[1] < placed[0] < placed[2] < placed[3] <= 100
    assert min(b - a for a, b in zip(sorted(placed), sorted(placed)[1:], strict=False)) >= 10


# In a real browser.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if results_browser.find() is None:
        pytest.skip("no Chromium with chromedriver here: the report is not checked in a browser")
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    make_run(root / "run")
    make_run(root / "large", tasks=20, depth=12, rounds=50, partition="a-very-long-word-" * 6)
    for n, method in enumerate(("fedavg", "fot", "my_package.methods:AMethodWithALongName")):
        make_run(root / "all" / method.rpartition(":")[2], method=method, seed=n, tasks=5, rate=1.0 / (n + 1))
        write_report(root / "all" / method.rpartition(":")[2])
    return {
        "run": write_report(root / "run"),
        "large": write_report(root / "large"),
        "all": write_comparison(sorted((root / "all").iterdir()), root / "all"),
    }


@pytest.mark.browser
@pytest.mark.parametrize("name", ["run", "large", "all"])
@pytest.mark.parametrize("width", [360, 560, 600, 768, 1200])
def test_the_page_fits_loads_nothing_and_has_no_errors(browser, pages, name, width):
    browser.show(pages[name], width=width)
    wide, inner = browser.ask("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide <= inner
    # No text of a chart may be cut off at the edge of its drawing.
    cut = browser.ask(
        "const shown = [...document.querySelectorAll('svg.chart')].filter(s => s.getClientRects().length);"
        " return shown.flatMap(s => {"
        " const box = s.getBoundingClientRect(); return [...s.querySelectorAll('text')].filter(t => {"
        " const r = t.getBoundingClientRect(); return r.left < box.left - 1 || r.right > box.right + 1;"
        " }).map(t => t.textContent); })"
    )
    assert cut == []
    # Each chart is shown at one of its three sizes, the one whose type can be read.
    sizes = browser.ask(
        "return [...document.querySelectorAll('svg.chart text')].filter(t => t.getClientRects().length)"
        ".map(t => t.getScreenCTM().a * parseFloat(getComputedStyle(t).fontSize))"
    )
    assert len(sizes) > 20 and 9 <= min(sizes) <= max(sizes) <= 20
    # Nothing but a box that scrolls by itself reaches out of its card.
    out = browser.ask(
        "return [...document.querySelectorAll('.card *, .tile *')].filter(e => !e.closest('.scroll, .unseen')"
        " && e.getClientRects().length && e.closest('.card, .tile').getBoundingClientRect().right + 1"
        " < e.getBoundingClientRect().right).map(e => e.outerHTML.slice(0, 80))"
    )
    assert out == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:"))] == []
    assert browser.log("browser") == []


@pytest.mark.browser
def test_every_accuracy_is_seen_on_the_page(browser, pages):
    summary = RunFolder.open(pages["run"].parent).read_summary()
    for width in (360, 1200):
        browser.show(pages["run"], width=width)
        rows = browser.ask(
            "return [...document.querySelector('.heatmap').tBodies[0].rows]"
            ".map(r => [...r.cells].slice(1).map(c => c.innerText))"
        )
        assert rows == [["" if v is None else f"{v:.1f}" for v in row] for row in summary["accuracy"]]


@pytest.mark.browser
def test_light_and_dark_differ_and_both_can_be_read(browser, pages):
    script = """
      const flat = (e) => { let [r, g, b, a] = [0, 0, 0, 0];
        for (; e && a < 1; e = e.parentElement) {
          const m = getComputedStyle(e).backgroundColor.match(/[\\d.]+/g).map(Number);
          const o = (m[3] ?? 1) * (1 - a);
          r += m[0] * o; g += m[1] * o; b += m[2] * o; a += o; }
        return [r, g, b]; };
      return [...document.querySelectorAll('h1, h2, h3, p, dt, dd, td, th, small, li, text')]
        .filter(e => e.textContent.trim() && e.getClientRects().length)
        .map(e => [e.textContent.trim(),
                   getComputedStyle(e)[e.tagName == 'text' ? 'fill' : 'color'], flat(e)]);
    """
    grounds = []
    for dark in (False, True):
        browser.show(pages["run"], dark=dark)
        found = browser.ask(script)
        assert len(found) > 150
        for text, colour, ground in found:
            assert contrast(rgb(colour)[:3], tuple(ground)) >= 4.5, (dark, text, colour, ground)
        grounds.append(rgb(browser.ask("return getComputedStyle(document.body).backgroundColor")))
    assert contrast(*grounds) > 10


def test_privacy_is_reported_where_it_was_kept(tmp_path):
    make_run(tmp_path)
    folder = RunFolder.open(tmp_path)
    summary, events, experiment = folder.read_summary(), folder.read_events(), folder.read_experiment()
    assert "Differential privacy" not in run_page(summary, events, experiment)
    privacy = {
        "epsilon": 4.25, "epsilon_released": 4.25, "delta": 1e-5, "asked": 5.0, "calibration": "paper",
        "noise": 0.685, "releases": 4, "covers": ["statistics"],
    }  # fmt: skip
    shown = run_page(
        {**summary, "privacy": privacy, "clipped": 12, "aggregation": "secure"}, events, experiment
    )
    for text in (
        "4.25 at delta 1e-05",
        "over 4 released sums",
        "5, by the paper",
        "0.685 times",
        "12 entries",
        "secure",
    ):
        assert text in shown
    unbounded = run_page({**summary, "privacy": {**privacy, "epsilon": None}}, events, experiment)
    assert "no bound at delta" in unbounded


def test_what_was_left_free_is_named_with_its_reason(tmp_path):
    make_run(tmp_path)
    summary = RunFolder.open(tmp_path).read_summary()
    assert "Not protected" not in run_page(summary, [], "")
    shown = run_page({**summary, "unprotected": {"norm<1>": "a norm layer"}}, [], "")
    assert "Not protected" in shown and "<dt>norm&lt;1&gt;</dt><dd>a norm layer</dd>" in shown
