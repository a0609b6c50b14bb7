"""What `import fot` offers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fot


def test_every_name_is_there_and_types_know_it():
    tree = ast.parse(Path(fot.__file__).read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for home, names in fot._HOMES.items():
        for name in names:
            assert getattr(fot, name).__name__.lower() == name.lower()
            assert name in dir(fot)
            assert typed[name] == home


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fot.nothing  # noqa: B018
