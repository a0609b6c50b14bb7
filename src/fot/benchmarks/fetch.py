"""Fetching the data sets: from the publishers' addresses, resumed where it broke off, verified, unpacked.

A file is written beside its place and moved there only once its digest is right; an archive is unpacked
beside its place and moved there only once it is whole. Nothing here is needed where the files already
lie in the data folder.
"""

from __future__ import annotations

import errno
import http.client
import os
import shutil
import socket
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from fot.benchmarks.datasets import KNOWN, data_root, find, load
from fot.benchmarks.formats import FAILURES, LARGEST, broken
from fot.benchmarks.sources import SOURCES, File
from fot.errors import UserError

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes had so far and, where known, the bytes in all."""

ATTEMPTS = 5  # at one address; each takes up where the one before broke off
PAUSE = 1.0  # seconds before the second attempt, doubled before each further one
TIMEOUT = 30.0
_CHUNK = 1 << 18
_BUSY = frozenset({408, 425, 429, *range(500, 600)})  # answers that may differ a moment later
_DISK = frozenset(  # failures of this machine's disk, which no other archive or address would mend
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
)


def fetch(name: str, data_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Fetches a data set into the data folder and returns the folder where it lies.

    Nothing is done where the set is there and can be read, by whomever it was packed. Otherwise what is
    missing or differs from the published files is downloaded, and archives are unpacked anew; an archive
    put there by hand is verified, and not downloaded. A file that is replaced stays beside the new one,
    as ``NAME.old``.
    """
    found = find(name, data_dir)
    folder = data_root(data_dir) / name
    if found is not None:
        try:
            load(name, data_dir)
            return found[0]
        except UserError:
            if name not in SOURCES:
                raise
    if name not in SOURCES:
        raise UserError(
            f"{name} cannot be fetched ({KNOWN[name].about}): put {KNOWN[name].layout} into {folder}"
        )
    source = SOURCES[name]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _fetch_all(source.files, folder, progress)
        except UserError as error:
            if not source.otherwise:
                raise
            try:
                _fetch_all(source.otherwise, folder, progress)
            except UserError as another:
                raise UserError(f"{error}; in its place, {another}") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another --data-dir") from None
    found = find(name, data_dir)
    if found is None:
        raise UserError(f"the files of {name} in {folder} hold no {KNOWN[name].layout}")
    try:
        load(name, data_dir)
    except UserError as error:  # an older copy elsewhere in the data folder comes first
        raise UserError(f"{error}; if it lies in the way of what was fetched, remove {found[0]}") from None
    return found[0]


def check(name: str, data_dir: str | Path | None = None) -> list[str]:
    """What is there of a data set, in lines for a person: digests, counts, shapes and balance."""
    found = find(name, data_dir)
    data = load(name, data_dir)  # says what to do where it is missing
    assert found is not None
    root = data_root(data_dir) / name
    lines = [f"{name}: {found[0]}"]
    for file in (*SOURCES[name].files, *SOURCES[name].otherwise) if name in SOURCES else ():
        for path in dict.fromkeys((found[0] / file.name, root / file.name)):
            if path.exists():
                kind = file.digest.split(":")[0]
                by = kind if kind == "sha256" else f"{kind}, the only digest known: no guard against a forger"
                if file.is_whole(path):
                    lines.append(f"  {path.name} is the published file, by {by}")
                else:
                    reads = "" if _is_archive(path.name) else "; its content reads well"
                    lines.append(f"  {path.name} is NOT the published file, by {by}{reads}")
    if name in SOURCES and len(lines) == 1:
        lines.append("  no published file lies here that its digest could be held against")
    per_class = [int((data.train_y == c).sum()) for c in range(data.classes)]
    lines.append(
        f"  {len(data.train_y)} + {len(data.test_y)} samples of {tuple(data.train_x.shape[1:])},"
        f" {data.classes} classes of {min(per_class)} to {max(per_class)}"
    )
    return lines + [f"  {note}" for note in data.notes]


def download(file: File, target: Path, progress: Progress | None = None) -> None:
    """Brings one published file to `target`, whole and verified or not at all.

    Later attempts show under a name of their own. An error of the disk passes as it is.
    """
    part = target.with_name(target.name + ".part")
    reasons: list[str] = []
    for url in file.urls:
        for attempt in range(ATTEMPTS):
            shown = f"{file.name}, attempt {len(reasons) + 1}" if reasons else file.name
            began_at = part.stat().st_size if part.exists() else 0
            if attempt:
                if progress is not None:
                    progress(shown, began_at, file.size)
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                _continue(url, part, file, shown, progress)
            except _Failed as failure:
                reasons.append(f"{url}: {failure}")
                if failure.discard:
                    part.unlink(missing_ok=True)
                if failure.again:
                    continue
                break
            if file.is_whole(part):
                if target.exists():
                    os.replace(target, target.with_name(target.name + ".old"))
                os.replace(part, target)
                return
            part.unlink()
            reasons.append(f"{url}: what it sends is not the published file")
            if not began_at:
                break  # if it was resumed, the older half may be the wrong one: once more from the start
    raise UserError(
        f"{file.name} cannot be fetched ({'; '.join(dict.fromkeys(reasons))}):"
        f" try again later, or put it into {target.parent} by hand"
    )


class _Failed(Exception):
    """An attempt came to nothing: whether another is worth while, and whether to `discard` what was had."""

    def __init__(self, why: object, again: bool, discard: bool = False) -> None:
        super().__init__(str(why))
        self.again, self.discard = again, discard


@contextmanager
def _on_the_line() -> Iterator[None]:
    """Tells failures of the network from those of the disk, which are of the same type."""
    try:
        yield
    except urllib.error.HTTPError as error:
        too_far = error.code == 416  # more is here than the server has
        raise _Failed(
            f"{error.code} {error.reason}", again=too_far or error.code in _BUSY, discard=too_far
        ) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise _Failed(reason, again=not isinstance(reason, socket.gaierror)) from None


def _continue(url: str, part: Path, file: File, shown: str, progress: Progress | None) -> None:
    """Appends to `part` what is still missing of the file at `url`."""
    had = part.stat().st_size if part.exists() else 0
    if file.size is not None and had >= file.size:
        return  # the digest will tell
    headers = {"User-Agent": "fot"} | ({"Range": f"bytes={had}-"} if had else {})
    with _on_the_line():
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    with answer:
        if answer.status != 206:
            had = 0
        elif not str(answer.headers.get("Content-Range", "")).startswith(f"bytes {had}-"):
            raise _Failed("the server continues at another place", again=True, discard=True)
        length = answer.headers.get("Content-Length")
        with _on_the_line():
            total = file.size if length is None else had + int(length)
        if file.size is not None and total != file.size:
            wrong = f"it offers {total} bytes where the published file has {file.size}"
            raise _Failed(wrong, again=False, discard=True)
        with part.open("ab" if had else "wb") as out:
            while True:
                with _on_the_line():
                    chunk = answer.read(_CHUNK)
                if not chunk:
                    break
                had += len(chunk)
                if had > (total or LARGEST):
                    raise _Failed("it sends more than the published file", again=False, discard=True)
                out.write(chunk)
                if progress is not None:
                    progress(shown, had, total)
    if total is not None and had < total:
        raise _Failed(f"it broke off at {had} of {total} bytes", again=True)


def _is_archive(name: str) -> bool:
    return name.endswith((".tar.gz", ".zip"))


def _fetch_all(files: tuple[File, ...], folder: Path, progress: Progress | None) -> None:
    for file in files:
        target = folder / file.name
        if not (target.exists() and file.is_whole(target)):
            download(file, target, progress)
        if _is_archive(target.name):
            unpack(target, folder)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a ``.tar.gz`` or ``.zip`` into `folder`, all of it or nothing, and nothing outside it."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as scratch:
        try:
            with _members(archive) as members:
                total = 0
                for name, size, file in members:
                    path = PurePosixPath(name)
                    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
                        raise broken(archive, f"it would write to {name!r}, outside its folder")
                    total += size
                    if total > LARGEST:
                        raise broken(archive, f"it unpacks to more than {LARGEST} bytes")
                    target = Path(scratch, *path.parts)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("xb") as out:
                        shutil.copyfileobj(file, out)
                    if target.stat().st_size != size:
                        raise broken(archive, f"{name!r} breaks off")
        except FAILURES as error:
            if isinstance(error, OSError) and error.errno in _DISK:
                raise
            raise broken(archive, str(error) or type(error).__name__) from None
        for entry in Path(scratch).iterdir():
            place = folder / entry.name
            if place.is_dir():
                shutil.rmtree(place)
            os.replace(entry, place)


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[tuple[str, int, IO[bytes]]]]:
    """Name, size and content of each plain file of an archive; a link or a device is an error."""
    if archive.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            yield _zip_members(archive, packed)
    else:
        with tarfile.open(archive, "r:gz") as tar:
            yield _tar_members(archive, tar)


def _zip_members(archive: Path, packed: zipfile.ZipFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    for entry in packed.infolist():
        mode = entry.external_attr >> 16
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise broken(archive, f"{entry.filename!r} is a link or a device")
        if not entry.is_dir():
            with packed.open(entry) as file:
                yield entry.filename, entry.file_size, file


def _tar_members(archive: Path, packed: tarfile.TarFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    for entry in packed:
        if entry.isfile():
            file = packed.extractfile(entry)
            assert file is not None
            yield entry.name, entry.size, file
        elif not entry.isdir():
            raise broken(archive, f"{entry.name!r} is a link or a device")
