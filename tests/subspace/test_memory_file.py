"""A memory on disk: the same when read back, refused when it is not what it should be."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from fot.errors import UserError
from fot.layers import find_layers
from fot.subspace import SubspaceMemory, sketch


def memory_of(model: nn.Module, seed: int = 0) -> SubspaceMemory:
    memory = SubspaceMemory.empty(find_layers(model).layers)
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(seed))
    memory, _ = memory.expand(sketch(model, [x], memory.layers, memory.bases, size="d", key=0), threshold=0.8)
    return memory


def model(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(6, 4, 2, groups=2), nn.ReLU(), nn.Linear(3, width))


def test_a_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    grown = memory_of(model())
    for memory in (grown, SubspaceMemory.empty(grown.layers, torch.float64), grown.freeze("2")):
        memory.save(tmp_path / "memory.safetensors")
        back = SubspaceMemory.load(tmp_path / "memory.safetensors", memory.layers)
        assert back.layers == memory.layers and list(back.bases) == list(memory.bases)
        for name, basis in memory.bases.items():
            assert back.bases[name].dtype == basis.dtype and torch.equal(back.bases[name], basis)


def test_the_same_memory_is_the_same_bytes(tmp_path: Path) -> None:
    for name in "ab":
        memory_of(model()).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    memory_of(model(), seed=1).save(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "b").read_bytes()


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path, memory = tmp_path / "memory", memory_of(model())
    memory.save(path)
    content = path.read_bytes()
    for length in [0, 4, 8, 50, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="cut short"):
            SubspaceMemory.load(path, memory.layers)


def test_the_memory_of_another_model_is_refused(tmp_path: Path) -> None:
    path, memory = tmp_path / "memory", memory_of(model())
    memory.save(path)
    others = [
        find_layers(nn.Sequential(nn.Conv1d(6, 4, 2))).layers,
        find_layers(model(), bias=True).layers,
        memory.layers[:1],
        memory.layers[::-1][:1],
    ]
    for layers in others:
        with pytest.raises(UserError, match="another model"):
            SubspaceMemory.load(path, layers)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path, layers = tmp_path / "memory", memory_of(model()).layers
    with pytest.raises(UserError, match="no memory file"):
        SubspaceMemory.load(path, layers)
    path.write_text("hello, this is not a tensor file")
    with pytest.raises(UserError, match="no memory file"):
        SubspaceMemory.load(path, layers)
    safetensors.torch.save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="no memory file"):
        SubspaceMemory.load(path, layers)
    for header in ({"format": 2}, [], 7):
        safetensors.torch.save_file({"x": torch.zeros(2)}, path, {"fot": json.dumps(header)})
        with pytest.raises(UserError, match="this version reads 1"):
            SubspaceMemory.load(path, layers)


@pytest.mark.parametrize("damage", [float("nan"), 0.5])
def test_a_basis_that_is_not_orthonormal_is_refused(tmp_path: Path, damage: float) -> None:
    path, memory = tmp_path / "memory", memory_of(model())
    bases = {name: basis.clone() for name, basis in memory.bases.items()}
    bases["2"][0, 0, 0] += damage
    SubspaceMemory(memory.layers, bases).save(path)
    with pytest.raises(UserError, match="basis of '2' is not orthonormal"):
        SubspaceMemory.load(path, memory.layers)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory"
    memory_of(model()).save(path)
    content = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        memory_of(model(), seed=1).save(path)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["memory"]


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        memory_of(model()).save(tmp_path / "none" / "memory")
