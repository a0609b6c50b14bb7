"""The command line: parse, call, print."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fot import __version__
from fot.errors import UserError

app = typer.Typer(
    name="fot",
    help="Continual federated learning: one global model learns task after task and forgets none. "
    "--version shows the version; --debug, with any command, the trace of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure this machine: memory and speed.", no_args_is_help=True)
data = typer.Typer(
    help="The data sets of the paper: what there is, fetching, checking.", no_args_is_help=True
)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")
# Of the ranks that torchrun starts, the first one speaks.
console = Console(quiet=os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0")

# What typer raises at a command line it cannot parse: click's exception, its own copy of click or not.
_Unparsed: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

RECIPE_HELP = "A recipe's name (see `fot list`) or the path of a TOML file."
Out = Annotated[Path | None, typer.Option(help="Folder of the results; runs/RECIPE/... by default.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one setting, e.g. training.lr=0.1; repeatable."),
]
Partition = Annotated[str | None, typer.Option(help="How data are dealt to clients: iid, shards, ...")]
EngineName = Annotated[str | None, typer.Option(help="Where clients compute.")]
DataDir = Annotated[Path | None, typer.Option(help="Folder of the data sets; FOT_DATA by default.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Job = tuple[Any, Path, dict[str, Any]]
"""An experiment, its folder, and what tells it apart in its summary."""
Together = Annotated[
    int | None,
    typer.Option(
        min=1, help="Runs that train at once, 1 for one after another; by default what memory allows."
    ),
]


@app.command()
def run(
    recipe: Annotated[str | None, typer.Argument(help=RECIPE_HELP)] = None,
    method: Annotated[str | None, typer.Option(help="A method, or your own as package.module:Class.")] = None,
    partition: Partition = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="So many runs: of --seed, and of the seeds after it.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,...",
            help="A run for each value, e.g. method.threshold=0.9,0.95; repeatable, for every combination.",
        ),
    ] = None,
    engine: EngineName = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Out = None,
    sets: Set = None,
    together: Together = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the interrupted run in this folder.")
    ] = None,
) -> None:
    """Run one method on one recipe, for one or several seeds and settings; or go on with a run."""
    from fot.federation.experiment import resolve, swept
    from fot.federation.launch import default_path, settings_of
    from fot.results.table import run_table

    _use_data(data_dir)
    changes = (method, partition, seed, seeds, sweep, engine, device, out, sets, together)
    if (recipe is None) == (resume is None) or (resume and any(c is not None for c in changes)):
        raise UserError("give a recipe, or --resume DIR alone: an interrupted run keeps its settings")
    if resume:
        jobs: list[Job] = [(settings_of(resume), resume, {})]
    else:
        jobs = []
        for values in swept(sweep or ()):
            for s in [seed] if seeds is None else range(seed or 0, (seed or 0) + seeds):
                experiment = resolve(
                    str(recipe), method=method, partition=partition, seed=s, engine=engine, device=device,
                    sets=sets or (), values=values,
                )  # fmt: skip
                path = default_path(out or _root(str(recipe)), experiment, values)
                jobs.append((experiment, path, {"sweep": values} if values else {}))
        if len(jobs) == 1:
            jobs = [(jobs[0][0], out or jobs[0][1], {})]
    summaries = _run_all(jobs, together)
    if len(jobs) > 1:
        _compared([path for _, path, _ in jobs], out or _root(str(recipe)))
    elif not console.quiet:
        console.print()
        console.print(run_table(summaries[0]))
        console.print(f"report: {jobs[0][1] / 'report.html'}", soft_wrap=True)


@app.command()
def compare(
    what: Annotated[
        list[str], typer.Argument(metavar="RECIPE | DIR...", help="A recipe, or folders of runs.")
    ],
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds: 0, 1, ...")] = 3,
    partition: Partition = None,
    engine: EngineName = None,
    device: Device = None,
    data_dir: DataDir = None,
    out: Out = None,
    sets: Set = None,
    together: Together = None,
) -> None:
    """Run several methods over several seeds on one recipe, or compare runs that are there."""
    from fot.federation.experiment import resolve
    from fot.federation.launch import default_path

    _use_data(data_dir)
    if methods:
        if len(what) > 1:
            raise UserError("compare with --methods takes one recipe; leave --methods out to compare folders")
        root = out or _root(what[0])
        experiments = [
            resolve(what[0], method=m, partition=p, seed=s, engine=engine, device=device, sets=sets or ())
            for p in (dict.fromkeys(partition.split(",")) if partition else [None])
            for m in dict.fromkeys(name.strip() for name in methods.split(","))
            for s in range(seeds)
        ]
        paths = [default_path(root, experiment) for experiment in experiments]
        _run_all([(e, path, {}) for e, path in zip(experiments, paths, strict=True)], together)
    else:
        paths = [path for name in what for path in _run_folders(Path(name))]
        root = out or (Path(what[0]) if len(what) == 1 else Path("runs"))
    _compared(paths, root)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs.")]) -> None:
    """Write report.html anew from what a run folder holds."""
    from fot.results import RunFolder, write_comparison, write_report

    if RunFolder(folder).finished:
        written = write_report(folder)
    else:
        written = write_comparison(_run_folders(folder), folder / "comparison.html")
    console.print(f"report: {written}", soft_wrap=True)


@app.command("list")
def list_all() -> None:
    """Show the recipes, methods, benchmarks and models that there are."""
    from fot.benchmarks.catalogue import BENCHMARKS
    from fot.federation.experiment import recipes
    from fot.methods import METHODS
    from fot.models import MODELS

    about = {name: path.read_text(encoding="utf-8").split("\n", 1)[0] for name, path in recipes().items()}
    _table("recipes", {name: line.lstrip("# ") for name, line in about.items()})
    _table("methods", {name: _first_line(method) for name, method in METHODS.items()})
    _table("benchmarks", {name: benchmark.about for name, benchmark in BENCHMARKS.items()})
    _table("models", {name: _first_line(model) for name, model in MODELS.items()})


@data.command("list")
def data_list(data_dir: DataDir = None) -> None:
    """Show the data sets, and which of them are here."""
    from fot.benchmarks.datasets import KNOWN, data_root, find

    places = {name: find(name, data_dir) for name in KNOWN}
    rows = {
        n: f"{KNOWN[n].about}; {f'in {place[0]}' if place else 'not here'}" for n, place in places.items()
    }
    _table(f"data sets (folder: {data_root(data_dir)})", rows)


@data.command("fetch")
def data_fetch(name: str, data_dir: DataDir = None) -> None:
    """Download a data set from its publisher, verify it and unpack it; resumes where it broke off."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from fot.benchmarks.fetch import fetch

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bars: dict[str, Any] = {}

        def show(file: str, had: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=had, total=total)

        folder = fetch(name, data_dir, show)
    console.print(f"{name}: {folder}", soft_wrap=True)


@data.command("check")
def data_check(name: str, data_dir: DataDir = None) -> None:
    """Read a data set and say what it holds."""
    from fot.benchmarks.fetch import check

    for line in check(name, data_dir):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


@bench.command("data")
def bench_data(benchmark: str = "cifar100", data_dir: DataDir = None) -> None:
    """Seconds and memory of loading a benchmark and making every task of its stream."""
    from fot.benchmarks.bench import bench_data as measure

    console.print(str(measure(benchmark, data_dir)), soft_wrap=True)


@bench.command("engine")
def bench_engine(
    work: Annotated[
        str, typer.Argument(help="digits, pmnist, cifar100, 5datasets or miniimagenet.")
    ] = "digits",
    device: str = "cpu",
    precision: str = "tf32",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show instead what the vectorised engine's rounds are made of.")
    ] = False,
) -> None:
    """Rounds per second of the engines and of a plain loop over clients, on the same work."""
    import torch

    from fot.engines import bench as engines

    options: dict[str, Any] = {"device": device, "precision": precision, "rounds": rounds}
    where = f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device
    title = f"{work} on {where}, {precision}"
    if profile:
        from fot.engines.profile import profile_round, profile_table

        console.print(profile_table(profile_round(work, **options), title))
    else:
        console.print(engines.bench_table(engines.bench_engine(work, **options), title))


@bench.command("secagg")
def bench_secagg(
    clients: Annotated[str, typer.Option(help="Cohort sizes, separated by commas.")] = "16,64,256,1024",
    entries: Annotated[
        str, typer.Option(help="Vector lengths, separated by commas.")
    ] = "10000,100000,1400000",
) -> None:
    """Seconds and bytes of a secure sum by stage, beside the plain sum."""
    from fot.aggregation import bench as secagg

    costs = secagg.bench_secagg(_numbers("--clients", clients), _numbers("--entries", entries))
    console.print(secagg.bench_table(costs))


@bench.command("sketch")
def bench_sketch() -> None:
    """Extra memory of the sketch of a 2048-wide layer over 100,000 samples."""
    from fot.subspace.bench import sketch_memory

    figures = sketch_memory()
    _table("bench sketch", {name: str(value) for name, value in figures.items()})
    if float(figures["extra_mb"]) > float(figures["limit_mb"]):
        raise typer.Exit(1)


def main() -> None:
    """Run a command: a user's mistake is one line and exit code 2, ours 1; ``--debug`` shows a trace."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    if arguments == ["--version"]:
        print(f"fot {__version__}")
        return
    try:
        sys.exit(app(args=arguments, standalone_mode=False) or 0)
    except (UserError, _Unparsed) as error:
        if debug:
            traceback.print_exc()
        text = str(error) if isinstance(error, UserError) else error.format_message()
        print(f"fot: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        print("fot: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"fot: internal error: {type(error).__name__}: {error} (--debug shows where)", file=sys.stderr)
        sys.exit(1)


def _run_all(jobs: list[Job], together: int | None) -> list[dict[str, Any]]:
    """Run experiments in their folders, those that are alike side by side; the summaries in their order."""
    from fot.federation.launch import finished, groups, launch_together
    from fot.results.progress import display
    from fot.results.table import varied

    titles = []
    for number, (experiment, path, note) in enumerate(jobs, start=1):
        partition = experiment.benchmark.get("partition", "iid")
        names = (experiment.benchmark["name"], experiment.method["name"], partition)
        prefix = f"{number}/{len(jobs)} " if len(jobs) > 1 else ""
        titles.append(prefix + " ".join(map(str, (*names, *varied(note), f"seed {experiment.seed}"))))
        if finished(experiment, path):
            console.print(f"{titles[-1]}: already run, read from {path}", highlight=False, soft_wrap=True)
    summaries: dict[int, dict[str, Any]] = {}
    for group in groups([experiment for experiment, _, _ in jobs], together):
        with display(console, [titles[number] for number in group]) as shown:
            found = launch_together(
                [(jobs[n][0], jobs[n][1], one) for n, one in zip(group, shown, strict=True)],
                [jobs[n][2] for n in group],
            )
            summaries |= dict(zip(group, found, strict=True))
    return [summaries[number] for number in range(len(jobs))]


def _compared(paths: list[Path], root: Path) -> None:
    """Write and print the comparison of finished runs."""
    from fot.results import RunFolder, write_comparison
    from fot.results.table import comparison_table

    if console.quiet:
        return
    summaries = [RunFolder.open(path).read_summary() for path in paths]
    report = write_comparison(paths, root / "comparison.html")
    console.print()
    console.print(comparison_table(summaries))
    console.print(f"report: {report}", soft_wrap=True)


def _use_data(data_dir: Path | None) -> None:
    """Where data lie is no setting of a run: it goes by the environment, as FOT_DATA does."""
    if data_dir is not None:
        os.environ["FOT_DATA"] = str(data_dir)


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise UserError(
            f"{option}: {text!r} is not allowed; allowed: whole numbers, separated by commas"
        ) from None


def _root(recipe: str) -> Path:
    return Path("runs") / Path(recipe).stem


def _run_folders(folder: Path) -> list[Path]:
    """The folder itself where it is a finished run, or the finished runs right below it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder of runs (to compare methods on a recipe: --methods a,b)")
    found = [path for path in (folder, *sorted(folder.iterdir())) if (path / "summary.json").exists()]
    if not found:
        raise UserError(f"{folder} holds no finished run (no summary.json)")
    return found


def _table(title: str, rows: dict[str, str]) -> None:
    table = Table(title=title, title_justify="left", box=None, show_header=False, padding=(0, 2))
    for name, text in rows.items():
        table.add_row(f"[bold]{name}", text)
    console.print(table)
    console.print()


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().split("\n", 1)[0]


if __name__ == "__main__":
    main()
