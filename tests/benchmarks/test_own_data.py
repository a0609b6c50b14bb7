from __future__ import annotations

import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fot.benchmarks import build
from fot.benchmarks.own import from_arrays, from_tensors, read
from fot.errors import UserError


def arrays(n: int = 12, classes: int = 3, shape: tuple[int, ...] = (4,)) -> dict[str, np.ndarray]:
    y = np.arange(n) % classes
    x = np.random.default_rng(0).normal(size=(n, *shape)).astype(np.float32)
    return {"train_x": x, "train_y": y, "test_x": x[:6], "test_y": y[:6]}


def test_npz_and_npy_read_alike(tmp_path):
    parts = arrays() | {"train_owner": np.arange(12) // 4}
    np.savez(tmp_path / "mine.npz", **parts)
    (tmp_path / "mine").mkdir()
    for name, array in parts.items():
        np.save(tmp_path / "mine" / f"{name}.npy", array)
    for path in (tmp_path / "mine.npz", tmp_path / "mine"):
        data = read(path)
        assert data.name == "mine" and data.classes == 3 and np.array_equal(data.train_x, parts["train_x"])
        assert np.array_equal(data.owners, parts["train_owner"])


@pytest.mark.parametrize(
    "shape, channels", [((5, 6), 1), ((5, 6, 3), 3), ((3, 5, 6), 3), ((5, 6, 1), 1), ((1, 5, 6), 1)]
)
def test_pictures_become_channels_first(shape, channels):
    parts = arrays(shape=shape)
    parts |= {k: (parts[k] * 50).astype(np.uint8) for k in ("train_x", "test_x")}
    assert from_arrays("mine", parts).train_x.shape == (12, channels, 5, 6)


def test_tensors(tmp_path):
    x, y = torch.randn(10, 7), torch.arange(10) % 2
    data = from_tensors("mine", (x, y), (x[:4], y[:4]), owners=torch.arange(10) + 5)
    assert np.array_equal(data.train_x, x.numpy()) and data.owners.tolist() == list(range(10))
    data = from_tensors("mine", (x, y), owners=torch.arange(10) % 4)
    rows = (data.train_x[:, None] == x.numpy()).all(2).argmax(1)
    assert np.array_equal(data.owners, rows % 4)
    assert len(data.test_y) == 2 and np.array_equal(data.train_y, y.numpy()[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_any_precision(dtype):
    x = torch.arange(40.0).view(10, 4)  # exact in every one of them
    data = from_tensors("mine", (x.to(dtype).requires_grad_(), torch.arange(10) % 2))
    assert data.train_x.dtype == np.float32
    assert sorted(np.concatenate([data.train_x, data.test_x])[:, 0].tolist()) == list(range(0, 40, 4))


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"train": (torch.zeros(9, 4), torch.arange(10))},
            r"inputs of shape \(9, 4\) and labels of shape \(10,\)",
        ),
        ({"train": (torch.zeros(10), torch.arange(10))}, r"inputs of shape \(10,\)"),
        ({"train": (torch.zeros(10, 4), torch.zeros(10, 1).long())}, r"labels of shape \(10, 1\)"),
        ({"train": (torch.zeros(0, 4), torch.zeros(0).long())}, r"inputs of shape \(0, 4\)"),
        ({"train": (torch.zeros(10, 4), torch.arange(10) / 2)}, "one whole number a sample"),
        (
            {"train": (torch.zeros(10, 4), torch.arange(10) % 2 - 1)},
            "a label is -1; number the classes from 0",
        ),
        ({"train": (torch.zeros(10, 4).to(torch.complex64), torch.arange(10) % 2)}, "give numbers"),
        ({"test": (torch.zeros(3, 4), torch.arange(2))}, r"inputs of shape \(3, 4\)"),
        ({"test_share": 1.0}, "between 0 and 1"),
        ({"owners": torch.arange(9)}, "9 owners for 10 training samples"),
        ({"owners": torch.arange(10) / 2}, "owners of type float32"),
    ],
)
def test_tensors_that_do_not_add_up(change, words):
    good = {"train": (torch.zeros(10, 4), torch.arange(10) % 2)}
    from_tensors("mine", **good)
    with pytest.raises(UserError, match=words):
        from_tensors("mine", **(good | change))


def test_labels_are_numbered_by_their_sorted_order():
    parts = arrays() | {"train_y": np.repeat([7, 3, 40], 4), "test_y": np.array([40, 3, 7, 7, 3, 40])}
    data = from_arrays("mine", parts)
    assert data.class_names == ("3", "7", "40") and data.train_y.tolist() == [1] * 4 + [0] * 4 + [2] * 4
    assert data.test_y.tolist() == [2, 0, 1, 1, 0, 2]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"train_x": None}, "no array train_x"),
        ({"train_y": np.zeros(12)}, "one whole number a sample"),
        ({"train_y": np.zeros((12, 2), int)}, "one whole number a sample"),
        ({"test_y": np.full(6, 9)}, "the class 9 is tested"),
        ({"train_x": np.full((12, 4), np.nan)}, "finite"),
        ({"train_x": np.zeros((11, 4))}, "11 training samples but 12 labels"),
        ({"train_x": np.zeros((12, 5))}, "shape"),
        ({"train_x": np.zeros((12, 5, 6, 7), np.uint8)}, "neither 1 nor 3 channels"),
        ({"train_x": np.array([["a"] * 4] * 12)}, "give numbers"),
        ({"train_owner": np.arange(3)}, "3 owners for 12"),
    ],
)
def test_arrays_that_do_not_add_up(change, words):
    parts = {k: v for k, v in (arrays() | change).items() if v is not None}
    with pytest.raises(UserError, match=words):
        from_arrays("mine", parts)


def test_an_npz_is_never_unpickled(tmp_path):
    np.savez(tmp_path / "mine.npz", **(arrays() | {"train_y": np.array([{}] * 12, object)}))
    with pytest.raises(UserError, match=r"mine\.npz cannot be read"):
        read(tmp_path / "mine.npz")


def folder_of_classes(root: Path, each: int = 5) -> None:
    for c, name in enumerate(("cat", "dog", "emu")):
        (root / name).mkdir(parents=True)
        for k in range(each):
            Image.new("RGB", (6, 4), (c * 50, k, 9)).save(root / name / f"{k}.png")


def test_a_folder_of_classes(tmp_path):
    folder_of_classes(tmp_path / "pets")
    data = read(tmp_path / "pets")
    assert (
        data.name == "pets"
        and data.class_names == ("cat", "dog", "emu")
        and data.train_x.shape == (12, 3, 4, 6)
    )
    assert np.array_equal(data.train_x[:, 0, 0, 0], 50 * data.train_y) and np.bincount(
        data.test_y
    ).tolist() == [1, 1, 1]
    assert read(tmp_path / "pets", size=8).train_x.shape == (12, 3, 8, 8)


def test_a_folder_that_is_split_already(tmp_path):
    folder_of_classes(tmp_path / "pets" / "train")
    folder_of_classes(tmp_path / "pets" / "val", each=2)
    assert len(read(tmp_path / "pets").test_y) == 6
    (tmp_path / "pets/val/yak").mkdir()
    Image.new("RGB", (6, 4)).save(tmp_path / "pets/val/yak/1.png")
    with pytest.raises(UserError, match="'yak' is tested"):
        read(tmp_path / "pets")


def test_folders_without_use(tmp_path):
    with pytest.raises(UserError, match="0 folders with pictures"):
        read(tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path / "nothing")
    (tmp_path / "text.txt").touch()
    with pytest.raises(UserError, match="neither a folder"):
        read(tmp_path / "text.txt")
    for size in (-1, 4097):
        with pytest.raises(UserError, match=f"size = {size}: give 1 to 4096"):
            read(tmp_path, size=size)
    folder_of_classes(tmp_path / "pets", each=1)
    (tmp_path / "pets/dog/0.png").write_bytes(b"woof")
    with pytest.raises(UserError, match="not one picture of the class 'dog'"):
        read(tmp_path / "pets")


def test_up_to_twenty_unreadable_pictures_are_named(tmp_path):
    folder_of_classes(tmp_path / "pets")
    for n, said in ((1, "1 picture cannot be read and is"), (2, "2 pictures cannot be read and are")):
        (tmp_path / f"pets/dog/bad{n:02d}.png").write_bytes(b"woof")
        assert read(tmp_path / "pets").notes[0].startswith(f"{said} left out: ")
    for n in range(3, 24):
        (tmp_path / f"pets/dog/bad{n:02d}.png").write_bytes(b"woof")
    (note,) = read(tmp_path / "pets").notes
    assert note.startswith("23 pictures") and note.count(".png") == 20
    assert "bad01.png" in note and "bad20.png" in note and "bad21.png" not in note
    assert note.endswith("; and 3 more")


def test_a_damaged_file_of_ones_own_cannot_be_fetched(tmp_path):
    (tmp_path / "mine.npz").write_bytes(b"no")
    with pytest.raises(UserError, match=r"mine\.npz cannot be read .*: replace it$"):
        read(tmp_path / "mine.npz")
    (tmp_path / "mine").mkdir()
    np.save(tmp_path / "mine/train_x.npy", np.zeros((2, 2)))
    with pytest.raises(UserError, match=r"train_y\.npy is missing: put it there$"):
        read(tmp_path / "mine")


TABLE = "a,b,kind,who\n" + "".join(f"{n},{5},{'xy'[n % 2]},w{n % 3}\n" for n in range(20))


def test_a_table_is_standardised_by_its_training_part(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    data = read(tmp_path / "t.csv", label="kind", owner="who")
    assert data.class_names == ("x", "y") and (len(data.train_y), len(data.test_y)) == (16, 4)
    assert abs(data.train_x[:, 0].mean()) < 1e-6 and abs(data.train_x[:, 0].std() - 1) < 1e-6
    assert (data.train_x[:, 1] == 0).all() and set(data.owners) == {0, 1, 2}
    # (n - mean) / std is increasing in n, so it tells the rows apart: owners and labels went with them.
    rows = np.concatenate([data.train_x[:, 0], data.test_x[:, 0]]).argsort().argsort()[:16]
    assert np.array_equal(rows % 2, data.train_y) and np.array_equal(rows % 3, data.owners)


def test_a_table_that_says_its_split(tmp_path):
    lines = "".join(f"{n},{n % 2},{'test' if n < 4 else 'train'}\n" for n in range(10))
    (tmp_path / "t.csv").write_text("a,label,split\n" + lines)
    data = read(tmp_path / "t.csv")
    assert data.train_x.shape == (6, 1) and len(data.test_y) == 4 and data.train_x[0] > data.test_x.max()


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "no rows"),
        ("a,label\n", "no rows"),
        ("a,b\n1,2\n", "no column 'label'"),
        ("label\n1\n", "no columns of numbers"),
        ("a,label\n1,x\nred,y\n", "line 3: a = 'red' is not a number"),
        ("a,label\n1,x\ninf,y\n", "not a finite number"),
        ("a,label\n1,x\n2\n", r"t\.csv, line 3: label is empty; fill it in, or remove the row$"),
        ("a,label\n1,x\n\n2, \n", r"t\.csv, line 4: label is empty"),
        ("a,label\n1,x,3\n", r"line 2: too many columns; the header has 2$"),
        ("a,label\n1,x\n2,y,3\n", r"line 3: too many columns"),
        ("a,label,a\n1,x,3\n", r"t\.csv has two columns 'a': rename or remove one$"),
        ("a,label\n1,x\n,y\n", "line 3: a = '' is not a number"),
        ("a,label\n" + "1e308,x\n-1e308,y\n" * 9, "t.csv: a has values too large for a mean and deviation"),
        ("a,label,split\n1,x,maybe\n", "line 2: split = 'maybe'; it may hold train and test"),
        ("a,label,split\n1,x,train\n1,x\n", "line 3: split = None; it may hold train and test"),
        ("a,label\n1,x\n", "0 to test on"),
        ('a,label\n1,"x\n', "cannot be read"),
    ],
)
def test_tables_without_use(tmp_path, text, words):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "t.csv")


def test_a_table_without_an_owner_in_a_row(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE + "20,5,x,\n")
    with pytest.raises(UserError, match=r"line 22: who is empty"):
        read(tmp_path / "t.csv", label="kind", owner="who")


def test_streams_of_own_data(tmp_path):
    folder_of_classes(tmp_path / "pets", each=10)
    np.savez(tmp_path / "mine.npz", **arrays(classes=4, n=40))
    (tmp_path / "t.csv").write_text(TABLE)
    split = build("own-split", path=str(tmp_path / "mine.npz"), clients=3)
    assert len(split) == 2 and [t.name for t in split] == ["classes 0, 1", "classes 2, 3"]
    permuted = build("own-permuted", path=str(tmp_path / "pets"), tasks=2, clients=3)
    assert permuted.input_shape == (72,) and permuted[0].train_x.mean().abs() < 1e-5
    turn = build("own-sequence", paths=[str(tmp_path / "mine.npz"), str(tmp_path / "mine.npz")], clients=3)
    assert [t.classes for t in turn] == [4, 4]
    natural = build(
        "own-split", path=str(tmp_path / "t.csv"), label="kind", owner="who", partition="natural", clients=3
    )
    task = natural[0]
    assert sum(map(len, task.clients)) == len(task.train_y) == 16
    for mistake in ({"path": ""}, {"path": str(tmp_path / "t.csv"), "test_share": 1.0}):
        with pytest.raises(UserError):
            build("own-split", **mistake)
    with pytest.raises(UserError, match="at least one"):
        build("own-sequence")
    gone = str(tmp_path / "gone.npz")
    with pytest.raises(UserError, match=r"benchmark\.paths: .*gone\.npz does not exist"):
        build("own-sequence", paths=[str(tmp_path / "mine.npz"), gone])
    with pytest.raises(UserError, match=r"gone\.npz does not exist"):
        build("own-split", path=gone)
    with pytest.raises(UserError, match=r"benchmark\.size: 5000 is out of range; .* from 0 to 4096"):
        build("own-split", path=str(tmp_path / "pets"), size=5000)


def whole_npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays())
    return out.getvalue()


NPZ = whole_npz()


def says_why(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        try:
            read(path)
        except UserError as error:
            assert "\n" not in str(error)


@settings(max_examples=80, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(NPZ) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    end=st.integers(0, len(NPZ)) | st.just(len(NPZ)),
)
def test_fuzz_npz(changes, end):
    data = bytearray(NPZ)
    for place, value in changes:
        data[place] = value
    says_why("mine.npz", bytes(data[:end]))


@settings(max_examples=80, deadline=None)
@given(text=st.text(alphabet='a,"\n1.label\r\0é', max_size=40) | st.binary(max_size=40))
def test_fuzz_csv(text):
    content = text.encode() if isinstance(text, str) else text
    says_why("t.csv", b"a,label\n1,x\n2,y\n" + content)
