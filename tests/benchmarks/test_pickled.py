"""Pickles are written here with Python's own writer, which the package itself never imports."""

from __future__ import annotations

import pickle  # noqa: TID251 - to write what the reader must refuse or read
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.benchmarks.pickled import read_pickled_cifar
from fot.errors import UserError

ROWS = np.random.default_rng(0).integers(0, 256, (4, 3072), np.uint8)
GOOD = {"batch_label": "one", "labels": [3, 1, 4, 1], "data": ROWS, "filenames": ["a", "b", "c", "d"]}


@pytest.mark.parametrize("protocol", [1, 2, 3, 4])  # the publisher's is 2
def test_protocols_read_alike(tmp_path, protocol):
    (tmp_path / "batch").write_bytes(pickle.dumps(GOOD, protocol))
    x, y = read_pickled_cifar(tmp_path / "batch", "labels")
    assert np.array_equal(x, ROWS.reshape(4, 3, 32, 32)) and y.tolist() == [3, 1, 4, 1]


def python2() -> bytes:
    """The publisher's own dialect: protocol 2 of Python 2, whose text and bytes are one BINSTRING."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x01cnumpy\nndarray\nq\x02K\x00\x85U\x01b\x87Rq\x03"
    dtype = b"cnumpy\ndtype\nq\x04U\x02u1K\x00K\x01\x87Rq\x05"
    dtype += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = (
        b"(K\x01K\x04M\x00\x0c\x86"
        + dtype
        + b"\x89T"
        + (4 * 3072).to_bytes(4, "little")
        + ROWS.tobytes()
        + b"tb"
    )
    labels = b"]q\x06(K\x03K\x01K\x04K\x01e"
    return b"\x80\x02}q\x00(" + text(b"data") + array + state + text(b"labels") + labels + b"u."


def test_the_publishers_dialect(tmp_path):
    assert pickle.loads(python2(), encoding="latin-1")["labels"] == [3, 1, 4, 1]  # the file is a real one
    (tmp_path / "batch").write_bytes(python2())
    x, y = read_pickled_cifar(tmp_path / "batch", "labels")
    assert np.array_equal(x, ROWS.reshape(4, 3, 32, 32)) and y.tolist() == [3, 1, 4, 1]


class Trap:
    """Touches a file as soon as it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_code_runs_nothing(tmp_path, protocol):
    trap = pickle.dumps(GOOD | {"extra": Trap(tmp_path / "touched")}, protocol)
    (tmp_path / "batch").write_bytes(trap)
    with pytest.raises(UserError, match="nothing was run"):
        read_pickled_cifar(tmp_path / "batch", "labels")
    assert not (tmp_path / "touched").exists()
    pickle.loads(trap)
    assert (tmp_path / "touched").exists()  # the trap was a real one


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "cannot be read"),
        (b"cos\nsystem\n(S'true'\ntR.", "os system"),
        (b"(S'true'\nios\nsystem\n.", "INST"),
        (pickle.dumps([1, 2]), "no dictionary"),
        (pickle.dumps({"labels": [1]}), "no array called data"),
        (pickle.dumps(GOOD | {"labels": ["a"]}), "no list of numbers"),
        (pickle.dumps(GOOD | {"data": ROWS.astype(np.float64)}), "not of unsigned bytes"),
        (pickle.dumps(GOOD | {"data": ROWS[:, :5]}), "not 32 x 32 x 3"),
        (pickle.dumps(GOOD)[:-40], "cannot be read"),
        (b"}.}", "no array called data"),
        (b"e.", "cannot be read"),
        (b"K\x01h\x07.", "cannot be read"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path, content, words):
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(UserError, match=words) as raised:
        read_pickled_cifar(tmp_path / "batch", "labels")
    assert "\n" not in str(raised.value)


WHOLE = pickle.dumps({"labels": [1, 2], "data": ROWS[:1, :40], "n": (1, None, True)}, 2)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=6),
    end=st.integers(0, len(WHOLE)),
)
def test_fuzz(changes, end):
    data = bytearray(WHOLE)
    for place, value in changes:
        data[place] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "batch")
        path.write_bytes(data[:end])
        with pytest.raises(UserError) as raised:  # even whole, its pictures are too small
            read_pickled_cifar(path, "labels")
        assert "\n" not in str(raised.value)
