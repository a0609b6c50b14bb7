"""Imports go one way: what ``ARCHITECTURE.md`` says each room may import is what the code imports at most."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "fot"


def allowed() -> dict[str, set[str]]:
    """The table of rooms: each room, and the rooms it may import."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## Rooms\n")[1].split("\n## ")[0]
    rules: dict[str, set[str]] = {}
    for rooms, may in re.findall(r"^\| (`[^|]*`) \| [^|]* \| ([^|]*) \|$", section, flags=re.MULTILINE):
        above = set(rules)
        for room in re.findall(r"`(\w+)/?`", rooms):
            rules[room] = above if may == "everything above" else set(re.findall(r"\w+", may)) - {"nothing"}
    return rules


def imports(package: Path) -> Iterator[tuple[Path, str, str]]:
    """(file, its room, the room it imports), of every import wherever it stands in a file."""
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                raise AssertionError(f"{path}: write imports in full")
            if isinstance(node, ast.ImportFrom):
                named = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            else:
                continue
            for name in named:
                root, _, rest = name.partition(".")
                if root == package.name and rest and not rest.startswith("__"):
                    yield path.relative_to(package), room, rest.split(".")[0]


def breaches(package: Path, rules: Mapping[str, set[str]]) -> list[str]:
    """Imports that the rules do not allow."""
    return [
        f"{path} imports {other}"
        for path, room, other in imports(package)
        if other not in {room, *rules.get(room, set())} and room != "__init__"
    ]


def test_no_room_imports_what_it_may_not() -> None:
    assert breaches(PACKAGE, allowed()) == []


def test_the_table_names_every_room_and_allows_only_what_stands_above() -> None:
    rules = allowed()
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert set(rules) == rooms - {"__init__"}
    order = list(rules)
    for room, may in rules.items():
        assert may <= set(order[: order.index(room)]), room


def test_every_room_is_a_package() -> None:
    """A folder that is none goes on pytest's path itself, and its files hide Python's own of their names."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    "line",
    [
        "from fot.federation.run import Run",
        "import fot.cli",
        "from fot import engines",
        "def late():\n    from fot.methods import FOT",
    ],
)
def test_an_import_upwards_is_seen(tmp_path: Path, line: str) -> None:
    room = tmp_path / "fot" / "subspace"
    room.mkdir(parents=True)
    (room / "memory.py").write_text(f"from fot.layers import Layer\n{line}\n", encoding="utf-8")
    assert len(breaches(tmp_path / "fot", allowed())) == 1
