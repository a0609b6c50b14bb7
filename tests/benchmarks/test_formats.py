from __future__ import annotations

import gzip
import io
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from benchmarks_files import damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fot.benchmarks.formats import (
    list_classes,
    read_cifar_binary,
    read_idx,
    read_mat,
    read_npy,
    read_pictures,
)
from fot.errors import UserError

FUZZ = settings(max_examples=80, deadline=None)


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


def mat_element(kind: int, body: bytes, order: str = "<") -> bytes:
    return struct.pack(order + "II", kind, len(body)) + body + b"\0" * (-len(body) % 8)


def mat(arrays: dict[str, np.ndarray], compress: bool = False, order: str = "<") -> bytes:
    """A MATLAB 5 file, written from its specification; small elements go inside their tags."""
    kinds = {"u1": (2, 9), "f8": (9, 6)}
    out = (
        b"MATLAB 5.0 MAT-file".ljust(124)
        + struct.pack(order + "H", 0x0100)
        + (b"IM" if order == "<" else b"MI")
    )
    for name, array in arrays.items():
        stored, mx = kinds[array.dtype.str[1:]]
        body = mat_element(6, struct.pack(order + "II", mx, 0), order)
        body += mat_element(5, np.array(array.shape, order + "i4").tobytes(), order)
        tag = len(name) << 16 | 1  # the name, in the small form
        body += struct.pack(order + "I", tag) + name.encode().ljust(4, b"\0")
        body += mat_element(stored, array.astype(array.dtype.newbyteorder(order)).tobytes(order="F"), order)
        element = mat_element(14, body, order)
        if compress:
            packed = zlib.compress(element)
            element = (
                struct.pack(order + "II", 15, len(packed)) + packed
            )  # compressed elements are not padded
        out += element
    return out


SMALL = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_round_trip(tmp_path, zipped):
    (tmp_path / "x").write_bytes(gzip.compress(idx(SMALL)) if zipped else idx(SMALL))
    assert np.array_equal(read_idx(tmp_path / "x"), SMALL)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        idx(SMALL)[:-1],
        idx(SMALL) + b"x",
        b"\1" + idx(SMALL)[1:],
        idx(SMALL).replace(b"\x08", b"\x0d", 1),
        gzip.compress(idx(SMALL))[:-9],
        gzip.compress(idx(SMALL))[:12] + b"\xff\xff" + gzip.compress(idx(SMALL))[14:],
        struct.pack(">HBB4I", 0, 8, 4, *[2**32 - 1] * 4),
        gzip.compress(struct.pack(">HBB3I", 0, 8, 3, 60000, 28, 28)),
    ],
    ids=range(10),  # gzip writes the time of day: the content would name the test anew in each process
)
def test_broken_idx_is_one_line(tmp_path, content):
    (tmp_path / "x.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.gz cannot be read") as raised:
        read_idx(tmp_path / "x.gz")
    assert "\n" not in str(raised.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="nothing is missing"):
        read_idx(tmp_path / "nothing")


def test_cifar_binary_round_trip(tmp_path):
    pictures = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), np.uint8)
    rows = np.concatenate([np.array([[9, 1], [8, 2], [7, 99]], np.uint8), pictures.reshape(3, -1)], 1)
    rows.tofile(tmp_path / "train.bin")
    x, y = read_cifar_binary(tmp_path / "train.bin", 2)
    assert np.array_equal(x, pictures) and y.tolist() == [1, 2, 99]


@pytest.mark.parametrize("size", [0, 3072, 3074, 3 * 3073 - 1])
def test_cifar_binary_of_a_wrong_size(tmp_path, size):
    (tmp_path / "train.bin").write_bytes(b"\0" * size)
    with pytest.raises(UserError, match="no whole number of records"):
        read_cifar_binary(tmp_path / "train.bin", 1)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("compress", [False, True])
def test_mat_round_trip(tmp_path, compress, order):
    arrays = {"X": np.arange(120, dtype=np.uint8).reshape(2, 3, 4, 5), "y": np.array([[1.0], [10.0]])}
    (tmp_path / "a.mat").write_bytes(mat(arrays, compress, order))
    found = read_mat(tmp_path / "a.mat")
    assert found.keys() == arrays.keys() and all(np.array_equal(found[k], arrays[k]) for k in arrays)


def test_mat_of_scipy(tmp_path):
    """Another's writer: text, cells and structures are passed over, short and long names are found."""
    io = pytest.importorskip("scipy.io")
    arrays = {
        "X": np.arange(48, dtype=np.uint8).reshape(2, 2, 3, 4),
        "a_long_name": np.eye(3),
        "y": np.array([[7]]),
    }
    for compress in (False, True):
        others = {"text": "hello", "cell": np.array([1, "b"], object), "s": {"f": 1}}
        io.savemat(tmp_path / "a.mat", arrays | others, do_compression=compress)
        found = read_mat(tmp_path / "a.mat")
        assert all(np.array_equal(found[k], arrays[k]) for k in arrays)


@pytest.mark.parametrize("compress", [False, True])
def test_a_truncated_mat_is_one_line(tmp_path, compress):
    whole = mat({"X": np.arange(250, dtype=np.uint8).reshape(5, 50)}, compress)
    for size in (0, 100, 130, len(whole) - 20):
        (tmp_path / "a.mat").write_bytes(whole[:size])
        try:
            assert read_mat(tmp_path / "a.mat") == {}
        except UserError as error:
            assert "a.mat cannot be read" in str(error)
        else:
            assert size == 130  # a header and no array


def test_mat_that_lies_about_a_shape(tmp_path):
    body = mat({"X": np.zeros((2, 2), np.uint8)})
    (tmp_path / "a.mat").write_bytes(body.replace(struct.pack("<ii", 2, 2), struct.pack("<ii", 2, 2**30)))
    with pytest.raises(UserError, match="cannot be read"):
        read_mat(tmp_path / "a.mat")


def test_npy_is_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(UserError, match=r"x\.npy cannot be read"):
        read_npy(tmp_path / "x.npy")
    (tmp_path / "y.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (9,), }\n"
    )
    with pytest.raises(UserError, match=r"y\.npy cannot be read"):
        read_npy(tmp_path / "y.npy")


def paint(path: Path, value: int, mode: str = "L", size: tuple[int, int] = (4, 3)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(path)
    return path


def test_pictures_are_channels_first(tmp_path):
    x, good, failures = read_pictures(
        [paint(tmp_path / "a.png", 7, "RGB"), paint(tmp_path / "b.png", 9, "RGB")]
    )
    assert x.shape == (2, 3, 3, 4) and good == [0, 1] and not failures
    assert x[0, 0].max() == x[0, 0].min() == 7 and x[1, 2].min() == 255


def test_pictures_of_two_sizes_need_a_size(tmp_path):
    paths = [paint(tmp_path / "a.png", 7), paint(tmp_path / "b.png", 9, size=(5, 5))]
    with pytest.raises(UserError, match="5 x 5 where others are 3 x 4"):
        read_pictures(paths)
    assert read_pictures(paths, (6, 6))[0].shape == (2, 1, 6, 6)


def test_unreadable_pictures_are_counted_and_named(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    whole = paint(tmp_path / "a.png", 7, size=(64, 64)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    x, good, failures = read_pictures([tmp_path / n for n in ("broken.png", "a.png", "cut.png")])
    assert len(x) == 1 and good == [1] and len(failures) == 2 and "broken.png" in failures[0]


def test_classes_are_sorted_and_hidden_files_left_out(tmp_path):
    for name in ("b/2.png", "b/1.jpg", "a/x.PNG", "a/._x.png", "a/notes.txt", ".git/x.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = list_classes(tmp_path)
    assert {c: [p.name for p in paths] for c, paths in found.items()} == {
        "a": ["x.PNG"],
        "b": ["1.jpg", "2.png"],
    }


def either_reads_or_says_why(reader, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        try:
            reader(path)
        except UserError as error:
            assert "\n" not in str(error) and "file" in str(error)


@FUZZ
@given(
    content=damaged(idx(SMALL))
    | damaged(gzip.compress(idx(SMALL), mtime=0))
    | damaged(idx(SMALL)).map(lambda inner: gzip.compress(inner, mtime=0))
)
def test_fuzz_idx(content):
    either_reads_or_says_why(read_idx, content)


MAT = {"X": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "y": np.array([[1.0], [2.0]])}


def packed_in_mat(inner: bytes) -> bytes:
    """A MATLAB file of one compressed element."""
    packed = zlib.compress(inner)
    return mat({}) + struct.pack("<II", 15, len(packed)) + packed


@FUZZ
@given(
    content=damaged(mat(MAT))
    | damaged(mat(MAT, compress=True))
    | damaged(mat({"X": MAT["X"]})[128:]).map(packed_in_mat)
)
def test_fuzz_mat(content):
    either_reads_or_says_why(read_mat, content)


@pytest.mark.parametrize("inner", [b"", b"1234567"])
def test_a_compressed_element_too_short_to_be_one(tmp_path, inner):
    (tmp_path / "a.mat").write_bytes(packed_in_mat(inner))
    with pytest.raises(UserError, match=r"a\.mat cannot be read \(its compressed data hold no element\)"):
        read_mat(tmp_path / "a.mat")


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_an_npy_whose_header_does_not_end(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (9,), ".ljust(117) + b"\n"
    (tmp_path / "x.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"\0" * 9
    )
    with pytest.raises(UserError, match=r"x\.npy cannot be read") as raised:
        read_npy(tmp_path / "x.npy")
    assert "\n" not in str(raised.value)


@FUZZ
@given(content=damaged(npy(SMALL)) | damaged(npy(SMALL)[:128]))  # the header alone: most changes meet it
def test_fuzz_npy(content):
    either_reads_or_says_why(read_npy, content)


@FUZZ
@given(content=damaged(bytes(2 * 3073)))
def test_fuzz_cifar_binary(content):
    either_reads_or_says_why(lambda path: read_cifar_binary(path, 1), content)


def picture(kind: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)).save(out, kind)
    return out.getvalue()


@FUZZ
@given(content=st.one_of(*(damaged(picture(kind)) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF"))))
@pytest.mark.filterwarnings("ignore")  # Pillow warns of what it passes over
def test_fuzz_pictures(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.png")
        path.write_bytes(content)
        x, good, failures = read_pictures([path], (8, 8), 3)
    assert x.shape == (len(good), 3, 8, 8) and x.dtype == np.uint8
    assert len(good) + len(failures) == 1 and all("file.png" in f and "\n" not in f for f in failures)
