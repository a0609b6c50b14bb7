"""Fetching, against a server on this machine that breaks off, lies and redirects."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import re
import socket
import threading
import urllib.error
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from benchmarks_files import CONTENT, idx_files, tar_of, zip_of

from fot.benchmarks import fetch as fetching
from fot.benchmarks.datasets import load
from fot.benchmarks.fetch import check, download, fetch
from fot.benchmarks.sources import SOURCES, File, Source
from fot.errors import UserError


class Server(BaseHTTPRequestHandler):
    """The first part of the path says how it behaves; /breaks ends its first answers too early."""

    asked: ClassVar[Counter[str]] = Counter()
    ranges: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        place = self.path.rsplit("/", 1)[0]
        Server.asked[place] += 1
        Server.ranges.append(self.headers.get("Range"))
        content = SERVED.get(self.path, CONTENT)
        if place == "/moved":
            self.send_response(302)
            self.send_header("Location", self.path.replace("/moved", "/whole"))
            self.end_headers()
            return
        if place == "/to-a-file":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        if place == "/gone":
            self.send_error(404)
            return
        if place.startswith("/busy") and Server.asked[place] < 3:
            self.send_error(int(place.removeprefix("/busy-")))
            return
        if place == "/wrong":
            content = content[::-1]
        if place == "/longer":
            content += b"more"
        match = re.match(r"bytes=(\d+)-$", self.headers.get("Range") or "")
        start = int(match[1]) if match and "no-ranges" not in place else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            claimed = start + 7 if place == "/elsewhere" else start
            self.send_header("Content-Range", f"bytes {claimed}-{len(content) - 1}/{len(content)}")
        if place != "/endless":
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        try:
            if place == "/endless":
                for _ in range(10):
                    self.wfile.write(content)
            elif place.startswith("/breaks") and Server.asked[place] < 3:
                self.wfile.write(content[start : start + 400_000])
            elif place == "/never":
                self.wfile.write(content[start : start + 10])
            else:
                self.wfile.write(content[start:])
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client had enough

    def log_message(self, *_: object) -> None:
        pass


SERVED: dict[str, bytes] = {}


@pytest.fixture(scope="module")
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.delenv("FOT_DATA", raising=False)
    Server.asked.clear()
    Server.ranges.clear()
    SERVED.clear()


def published(
    server: str, *places: str, content: bytes = CONTENT, name: str = "f.bin", kind: str = "sha256"
) -> File:
    digest = hashlib.new(kind, content).hexdigest()
    return File(tuple(f"{server}/{place}/{name}" for place in places), f"{kind}:{digest}", len(content))


@pytest.mark.parametrize("kind", ["sha256", "md5"])
@pytest.mark.parametrize("place", ["whole", "moved", "breaks", "breaks-no-ranges"])
def test_the_file_arrives_whole(server, tmp_path, place, kind):
    seen = []
    file = published(server, place, kind=kind)
    download(file, tmp_path / "f.bin", lambda name, had, total: seen.append((name, had, total)))
    assert (tmp_path / "f.bin").read_bytes() == CONTENT and [p.name for p in tmp_path.iterdir()] == ["f.bin"]
    again = ", attempt 3" if "breaks" in place else ""
    assert seen[-1] == (f"f.bin{again}", len(CONTENT), len(CONTENT))


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_a_busy_server_is_asked_again(server, tmp_path, code):
    download(published(server, f"busy-{code}"), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == CONTENT and Server.asked[f"/busy-{code}"] == 3


def test_pauses_double_and_none_follows_the_last_attempt(server, tmp_path, monkeypatch):
    pauses, shown = [], []
    monkeypatch.setattr(fetching, "PAUSE", 1.0)
    monkeypatch.setattr(fetching.time, "sleep", pauses.append)
    with pytest.raises(UserError, match="broke off"):
        download(published(server, "never"), tmp_path / "f.bin", lambda name, *_: shown.append(name))
    assert pauses == [1.0, 2.0, 4.0, 8.0]
    assert list(dict.fromkeys(shown)) == ["f.bin", *(f"f.bin, attempt {k}" for k in range(2, 6))]


def test_a_name_that_is_not_known_is_asked_for_once(tmp_path, monkeypatch):
    asked = []

    def unknown(request, timeout):
        asked.append(request.full_url)
        raise urllib.error.URLError(socket.gaierror(-2, "Name or service not known"))

    monkeypatch.setattr(fetching.urllib.request, "urlopen", unknown)
    urls = ("http://nowhere.invalid/f.bin", "http://nor-here.invalid/f.bin")
    with pytest.raises(UserError, match=r"nowhere.*not known.*nor-here.*not known"):
        download(File(urls, "md5:0", 10), tmp_path / "f.bin")
    assert asked == list(urls)


@pytest.mark.parametrize("at", ["write", "open"])
def test_a_full_disk_is_said_and_not_tried_again(server, tmp_path, monkeypatch, at):
    class Full(io.BytesIO):
        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

    def opening(path, mode="r", *rest, **named):
        if path.suffix == ".part" and mode in ("wb", "ab"):
            if at == "open":
                raise OSError(errno.ENOSPC, "No space left on device")
            return Full()
        return whole_open(path, mode, *rest, **named)

    whole_open = Path.open
    monkeypatch.setattr(Path, "open", opening)
    source = Source((published(server, "whole", "moved"),), (published(server, "whole", name="g.bin"),))
    monkeypatch.setitem(SOURCES, "mnist", source)
    with pytest.raises(
        UserError, match=r"cannot be written \(No space left on device\): choose another --data-dir"
    ):
        fetch("mnist", tmp_path)
    assert sum(Server.asked.values()) == 1


def test_what_broke_off_is_taken_up_again(server, tmp_path):
    download(published(server, "breaks"), tmp_path / "f.bin")
    assert Server.ranges == [None, "bytes=400000-", "bytes=800000-"]


def test_another_run_takes_up_what_an_earlier_one_left(server, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(CONTENT[:1000])
    download(published(server, "whole"), tmp_path / "f.bin")
    assert Server.ranges == ["bytes=1000-"] and (tmp_path / "f.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("left", [b"rubbish", CONTENT[::-1], CONTENT + b"more"])
def test_rubbish_left_over_is_thrown_away(server, tmp_path, left):
    (tmp_path / "f.bin.part").write_bytes(left)
    download(published(server, "whole"), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == CONTENT


def test_a_server_that_continues_at_another_place(server, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(CONTENT[:1000])
    download(published(server, "elsewhere"), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == CONTENT and Server.ranges == ["bytes=1000-", None]


@pytest.mark.parametrize(
    "place, words",
    [
        ("wrong", "not the published file"),
        ("longer", "1024004 bytes where the published file has 1024000"),
        ("endless", "more than the published file"),
        ("gone", "404"),
        ("never", "broke off"),
        ("to-a-file", "not allowed"),
    ],
)
def test_nothing_is_left_where_it_fails(server, tmp_path, place, words):
    with pytest.raises(UserError, match=words) as raised:
        download(published(server, place), tmp_path / "f.bin")
    assert "\n" not in str(raised.value) and "by hand" in str(raised.value)
    assert not (tmp_path / "f.bin").exists()
    assert Server.asked[f"/{place}"] == (fetching.ATTEMPTS if place == "never" else 1)


@pytest.mark.parametrize("first", ["wrong", "gone", "never", "longer"])
def test_the_mirror_steps_in(server, tmp_path, first):
    download(published(server, first, "whole"), tmp_path / "f.bin")
    assert (tmp_path / "f.bin").read_bytes() == CONTENT


def test_no_network_at_all(tmp_path):
    with pytest.raises(UserError, match="cannot be fetched"):
        download(File(("http://127.0.0.1:1/f.bin",), "md5:0", 10), tmp_path / "f.bin")


def test_a_set_is_fetched_checked_and_then_left_alone(server, tmp_path, monkeypatch):
    files = idx_files()
    SERVED.update({f"/whole/{name}": content for name, content in files.items()})
    source = Source(tuple(published(server, "whole", content=c, name=n) for n, c in files.items()))
    monkeypatch.setitem(SOURCES, "mnist", source)
    assert fetch("mnist", tmp_path) == tmp_path / "mnist"
    assert len(load("mnist", tmp_path).train_y) == 10
    lines = check("mnist", tmp_path)
    assert sum("is the published file, by sha256" in line for line in lines) == 4
    assert "10 + 10 samples of (1, 28, 28), 10 classes of 1 to 1" in lines[-2]
    asked = sum(Server.asked.values())
    fetch("mnist", tmp_path)
    assert sum(Server.asked.values()) == asked
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").write_bytes(files["train-labels-idx1-ubyte.gz"] + b"\0")
    different = [line for line in check("mnist", tmp_path) if "is NOT" in line]
    assert len(different) == 1 and different[0].endswith(
        "t10k-labels-idx1-ubyte.gz is NOT the published file, by sha256; its content reads well"
    )
    fetch("mnist", tmp_path)  # packed by another, and good: it stays
    assert sum(Server.asked.values()) == asked


@pytest.mark.parametrize("damage", [b"", b"rubbish", None])
def test_a_damaged_file_is_fetched_again(server, tmp_path, monkeypatch, damage):
    """A repacked one beside it is replaced by the published one, and kept."""
    files = idx_files()
    SERVED.update({f"/whole/{name}": content for name, content in files.items()})
    source = Source(tuple(published(server, "whole", content=c, name=n) for n, c in files.items()))
    monkeypatch.setitem(SOURCES, "mnist", source)
    fetch("mnist", tmp_path)
    Server.asked.clear()
    first, second, *_ = (tmp_path / "mnist" / name for name in files)
    first.write_bytes(first.read_bytes()[:-9] if damage is None else damage)
    repacked = gzip.compress(gzip.decompress(second.read_bytes()), 1, mtime=7)
    second.write_bytes(repacked)
    with pytest.raises(
        UserError, match=rf"{first.name} cannot be read .* or run `fot data fetch mnist --data-dir"
    ):
        load("mnist", tmp_path)
    fetch("mnist", tmp_path)
    assert Server.asked["/whole"] == 2 and len(load("mnist", tmp_path).train_y) == 10
    assert second.with_name(second.name + ".old").read_bytes() == repacked
    assert all(not file.name.endswith(".part") for file in (tmp_path / "mnist").iterdir())


@pytest.mark.parametrize("keep_archive", [True, False])
def test_a_damaged_folder_is_unpacked_again(server, tmp_path, monkeypatch, keep_archive):
    SERVED["/whole/c.tar.gz"] = archive = tar_of(CIFAR)
    monkeypatch.setitem(
        SOURCES, "cifar10", Source((published(server, "whole", content=archive, name="c.tar.gz"),))
    )
    folder = fetch("cifar10", tmp_path)
    if not keep_archive:
        (tmp_path / "cifar10/c.tar.gz").unlink()
    (folder / "data_batch_3.bin").write_bytes(BATCH[:-1])
    fetch("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path).train_y) == 50
    assert Server.asked["/whole"] == (1 if keep_archive else 2)


def test_a_damaged_copy_that_comes_first_is_named(server, tmp_path, monkeypatch):
    SERVED["/whole/c.tar.gz"] = archive = tar_of(CIFAR)
    monkeypatch.setitem(
        SOURCES, "cifar10", Source((published(server, "whole", content=archive, name="c.tar.gz"),))
    )
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin/data_batch_1.bin").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"data_batch_1\.bin cannot be read .* remove .*/cifar-10-batches-bin$"
    ):
        fetch("cifar10", tmp_path)


def test_both_forms_are_named_where_neither_comes(server, tmp_path, monkeypatch):
    source = Source(
        (published(server, "gone", name="first.tar.gz"),), (published(server, "wrong", name="other.zip"),)
    )
    monkeypatch.setitem(SOURCES, "cifar10", source)
    with pytest.raises(
        UserError, match=r"first\.tar\.gz cannot .*404.* other\.zip cannot .*not the published"
    ):
        fetch("cifar10", tmp_path)


def test_check_says_where_only_an_md5_is_known(tmp_path, monkeypatch):
    archive = tar_of(CIFAR)
    file = published("http://127.0.0.1:1", "", content=archive, name="c.tar.gz", kind="md5")
    monkeypatch.setitem(SOURCES, "cifar10", Source((file,)))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "c.tar.gz").write_bytes(archive)
    fetch("cifar10", tmp_path)
    assert (
        "  c.tar.gz is the published file, by md5, the only digest known: no guard against a forger"
        in check("cifar10", tmp_path)
    )
    (tmp_path / "cifar10" / "c.tar.gz").unlink()
    assert "  no published file lies here that its digest could be held against" in check("cifar10", tmp_path)


def test_a_set_that_came_in_part_is_completed(server, tmp_path, monkeypatch):
    files = idx_files()
    SERVED.update({f"/whole/{name}": content for name, content in files.items()})
    good = [published(server, "whole", content=c, name=n) for n, c in files.items()]
    bad = published(server, "gone", content=b"x", name=good[2].name)
    monkeypatch.setitem(SOURCES, "mnist", Source((good[0], good[1], bad, good[3])))
    with pytest.raises(UserError, match="404"):
        fetch("mnist", tmp_path)
    monkeypatch.setitem(SOURCES, "mnist", Source(tuple(good)))
    fetch("mnist", tmp_path)
    assert Server.asked["/whole"] == 4 and len(load("mnist", tmp_path).test_y) == 10


BATCH = np.concatenate([np.arange(10)[:, None], np.zeros((10, 3072))], 1).astype(np.uint8).tobytes()
CIFAR = {
    f"cifar-10-batches-bin/{n}.bin": BATCH for n in [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
}


def test_an_archive_is_fetched_and_unpacked_and_another_serves_as_well(server, tmp_path, monkeypatch):
    archive = zip_of(CIFAR)
    SERVED["/whole/other.zip"] = archive
    source = Source(
        (published(server, "gone", name="first.tar.gz"),),
        (published(server, "whole", content=archive, name="other.zip"),),
    )
    monkeypatch.setitem(SOURCES, "cifar10", source)
    assert fetch("cifar10", tmp_path) == tmp_path / "cifar10" / "cifar-10-batches-bin"
    assert len(load("cifar10", tmp_path).train_y) == 50


def test_an_archive_put_there_by_hand_needs_no_network(tmp_path, monkeypatch):
    archive = tar_of(CIFAR)
    monkeypatch.setitem(
        SOURCES, "cifar10", Source((published("http://127.0.0.1:1", "", content=archive, name="c.tar.gz"),))
    )
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "c.tar.gz").write_bytes(archive)
    fetch("cifar10", tmp_path)
    assert len(load("cifar10", tmp_path).train_y) == 50


def test_sets_that_cannot_be_fetched(tmp_path):
    with pytest.raises(UserError, match=r"cannot be fetched .* put a folder a class"):
        fetch("miniimagenet", tmp_path)
    with pytest.raises(UserError, match="choose one of"):
        fetch("imagenet", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="choose another --data-dir"):
        fetch("mnist", tmp_path / "file")


def test_the_sources_are_well_formed():
    for name, source in SOURCES.items():
        for file in (*source.files, *source.otherwise):
            kind, digest = file.digest.split(":")
            assert re.fullmatch(r"[0-9a-f]+", digest) and len(digest) == {"sha256": 64, "md5": 32}[kind], name
            assert all(
                url.startswith(("https://", "http://")) and url.endswith("/" + file.name) for url in file.urls
            )
