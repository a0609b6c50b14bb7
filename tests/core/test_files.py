from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fot.files import write_whole


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fot.files.os.fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_it_is_on_the_disk_before_it_is_in_its_place(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr("fot.files.os.fsync", lambda handle: steps.append("synced"))
    moved = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: (steps.append("moved"), moved(self, target))[1])
    write_whole(tmp_path / "file", b"x")
    assert steps == ["synced", "moved"]
