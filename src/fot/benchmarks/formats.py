"""Readers of the publishers' file formats.

Each returns arrays, executes nothing, and trusts no length that a file claims. Whatever is wrong with a
file ends in one `UserError` that names the file.
"""

from __future__ import annotations

import gzip
import lzma
import math
import struct
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fot.errors import UserError

Array = np.ndarray[Any, Any]
LARGEST = 1 << 32  # bytes; no set of this package comes near, and a lying header is stopped here
LARGEST_PICTURE = 1 << 26  # pixels
PICTURE_SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
)
FAILURES = (  # what numpy, gzip, tarfile, zipfile and the readers below raise on a damaged file
    *(OSError, EOFError, ValueError, KeyError, IndexError, TypeError, OverflowError, SyntaxError),
    *(RuntimeError, MemoryError, struct.error, tokenize.TokenError),
    *(zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile),
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns every failure to read `path` into one line."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path} is missing: put it there") from None
    except FAILURES as error:
        raise broken(path, str(error) or type(error).__name__) from None


def broken(path: Path, why: str) -> UserError:
    """The error of a file that cannot be read, on one line."""
    return UserError(f"{path} cannot be read ({' '.join(why.split())[:200]}): replace it")


def read_idx(path: Path) -> Array:
    """An IDX file of unsigned bytes, gzipped or not, by its content and not by its name."""
    with reading(path), path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if zipped else raw as file:
            zeros, kind, ndim = struct.unpack(">HBB", file.read(4))
            if zeros != 0 or kind != 8 or not 1 <= ndim <= 4:
                raise broken(path, "it is not an IDX file of unsigned bytes")
            shape = struct.unpack(f">{ndim}I", file.read(4 * ndim))
            size = math.prod(shape)
            if size > LARGEST:
                raise broken(path, f"it claims the shape {shape}")
            data = file.read(size + 1)
        if len(data) != size:
            raise broken(
                path,
                f"{shape} asks for {size} bytes, {'more' if len(data) > size else len(data)} are there",
            )
        return np.frombuffer(data, np.uint8).reshape(shape)


def read_cifar_binary(path: Path, label_bytes: int) -> tuple[Array, Array]:
    """Pictures (N, 3, 32, 32) and labels of a CIFAR ``.bin`` file; the last label byte is the fine one."""
    with reading(path):
        rows = np.fromfile(path, np.uint8)
        record = label_bytes + 3072
        if rows.size == 0 or rows.size % record:
            raise broken(path, f"{rows.size} bytes are no whole number of records of {record}")
        rows = rows.reshape(-1, record)
        return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


# MATLAB's "MAT-File Format", version 5: numeric storage types by their number in the file.
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15


def read_mat(path: Path) -> dict[str, Array]:
    """The numeric arrays of a MATLAB 5 ``.mat`` file, by name; anything else in it is passed over."""
    with reading(path):
        data = path.read_bytes()
        if len(data) < 128 or data[126:128] not in (b"IM", b"MI"):
            raise broken(path, "it is not a MATLAB 5 file")
        order = "<" if data[126:128] == b"IM" else ">"
        arrays: dict[str, Array] = {}
        for kind, body in _elements(memoryview(data)[128:], order):
            if kind == _COMPRESSED:
                inflater = zlib.decompressobj()
                inflated = inflater.decompress(body, LARGEST)
                if not inflater.eof:
                    raise ValueError("its compressed data break off")
                if len(inflated) < 8:
                    raise ValueError("its compressed data hold no element")
                kind, body = next(_elements(memoryview(inflated), order))
            if kind == _MATRIX:
                arrays.update(_matrix(body, order))
        return arrays


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """Type and body of each element in turn. Bodies are padded to 8 bytes, compressed ones are not."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from(order + "II", data, at)
        start, small = at + 8, kind >> 16
        if small:  # up to four bytes are stored inside the tag itself
            kind, size, start = kind & 0xFFFF, small, at + 4
        if start + size > len(data):
            raise ValueError(f"an element of {size} bytes where {len(data) - start} are left")
        yield kind, data[start : start + size]
        at = at + 8 if small else start + size + (0 if kind == _COMPRESSED else -size % 8)


def _matrix(body: memoryview, order: str) -> dict[str, Array]:
    parts = list(_elements(body, order))
    if len(parts) < 4 or parts[3][0] not in _STORED:
        return {}  # a cell, a structure or text: nothing of ours
    shape = tuple(np.frombuffer(parts[1][1], order + "i4").tolist())
    name = bytes(parts[2][1]).decode("ascii", "replace")
    stored, values = parts[3]
    return {name: np.frombuffer(values, order + _STORED[stored]).reshape(shape, order="F")}


def read_npy(path: Path) -> Array:
    """A ``.npy`` array, mapped from disk: only what is used is read."""
    with reading(path):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it holds several arrays")
        return array


def read_pictures(
    paths: Sequence[Path], size: tuple[int, int] | None = None, channels: int | None = None
) -> tuple[Array, list[int], list[str]]:
    """Pictures (N, C, H, W), the places in `paths` of those that could be read, a line for each other one.

    The first readable picture settles what is not given: the size (height, width), and the channels
    (1 if it is grey, else 3). A picture of another size is resized where `size` is given, and
    otherwise an error.
    """
    from PIL import Image

    pictures: list[Array] = []
    good: list[int] = []
    failures: list[str] = []
    resize, expected = size is not None, size
    for place, path in enumerate(paths):
        try:
            with Image.open(path) as opened:
                if opened.width * opened.height > LARGEST_PICTURE:
                    raise ValueError(f"{opened.width} x {opened.height} pixels are too many")
                if channels is None:
                    channels = 1 if opened.mode in ("1", "L", "LA") else 3
                picture = opened.convert("L" if channels == 1 else "RGB")
        except Exception as error:  # Pillow's decoders raise nearly anything on a broken file
            why = str(error).replace(f" {str(path)!r}", "")  # Pillow names the file too
            failures.append(f"{path}: {' '.join(why.split())[:120] or type(error).__name__}")
            continue
        found = (picture.height, picture.width)
        if expected is None:
            expected = found
        if found != expected:
            if not resize:
                raise UserError(
                    f"{path} is {found[0]} x {found[1]} where others are {expected[0]} x {expected[1]}:"
                    " give a size to resize to"
                )
            picture = picture.resize(expected[::-1], Image.Resampling.BILINEAR)
        pictures.append(np.asarray(picture, np.uint8).reshape(*expected, channels).transpose(2, 0, 1))
        good.append(place)
    stacked = (
        np.stack(pictures) if pictures else np.empty((0, channels or 1, *(expected or (0, 0))), np.uint8)
    )
    return stacked, good, failures


def list_classes(folder: Path) -> dict[str, list[Path]]:
    """The pictures of each class of a folder that has a folder a class, both in the order of their names."""
    with reading(folder):
        classes = sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] not in "._")
        found = {
            c.name: sorted(
                p for p in c.rglob("*") if p.suffix.lower() in PICTURE_SUFFIXES and p.name[0] not in "._"
            )
            for c in classes
        }
    return {name: paths for name, paths in found.items() if paths}
