"""Small files for the tests: of MNIST, archives, and whatever damage makes of a file."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zipfile

import numpy as np
from hypothesis import strategies as st

CONTENT = bytes(range(256)) * 4000  # a megabyte: larger than one chunk


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """The file with a few bytes changed, cut short, or something else altogether."""
    change = st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255))

    def apply(changes, end):
        data = bytearray(whole)
        for place, value in changes:
            data[place] = value
        return bytes(data[:end])

    return st.one_of(
        st.builds(apply, st.lists(change, min_size=1, max_size=6), st.integers(0, len(whole))),
        st.binary(max_size=300),
    )


def tar_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def zip_of(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return out.getvalue()


def idx_files(n: int = 10) -> dict[str, bytes]:
    out = {}
    for split in ("train", "t10k"):
        for name, array in (
            (f"{split}-images-idx3-ubyte.gz", np.zeros((n, 28, 28), np.uint8)),
            (f"{split}-labels-idx1-ubyte.gz", (np.arange(n) % 10).astype(np.uint8)),
        ):
            head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
            out[name] = gzip.compress(head + array.tobytes(), mtime=0)
    return out
