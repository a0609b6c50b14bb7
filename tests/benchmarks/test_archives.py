"""Unpacking: whole archives, broken ones, and those that would do harm."""

from __future__ import annotations

import errno
import gzip
import io
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from benchmarks_files import CONTENT, damaged, tar_of, zip_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.benchmarks import fetch as fetching
from fot.benchmarks.fetch import unpack
from fot.errors import UserError


def link(kind: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        info = tarfile.TarInfo("inside")
        info.type, info.linkname = kind, "/etc"
        tar.addfile(info)
        payload = tarfile.TarInfo("inside/passwd")
        payload.size = 2
        tar.addfile(payload, io.BytesIO(b"no"))
    return out.getvalue()


def zipped_link() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        info = zipfile.ZipInfo("inside")
        info.external_attr = 0o120777 << 16
        packed.writestr(info, "/etc")
    return out.getvalue()


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.tar.gz", tar_of({"good": b"1", "../out": b"2"}), "outside its folder"),
        ("a.tar.gz", tar_of({"/tmp/out": b"2"}), "outside its folder"),
        ("a.tar.gz", tar_of({"x/../../out": b"2"}), "outside its folder"),
        ("a.tar.gz", link(tarfile.SYMTYPE), "link or a device"),
        ("a.tar.gz", link(tarfile.LNKTYPE), "link or a device"),
        ("a.tar.gz", link(tarfile.FIFOTYPE), "link or a device"),
        ("a.tar.gz", tar_of({"good": CONTENT})[:-200], "cannot be read"),
        ("a.tar.gz", b"", "cannot be read"),
        ("a.tar.gz", tar_of({"same": b"1", "same/below": b"2"}), "cannot be read"),
        ("a.zip", zip_of({"good": b"1", "../out": b"2"}), "outside its folder"),
        ("a.zip", zip_of({"/out": b"2"}), "outside its folder"),
        ("a.zip", zip_of({"c:out": b"2"}), "outside its folder"),
        ("a.zip", zipped_link(), "link or a device"),
        ("a.zip", zip_of({"good": CONTENT})[:-50], "cannot be read"),
        ("a.zip", zip_of({"good": CONTENT}).replace(CONTENT[:99], b"\1" * 99, 1), "cannot be read"),
    ],
)
def test_malicious_and_broken_archives_write_nothing(tmp_path, name, content, words):
    folder = tmp_path / "deep" / "data"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as raised:
        unpack(folder / name, folder)
    assert "\n" not in str(raised.value)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [folder / name]
    assert list(folder.iterdir()) == [folder / name]


def test_a_zip_whose_member_has_no_name(tmp_path):
    content = bytearray(zip_of({"x": b"1"}))
    entry = content.index(b"PK\1\2")  # the central directory: the name's length, and the name after 46 bytes
    content[entry + 28] = 0
    content[entry + 30] = 1  # what was the name is now an extra field
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.zip cannot be read") as raised:
        unpack(tmp_path / "a.zip", tmp_path)
    assert "\n" not in str(raised.value) and [p.name for p in tmp_path.iterdir()] == ["a.zip"]


MEMBERS = {"set/a.bin": b"abc" * 20, "set/b.bin": bytes(range(50))}
PLAIN_TAR = gzip.decompress(tar_of(MEMBERS))


@settings(max_examples=80, deadline=None)
@given(
    case=st.one_of(
        st.tuples(st.just("a.zip"), damaged(zip_of(MEMBERS))),
        st.tuples(st.just("a.tar.gz"), damaged(gzip.compress(PLAIN_TAR, mtime=0))),
        st.tuples(st.just("a.tar.gz"), damaged(PLAIN_TAR).map(lambda inner: gzip.compress(inner, mtime=0))),
    )
)
def test_fuzz_archives(case):
    name, content = case
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside, "data")
        folder.mkdir()
        (folder / name).write_bytes(content)
        try:
            unpack(folder / name, folder)
        except UserError as error:
            assert "\n" not in str(error) and name in str(error)
            assert [p.name for p in folder.iterdir()] == [name]
        assert [p.name for p in Path(outside).iterdir()] == ["data"]


def test_an_archive_that_would_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(fetching, "LARGEST", 1000)
    (tmp_path / "a.zip").write_bytes(zip_of({"a": b"x" * 900, "b": b"y" * 900}))
    with pytest.raises(UserError, match="more than 1000 bytes"):
        unpack(tmp_path / "a.zip", tmp_path)


def test_unpacking_replaces_what_was_half_there(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "old").touch()
    (tmp_path / "a.tar.gz").write_bytes(tar_of({"set/new": b"1"}))
    unpack(tmp_path / "a.tar.gz", tmp_path)
    assert [p.name for p in (tmp_path / "set").iterdir()] == ["new"]


def test_a_disk_that_fills_while_unpacking_is_not_the_archives_fault(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.zip").write_bytes(zip_of({"a": b"x"}))
    monkeypatch.setattr(fetching.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match="No space left"):
        unpack(tmp_path / "a.zip", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]
