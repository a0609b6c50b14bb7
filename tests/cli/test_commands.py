"""The command line as a user meets it: exit codes, one-line errors, plain text in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fot
from fot import cli

QUICK = ["--set", "benchmark.tasks=2", "--set", "training.rounds=1", "--set", "model.hidden=[8]"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Call ``fot`` in an empty folder: returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fot", *arguments])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return int(str(code)), out, err

    return call


def test_version(call):
    assert call("--version") == (0, f"fot {fot.__version__}\n", "")


def test_list_names_all_there_is(call):
    code, out, _ = call("list")
    assert code == 0 and "\x1b" not in out
    for name in ("recipes", "digits", "methods", "fedavg", "fot", "benchmarks", "pmnist", "models", "mlp"):
        assert name in out
    assert "Permuted handwritten digits" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "digist"], "fot: no recipe or file 'digist'; did you mean digits?"),
        (["run", "digits", "--set", "training.lrr=1"], "fot: training.lrr: no such option; did you mean lr?"),
        (
            ["run", "digits", "--method", "fott"],
            "fot: method.name: no method is called 'fott'",
        ),
        (["run", "digits", "--device", "cuda:99"], "fot: engine.device: 'cuda:99'"),
        (["run", "digits", "--partition", "odd"], "fot: "),
        (["compare", "digits"], "fot: digits is not a folder of runs"),
        (["compare", "digits", "pmnist", "--methods", "fot"], "fot: compare with --methods takes one recipe"),
        (["report", "nowhere"], "fot: nowhere is not a folder"),
        (["report", "."], "fot: . holds no finished run"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(call, arguments, said):
    code, out, err = call(*arguments)
    assert code == 2 and out == ""
    assert err.startswith(said) and err.count("\n") == 1 and "Traceback" not in err
    assert not Path("runs").exists()  # and it leaves nothing behind


def test_debug_shows_where(call):
    code, _, err = call("--debug", "run", "digist")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("fot: no recipe")


def test_our_own_mistake_is_code_1(call, monkeypatch):
    from fot.federation import experiment

    def broken(*_, **__):
        raise ZeroDivisionError("of our making")

    monkeypatch.setattr(experiment, "resolve", broken)
    code, _, err = call("run", "digits")
    assert (
        code == 1 and err == "fot: internal error: ZeroDivisionError: of our making (--debug shows where)\n"
    )
    code, _, err = call("run", "digits", "--debug")
    assert code == 1 and "Traceback" in err


def test_an_interruption_is_code_130(call, monkeypatch):
    from fot.federation import experiment

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "resolve", interrupted)
    code, out, err = call("run", "digits")
    assert code == 130 and out == "" and "Traceback" not in err


def test_run_twice_report_and_compare(call):
    """One walk through all that a user does with runs."""
    code, out, err = call("run", "digits", *QUICK)
    assert (code, err) == (0, "")
    folder = Path("runs/digits/fot-iid-seed0")
    assert f"report: {folder / 'report.html'}" in out and "task 2/2" in out and "\x1b" not in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["method"] == "fot" and len(summary["accuracy"]) == 2
    assert {"experiment.toml", "events.jsonl", "model.safetensors", "memory.safetensors", "report.html"} <= {
        file.name for file in folder.iterdir()
    }

    before = (folder / "summary.json").stat().st_mtime_ns
    code, out, _ = call("run", "digits", *QUICK)
    assert code == 0 and "already run" in out and "task 2/2" not in out
    assert (folder / "summary.json").stat().st_mtime_ns == before

    code, out, err = call("run", "digits", *QUICK, "--set", "training.lr=0.2", "--out", str(folder))
    assert code == 2 and "holds a run of other settings" in err
    code, out, _ = call("run", "digits", *QUICK, "--set", "training.lr=0.2")
    assert code == 0 and Path("runs/digits/fot-iid-seed0-2/summary.json").exists()

    (folder / "report.html").unlink()
    assert call("report", str(folder))[0] == 0 and (folder / "report.html").exists()
    code, out, _ = call("report", "runs/digits")
    assert code == 0 and Path("runs/digits/comparison.html").exists()

    code, out, _ = call("compare", "digits", "--methods", "fedavg,fot", "--seeds", "1", *QUICK)
    assert code == 0 and "already run" in out and "2/2" in out and "\x1b" not in out
    assert Path("runs/digits/fedavg-iid-seed0/summary.json").exists()
    code, out, _ = call("compare", str(folder), "runs/digits/fedavg-iid-seed0", "--out", "both")
    assert code == 0 and Path("both/comparison.html").exists()

    code, out, _ = call("run", str(folder), "--seed", "4", "--out", "again")  # from a run's own settings
    assert code == 0 and json.loads(Path("again/summary.json").read_text())["seed"] == 4


OWN = '''
import torch
from fot.benchmarks.stream import Task, TaskStream
from fot.methods import FedAvg


class Halved(FedAvg):
    """Moves half as far."""

    def aggregate(self, network, server, mean_update):
        return super().aggregate(network, server, {n: d / 2 for n, d in mean_update.items()})


def net(width: int = 4):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))


def blobs(seed: int, tasks: int = 2):
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(40) % 2
    x = torch.randn(40, 3, generator=g) + 4.0 * y.unsqueeze(1)

    def make(index):
        return Task(index, f"blob {index}", 2, x, y, x, y, (torch.arange(20), torch.arange(20, 40)))

    return TaskStream("blobs", 2, False, (3,), tasks, make)
'''
RECIPE = """
[benchmark]
name = "mine_own_blobs:blobs"
[model]
name = "mine_own_blobs:net"
width = 6
[method]
name = "mine_own_blobs:Halved"
[training]
rounds = 3
lr = 0.1
"""


def test_ones_own_method_model_and_benchmark_from_the_current_folder(tmp_path):
    """As a process of its own, in a pipe: the installed command, the current folder, no escape codes."""
    (tmp_path / "mine_own_blobs.py").write_text(OWN)
    (tmp_path / "blobs.toml").write_text(RECIPE)
    source = str(Path(fot.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": source, "TERM": "xterm-256color"}
    command = (
        "import sys; sys.path.pop(0); from fot.cli import main; main()"  # without the folder, as a script is
    )
    done = subprocess.run(
        [sys.executable, "-c", command, "run", "blobs.toml"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and "task 2/2" in done.stdout
    (summary,) = tmp_path.glob("runs/blobs/*/summary.json")
    read = json.loads(summary.read_text())
    assert read["method"] == "mine_own_blobs:Halved" and read["tasks"] == ["blob 0", "blob 1"]
    assert read["parameters"] == 24 + 14


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "digits", "--sed", "3"], "--sed"),
        (["run", "digits", "--seed", "-1"], "--seed"),
        (["compare", "digits", "--methods", "fot", "--seeds", "0"], "--seeds"),
        (["bogus"], "bogus"),
        (["bench", "secagg", "--clients", "abc"], "--clients: 'abc'"),
        (["run", "digits", "--set", "methods.fto.threshold=1"], "methods.fto"),
        (["run", "digits", "--set", "model.inputs=10"], "samples of shape (64,)"),
        (["run", "digits", "--set", "model.classes=3"], "10 classes"),
    ],
)
def test_what_cannot_be_parsed_or_does_not_fit_is_one_line_too(
    arguments, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fot", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert error.startswith("fot: ") and said in error and error.count("\n") == 1


@pytest.mark.parametrize("setting", ["method.sketch=abc", 'method.protect=["nope"]'])
def test_a_methods_options_are_held_against_the_model_before_training(setting, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fot", "run", "digits", "--set", setting])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith(f"fot: {setting.split('=')[0]}: ")
    assert not (tmp_path / "runs").exists()


def test_several_seeds_and_settings_side_by_side(call):
    sweep = ["--seeds", "2", "--sweep", "method.threshold=0.5,0.9"]
    code, out, err = call("run", "digits", *QUICK, *sweep, "--seed", "3")
    assert (code, err) == (0, "")
    names = sorted(path.name for path in Path("runs/digits").iterdir() if path.is_dir())
    assert names == [f"fot-iid-threshold-{t}-seed{s}" for t in ("0.5", "0.9") for s in (3, 4)]
    assert "FOT (threshold 0.5)" in " ".join(out.split()) and "report: runs/digits/comparison.html" in out
    assert "4/4 digits fot iid threshold 0.9 seed 4" in out
    summary = json.loads(Path("runs/digits", names[0], "summary.json").read_text())
    assert summary["sweep"] == {"method.threshold": 0.5} and summary["seed"] == 3
    again = call("run", "digits", *QUICK, *sweep, "--seed", "3")
    assert again[0] == 0 and again[1].count("already run") == 4


def test_runs_one_after_another_end_alike(call):
    for out, together in (("a", ()), ("b", ("--together", "1"))):
        code, _, _ = call("run", "digits", *QUICK, "--seeds", "2", "--out", out, *together)
        assert code == 0
    for seed in range(2):
        one, other = (json.loads(Path(d, f"fot-iid-seed{seed}", "summary.json").read_text()) for d in "ab")
        assert one["acc"] == pytest.approx(other["acc"], abs=1)


def test_one_value_is_one_run(call):
    code, out, _ = call("run", "digits", *QUICK, "--seeds", "1", "--out", "here")
    assert code == 0 and Path("here/summary.json").exists() and "report: here/report.html" in out


@pytest.mark.parametrize("sweep", ["method.threshold", "=1,2", "method.threshold="])
def test_a_sweep_that_is_none(call, sweep):
    code, _, err = call("run", "digits", "--sweep", sweep)
    assert code == 2 and err.startswith(f"fot: --sweep {sweep}: write it as key=value,value")
