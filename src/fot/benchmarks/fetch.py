"""Fetching the data sets: from the publishers' addresses, resumed where it broke off, verified, unpacked.

A file is written beside its place and moved there only once its digest is right; an archive is unpacked
beside its place and moved there only once it is whole. Nothing here is needed where the files already
lie in the data folder.
"""

from __future__ import annotations

import http.client
import os
import shutil
import stat
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from fot.benchmarks.datasets import KNOWN, data_root, find, load
from fot.benchmarks.formats import LARGEST, broken
from fot.benchmarks.sources import SOURCES, File
from fot.errors import UserError

Progress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes had so far and, where known, the bytes in all."""

ATTEMPTS = 5  # at one address; each takes up where the one before broke off
PAUSE = 1.0  # seconds after the first failure, doubled after each
TIMEOUT = 30.0
_CHUNK = 1 << 18
_BROKEN_ARCHIVE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,  # a zip with a password
    NotImplementedError,  # a zip of a rare compression
)


def fetch(name: str, data_dir: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Fetches a data set into the data folder and returns the folder where it lies.

    Nothing is done where all of it is there, and nothing is downloaded where its archive is: an archive
    put there by hand is verified and unpacked.
    """
    found = find(name, data_dir)
    if found is not None and (name not in SOURCES or _has_all(found[0], SOURCES[name].files)):
        return found[0]
    folder = data_root(data_dir) / name
    if name not in SOURCES:
        raise UserError(
            f"{name} cannot be fetched ({KNOWN[name].about}): put {KNOWN[name].layout} into {folder}"
        )
    source = SOURCES[name]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _fetch_all(source.files, folder, progress)
        except UserError:
            if not source.otherwise:
                raise
            _fetch_all(source.otherwise, folder, progress)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}): choose another --data-dir") from None
    found = find(name, data_dir)
    if found is None:
        raise UserError(f"the files of {name} in {folder} hold no {KNOWN[name].layout}")
    return found[0]


def check(name: str, data_dir: str | Path | None = None) -> list[str]:
    """What is there of a data set, in lines for a person: digests, counts, shapes and balance."""
    found = find(name, data_dir)
    data = load(name, data_dir)  # says what to do where it is missing
    assert found is not None
    root = data_root(data_dir) / name
    lines = [f"{name}: {found[0]}"]
    for file in (*SOURCES[name].files, *SOURCES[name].otherwise) if name in SOURCES else ():
        for path in {found[0] / file.name, root / file.name}:
            if path.exists():
                kind = file.digest.split(":")[0]
                same = "is the published file" if file.is_whole(path) else "is NOT the published file"
                lines.append(f"  {path.name} {same}, by {kind}")
    per_class = [int((data.train_y == c).sum()) for c in range(data.classes)]
    lines.append(
        f"  {len(data.train_y)} + {len(data.test_y)} samples of {tuple(data.train_x.shape[1:])},"
        f" {data.classes} classes of {min(per_class)} to {max(per_class)}"
    )
    return lines + [f"  {note}" for note in data.notes]


def download(file: File, target: Path, progress: Progress | None = None) -> None:
    """Brings one published file to `target`, whole and verified or not at all."""
    part = target.with_name(target.name + ".part")
    reasons = []
    for url in file.urls:
        for attempt in range(ATTEMPTS):
            began_at = part.stat().st_size if part.exists() else 0
            try:
                _continue(url, part, file, progress)
            except _WrongFile as error:
                reasons.append(f"{url}: {error}")
                part.unlink(missing_ok=True)
                break
            except urllib.error.HTTPError as error:
                reasons.append(f"{url}: {error.code} {error.reason}")
                if error.code != 416:  # the address is wrong, not the line
                    break
                part.unlink(missing_ok=True)
                continue
            except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
                reasons.append(f"{url}: {getattr(error, 'reason', None) or error}")
                time.sleep(PAUSE * 2**attempt)
                continue
            if file.is_whole(part):
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


class _WrongFile(Exception):
    """The server offers something else."""


def _continue(url: str, part: Path, file: File, progress: Progress | None) -> None:
    """Appends to `part` what is still missing of the file at `url`."""
    had = part.stat().st_size if part.exists() else 0
    if file.size is not None and had >= file.size:
        return  # the digest will tell
    headers = {"User-Agent": "fot"} | ({"Range": f"bytes={had}-"} if had else {})
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as answer:
        if answer.status != 206:
            had = 0
        elif not str(answer.headers.get("Content-Range", "")).startswith(f"bytes {had}-"):
            part.unlink()
            raise OSError("the server continues at another place")
        length = answer.headers.get("Content-Length")
        total = file.size if length is None else had + int(length)
        if file.size is not None and total != file.size:
            raise _WrongFile(f"it offers {total} bytes where the published file has {file.size}")
        with part.open("ab" if had else "wb") as out:
            while chunk := answer.read(_CHUNK):
                had += len(chunk)
                if had > (total or LARGEST):
                    raise _WrongFile("it sends more than the published file")
                out.write(chunk)
                if progress is not None:
                    progress(file.name, had, total)
    if total is not None and had < total:
        raise OSError(f"it broke off at {had} of {total} bytes")


def _is_archive(name: str) -> bool:
    return name.endswith((".tar.gz", ".zip"))


def _has_all(folder: Path, files: tuple[File, ...]) -> bool:
    """Whether no file is missing. What an archive holds is there as a whole or not at all."""
    names = [file.name for file in files if not _is_archive(file.name)]
    return all((folder / name).exists() or (folder / name.removesuffix(".gz")).exists() for name in names)


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
        except (
            tarfile.TarError,
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            OSError,
            ValueError,
            RuntimeError,
        ) as error:
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
