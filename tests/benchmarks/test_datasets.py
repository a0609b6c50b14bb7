"""The known sets, from small files that are made here in the publishers' own formats."""

from __future__ import annotations

import gzip
import pickle  # noqa: TID251 - to write the python version of CIFAR
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fot.benchmarks import BENCHMARKS, build
from fot.benchmarks import datasets as known_sets
from fot.benchmarks.datasets import KNOWN, data_root, find, load
from fot.errors import UserError

random = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_other_places(monkeypatch):
    monkeypatch.delenv("FOT_DATA", raising=False)
    fashion = KNOWN["fashion-mnist"]
    monkeypatch.setitem(KNOWN, "fashion-mnist", known_sets.replace(fashion, elsewhere=()))


def pixels(n: int, *shape: int) -> np.ndarray:
    return random.integers(0, 256, (n, *shape), np.uint8)


def write_idx_set(
    folder: Path, n: int = 20, zipped: bool = True, side: int = 28
) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        x, y = pixels(n, side, side), (np.arange(n) % 10).astype(np.uint8)
        for stem, array in ((f"{split}-images-idx3-ubyte", x), (f"{split}-labels-idx1-ubyte", y)):
            head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
            data = head + array.tobytes()
            (folder / (stem + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)
        if split == "train":
            kept = x, y
    return kept


def write_cifar(root: Path, classes: int, python: bool, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Every training file holds the same `n` pictures; returned are one file's."""
    x, y = pixels(n, 3, 32, 32), np.arange(n) % classes
    kind = {(10, False): "cifar-10-batches-bin", (10, True): "cifar-10-batches-py"}.get((classes, python))
    folder = root / (kind or ("cifar-100-python" if python else "cifar-100-binary"))
    folder.mkdir(parents=True)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"] if classes == 10 else ["train", "test"]
    for name in names:
        if python:
            key = "labels" if classes == 10 else "fine_labels"
            (folder / name).write_bytes(pickle.dumps({"data": x.reshape(n, -1), key: y.tolist()}, 2))
        else:
            labels = [y] if classes == 10 else [np.full(n, 19), y]
            columns = [column[:, None] for column in labels]
            np.concatenate([*columns, x.reshape(n, -1)], 1).astype(np.uint8).tofile(folder / f"{name}.bin")
    return x, y


def write_svhn(folder: Path, n: int = 20) -> tuple[np.ndarray, np.ndarray]:
    from scipy.io import savemat

    folder.mkdir(parents=True)
    x, digits = pixels(n, 32, 32, 3), np.arange(n) % 10
    for split in ("train", "test"):
        y = np.where(digits == 0, 10, digits).astype(np.uint8)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y}, do_compression=True)
    return x, digits


def write_classes(folder: Path, names: str | list[str], each: int, mode: str = "L", size: int = 28) -> None:
    for c, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for k in range(each):
            picture = Image.new(mode, (size, size), 20 * c if mode == "L" else (20 * c % 256, k, 0))
            picture.save(folder / name / f"{k:03d}.png")


@pytest.mark.parametrize(
    "name, place, zipped",
    [
        ("mnist", "mnist", True),
        ("mnist", "MNIST/raw", False),
        ("fashion-mnist", "fashion-mnist", True),
        ("fashion-mnist", "FashionMNIST/raw", True),
    ],
)
def test_idx_sets_in_the_usual_places(tmp_path, name, place, zipped):
    x, y = write_idx_set(tmp_path / place, zipped=zipped)
    data = load(name, tmp_path)
    assert data.name == name and data.train_x.shape == (20, 1, 28, 28)
    assert np.array_equal(data.train_x[:, 0], x) and np.array_equal(data.train_y, y)
    assert "60000 + 10000" in data.notes[0]  # fewer than the publisher's: said, not refused


@pytest.mark.parametrize("python", [False, True])
def test_cifar_in_both_versions(tmp_path, python):
    x, y = write_cifar(tmp_path / "cifar10", 10, python, 10)
    data = load("cifar10", tmp_path)
    assert len(data.train_y) == 50 and np.array_equal(data.test_x, x) and np.array_equal(data.train_y[:10], y)
    x, y = write_cifar(tmp_path, 100, python, 100)
    data = load("cifar100", tmp_path)
    assert data.classes == 100 and np.array_equal(data.train_x, x) and np.array_equal(data.train_y, y)


def test_svhn_turns_tens_into_noughts_and_keeps_pictures_upright(tmp_path):
    x, y = write_svhn(tmp_path / "svhn")
    data = load("svhn", tmp_path)
    assert np.array_equal(data.train_x, x.transpose(0, 3, 1, 2)) and np.array_equal(data.train_y, y)


def test_notmnist_leaves_unreadable_pictures_out_and_names_them(tmp_path):
    write_classes(tmp_path / "notmnist" / "notMNIST_small", "ABCDEFGHIJ", 20)
    (tmp_path / "notmnist/notMNIST_small/A/007.png").write_bytes(b"")
    data = load("notmnist", tmp_path)
    assert (len(data.train_y), len(data.test_y)) == (179, 20) and data.class_names == tuple("ABCDEFGHIJ")
    assert np.array_equal(data.train_x[:, 0, 0, 0], 20 * data.train_y)
    assert "1 picture cannot be read and is left out" in data.notes[0] and "007.png" in data.notes[0]


WORDS = [f"n{k:08d}" for k in range(10)]


def test_miniimagenet_as_folders_is_split_five_to_one(tmp_path):
    write_classes(tmp_path / "miniimagenet", WORDS, 6, "RGB", 10)
    data = load("miniimagenet", tmp_path)
    assert data.train_x.shape == (50, 3, 84, 84) and len(data.test_y) == 10
    assert np.array_equal(data.train_x[:, 0, 0, 0], 20 * data.train_y)


def test_miniimagenet_of_few_shot_folders_is_pooled(tmp_path):
    for part, words in (("train", WORDS[:6]), ("val", WORDS[6:8]), ("test", WORDS[8:])):
        write_classes(tmp_path / "miniimagenet" / part, words, 6, "RGB", 84)
    data = load("miniimagenet", tmp_path)
    assert data.class_names == tuple(WORDS) and (len(data.train_y), len(data.test_y)) == (50, 10)


def test_miniimagenet_of_train_and_test_folders(tmp_path):
    write_classes(tmp_path / "miniimagenet" / "train", WORDS, 5, "RGB", 84)
    write_classes(tmp_path / "miniimagenet" / "test", WORDS, 2, "RGB", 84)
    data = load("miniimagenet", tmp_path)
    assert (len(data.train_y), len(data.test_y)) == (50, 20)


def write_arrays(folder: Path, classes: int, each: int, side: int) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        y = np.arange(classes * each) % classes
        x = pixels(len(y), side, side, 3)
        x[..., 0] = y[:, None, None]
        np.save(folder / f"{split}_x.npy", x)
        np.save(folder / f"{split}_y.npy", y)


def test_miniimagenet_and_its_stand_in_as_arrays(tmp_path):
    write_arrays(tmp_path / "miniimagenet", 10, 4, 84)
    write_arrays(tmp_path / "tinyimagenet100", 10, 4, 64)
    for name in ("miniimagenet", "miniimagenet-standin"):
        stream = build(name, data_dir=tmp_path, tasks=2, clients=4)
        tasks = list(stream)
        assert (
            stream.input_shape == (3, 84, 84) and stream.multi_head and [t.classes for t in tasks] == [5, 5]
        )
        red = tasks[1].train_x[:, 0].mean((1, 2)) * 0.27292014 + 0.47313006
        assert ((red * 255).round().long() - 5).tolist() == tasks[1].train_y.tolist()
        assert tasks[0].augment is not None and tasks[0].augment(
            tasks[0].train_x[:2], tasks[0].train_y[:2]
        ).shape[1:] == (3, 84, 84)
    assert build("miniimagenet", data_dir=tmp_path, tasks=1, augment=False, clients=4)[0].augment is None


def test_tiny_imagenet_as_it_is_published(tmp_path):
    root = tmp_path / "tinyimagenet100" / "tiny-imagenet-200"
    lines = []
    for c, word in enumerate(WORDS):
        write_classes(root / "train" / word, ["images"], 3, "RGB", 64)
        (root / "val" / "images").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (c, c, c)).save(root / "val" / "images" / f"val_{9 - c}.JPEG", "PNG")
        lines.append(f"val_{9 - c}.JPEG\t{word}\t0\t0\t62\t62\n")
    (root / "val" / "val_annotations.txt").write_text("".join(reversed(lines)))
    data = load("tinyimagenet100", tmp_path)
    assert len(data.train_y) == 30 and np.array_equal(data.test_x[:, 0, 0, 0], data.test_y)


def test_the_papers_streams_on_small_files(tmp_path):
    x, _ = write_idx_set(tmp_path / "mnist", 40)
    write_idx_set(tmp_path / "fashion-mnist", 40)
    write_cifar(tmp_path / "cifar10", 10, False, 10)
    write_cifar(tmp_path / "cifar100", 100, False, 1000)
    write_svhn(tmp_path / "svhn", 40)
    write_classes(tmp_path / "notmnist" / "notMNIST_small", "ABCDEFGHIJ", 10)
    pmnist = build("pmnist", data_dir=tmp_path, clients=4)
    assert len(pmnist) == 10 and pmnist.input_shape == (784,) and not pmnist.multi_head
    assert abs(pmnist[0].train_x[3, 29].item() - (x[3, 1, 1] / 255 - 0.1307) / 0.3081) < 1e-5
    cifar = list(build("cifar100", data_dir=tmp_path, clients=5))
    assert [t.classes for t in cifar] == [10] * 10 and cifar[0].train_x.shape == (100, 3, 32, 32)
    five = build("five-datasets", data_dir=tmp_path, clients=5)
    tasks = list(five)
    assert [t.name for t in tasks] == ["cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"]
    assert all(t.train_x.shape[1:] == five.input_shape == (3, 32, 32) and t.classes == 10 for t in tasks)
    corner = {t.name: round(t.train_x[0, 0, 0, 0].item(), 4) for t in tasks}
    assert corner["mnist"] == round(-0.1 / 0.2752, 4) and corner["notmnist"] == round(-0.4254 / 0.4501, 4)
    assert corner["fashion-mnist"] == round(-0.2190 / 0.3318, 4)
    assert all("where the publisher's are" in t.notes[0] for t in tasks)
    with pytest.raises(UserError, match=r"benchmark\.tasks: 6 .* from 1 to 5"):
        build("five-datasets", data_dir=tmp_path, tasks=6)
    shutil.rmtree(tmp_path / "notmnist")
    build("five-datasets", data_dir=tmp_path, tasks=4)
    with pytest.raises(UserError, match=r"notmnist is not in .* run `fot data fetch notmnist"):
        build("five-datasets", data_dir=tmp_path)


def test_the_papers_clients():
    clients = {
        name: BENCHMARKS[name].clients for name in ("pmnist", "cifar100", "five-datasets", "miniimagenet")
    }
    assert clients == {"pmnist": 125, "cifar100": 50, "five-datasets": 150, "miniimagenet": 50}


def test_a_missing_set_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match=r"fot data fetch mnist --data-dir .* or put the four IDX files"):
        load("mnist", tmp_path)
    with pytest.raises(UserError) as raised:
        load("miniimagenet", tmp_path)
    assert "fetch" not in str(raised.value) and "a folder a class" in str(raised.value)
    with pytest.raises(UserError, match="choose one of mnist"):
        find("imagenet", tmp_path)


def test_miniimagenet_is_found_where_it_lies(tmp_path):
    (tmp_path / "miniimagenet" / "n01").mkdir(parents=True)
    assert find("miniimagenet", tmp_path) is None  # folders, but nothing in them
    write_classes(tmp_path / "miniimagenet", WORDS, 6, "RGB", 10)
    assert find("miniimagenet", tmp_path)[0] == tmp_path / "miniimagenet"


@pytest.mark.parametrize("side", [20, 29])
def test_pictures_of_another_size_are_refused(tmp_path, side):
    write_idx_set(tmp_path / "mnist", side=side)
    words = rf"mnist holds pictures of type uint8 and shape \(1, {side}, {side}\), .* bytes, 1 x 28 x 28"
    with pytest.raises(UserError, match=words + ".*or run `fot data fetch mnist") as raised:
        load("mnist", tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x: x[..., 0], r"type uint8 and shape \(1, 84, 84\)"),
        (lambda x: x / np.float32(255), r"type float32 and shape \(84, 84, 3\)"),
        (lambda x: x.transpose(0, 3, 1, 2) / np.float32(255), r"type float32 and shape \(3, 84, 84\)"),
        (lambda x: x[:, :64, :64], r"type uint8 and shape \(3, 64, 64\)"),
        (lambda x: x[..., :2], r"neither 1 nor 3 channels"),
    ],
)
def test_arrays_of_another_kind_are_refused(tmp_path, change, words):
    write_arrays(tmp_path / "miniimagenet", 10, 2, 84)
    for split in ("train", "test"):
        path = tmp_path / "miniimagenet" / f"{split}_x.npy"
        np.save(path, change(np.load(path)))
    with pytest.raises(UserError, match=words) as raised:
        load("miniimagenet", tmp_path)
    assert "fetch" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_set_with_a_file_missing_names_the_file(tmp_path):
    write_idx_set(tmp_path / "mnist")
    (tmp_path / "mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(
        UserError, match="t10k-labels-idx1-ubyte is missing: put it there, or run `fot data fetch mnist"
    ):
        load("mnist", tmp_path)


def test_a_mislabelled_set_is_refused(tmp_path):
    folder = tmp_path / "cifar10"
    write_cifar(folder, 10, False, 10)
    rows = np.fromfile(folder / "cifar-10-batches-bin/data_batch_2.bin", np.uint8)
    rows[0] = 12
    rows.tofile(folder / "cifar-10-batches-bin/data_batch_2.bin")
    with pytest.raises(UserError, match="cifar-10-batches-bin: training labels from 0 to 12"):
        load("cifar10", tmp_path)


def test_pictures_that_are_labels_are_refused(tmp_path):
    write_idx_set(tmp_path / "mnist", zipped=False)
    folder = tmp_path / "mnist"
    (folder / "train-images-idx3-ubyte").write_bytes((folder / "train-labels-idx1-ubyte").read_bytes())
    with pytest.raises(UserError, match="pictures of shape"):
        load("mnist", tmp_path)


def test_svhn_without_its_arrays_is_refused(tmp_path):
    from scipy.io import savemat

    write_svhn(tmp_path / "svhn")
    savemat(tmp_path / "svhn/test_32x32.mat", {"y": np.ones((3, 1))})
    with pytest.raises(UserError, match=r"test_32x32\.mat cannot be read"):
        load("svhn", tmp_path)


def test_data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("FOT_DATA", str(tmp_path / "a"))
    assert data_root() == tmp_path / "a" and data_root(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("FOT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert data_root() == tmp_path / "c" / "fot"
