"""What the documents show is run: Python, recipes and, in ``docs/your-own.md``, the commands.

A block whose first line is a comment with a file's name becomes that file; other Python blocks of a
document run one after another in one namespace.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fot.cli
from fot.benchmarks import build
from fot.engines.base import Training
from fot.federation.experiment import recipes, resolve
from fot.federation.run import Run
from fot.methods import Method
from fot.models import mlp

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/your-own.md"]


def blocks(document: str) -> list[tuple[str, str]]:
    """The fenced blocks of a document: language and text."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the user's data, left without the user's modules."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import folder_of_images
    import table

    folder_of_images.write_pictures(tmp_path / "pictures")
    table.write_table(tmp_path / "cancer.csv")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_shows_runs(document: str, folder: Path) -> None:
    namespace: dict[str, object] = {"__name__": "document"}
    ran = 0
    for language, text in blocks(document):
        named = re.match(r"# (\S+\.(?:py|toml))\n", text)
        if named and language in ("python", "toml"):
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language == "python":
            exec(compile(text, document, "exec", dont_inherit=True), namespace)
            ran += 1
        elif language == "sh" and document == "docs/your-own.md":
            for line in text.splitlines():
                command, *arguments = shlex.split(line)
                assert command == "fot", line
                fot.cli.app(args=arguments, standalone_mode=False)
                ran += 1
    for method in namespace.values():
        if isinstance(method, type) and method.__module__ == "document" and issubclass(method, Method):
            torch.manual_seed(0)
            training = Training(rounds=5, lr=0.1)
            summary = Run(build("digits", tasks=2, clients=3), mlp(), method(), training=training)()
            assert summary["acc"] > 30  # it learns
    for recipe in folder.glob("*.toml"):
        assert resolve(recipe).method["name"]
        ran += 1
    assert ran
    if document == "docs/your-own.md":
        made = {path.relative_to(folder / "runs").parts[0] for path in folder.glob("runs/*/*/summary.json")}
        assert made == {"mine", "table", "drift"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert all((ROOT / document).parent.joinpath(link).exists() for link in links if link), links


def test_every_recipe_and_command_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = [f"fot {c.name or c.callback.__name__}" for c in fot.cli.app.registered_commands if c.callback]
    groups = [f"fot {group.name}" for group in fot.cli.app.registered_groups]
    names = [f"`{name}`" for name in recipes() if not name.endswith("-quick")]
    assert [name for name in (*commands, *groups, *names) if name not in readme] == []
