"""The networks of the paper: geometry, parameter counts, growing heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fot.errors import UserError
from fot.models import MODELS, MultiHead, alexnet, mlp, multi_head, resnet18, resnet18_norm
from fot.options import checked


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_pmnist_parameters() -> None:
    model = mlp(inputs=784, hidden=(400, 400, 400), dropout=(0.2, 0.5, 0.5))
    assert count(model) == 784 * 400 + 400 + 2 * (400 * 400 + 400) + 400 * 10 + 10 == 638_810
    assert [m.p for m in model if isinstance(m, nn.Dropout)] == [0.2, 0.5, 0.5]
    assert model(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_alexnet_parameters() -> None:
    model = alexnet()
    body = 3 * 16 * 64 + 64 * 9 * 128 + 128 * 4 * 256 + 1024 * 2048 + 2048 * 2048
    assert count(model) == body == 6_499_328
    for _ in range(10):
        model.add_task(10)
    # 26.8 MB in float32, as READING.md counts it
    assert count(model) == body + 10 * 2048 * 10
    assert model.body.fc1.in_features == 1024


def stages(filters: int) -> int:
    """Convolution weights of the four stages by hand."""
    total = 4 * filters * filters * 9
    for width in (2 * filters, 4 * filters, 8 * filters):
        total += (width // 2) * width * 9 + 3 * width * width * 9 + (width // 2) * width
    return total


def test_resnet_parameters() -> None:
    model = resnet18()
    assert model.features == 640
    assert count(model) == 3 * 9 * 20 + stages(20) == 1_090_140
    model.add_task(10)
    assert model(torch.zeros(2, 3, 32, 32), 0).shape == (2, 10)
    assert count(model) == 1_090_140 + 6400


def test_resnet_norm_parameters() -> None:
    model = resnet18_norm()
    assert model.features == 2304
    affine = 2 * (32 + 4 * 32 + 5 * 64 + 5 * 128 + 5 * 256)
    assert count(model) == 3 * 9 * 32 + stages(32) + affine == 2_795_040
    model.add_task(5)
    assert model(torch.zeros(2, 3, 84, 84), 0).shape == (2, 5)
    assert not any(name.endswith("running_mean") for name, _ in model.named_buffers())


def test_batch_norm_uses_the_batch_in_evaluation_too() -> None:
    model = resnet18_norm(filters=2, size=32)
    model.add_task(3)
    x = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model.eval()
    assert not torch.allclose(model(x, 0)[:3], model(x[:3], 0))
    assert torch.allclose(model(x, 0), model(10 * x, 0), atol=1e-3)  # scale is normalised away


@pytest.mark.parametrize("name", ["alexnet", "resnet18", "resnet18_norm"])
def test_heads_grow_and_are_apart(name: str) -> None:
    model = MODELS[name](size=32)
    assert isinstance(model, MultiHead) and len(model.heads) == 0
    model.double().eval()
    for classes in (10, 5, 7):
        model.add_task(classes)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert [model(x, t).shape[1] for t in range(3)] == [10, 5, 7]
    assert model.heads[1].weight.dtype == torch.float64 and model.heads[1].bias is None
    model(x, 1).sum().backward()
    assert model.heads[0].weight.grad is None and model.heads[1].weight.grad is not None


def test_multi_head_mlp() -> None:
    model = mlp(inputs=64, hidden=(30, 20), multi_head=True)
    assert isinstance(model, MultiHead)
    model.add_task(4)
    assert model(torch.zeros(3, 64), task=0).shape == (3, 4)
    assert model.heads[0].bias is not None


def test_any_body_becomes_multi_head_in_one_line() -> None:
    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten())
    model = multi_head(body, (3, 8, 8))
    assert model.features == 4 * 6 * 6
    assert body.training and body[1].num_batches_tracked == 0
    model.add_task(2)
    assert model(torch.zeros(5, 3, 8, 8), 0).shape == (5, 2)


def test_wrong_options_are_the_users_mistake() -> None:
    with pytest.raises(UserError, match="2 hidden layers but 1 dropout"):
        mlp(dropout=(0.1,))
    with pytest.raises(UserError, match="one kernel for each"):
        alexnet(kernels=(3, 3))
    with pytest.raises(UserError, match="too small"):
        alexnet(size=8)
    with pytest.raises(UserError, match="too small"):
        resnet18(size=8)  # 8, 8, 4, 2, 1: nothing is left to pool


@pytest.mark.parametrize(
    ("model", "option", "value", "said"),
    [
        ("mlp", "hidden", [5, -1], r"model\.hidden\[1\]: -1 is out of range.*whole number at least 1"),
        ("mlp", "hidden", [0], r"model\.hidden\[0\]: 0 is out of range"),
        ("mlp", "inputs", 0, r"model\.inputs: 0 is out of range"),
        ("mlp", "classes", -2, r"model\.classes: -2 is out of range"),
        ("mlp", "dropout", [2.0, 0.1], r"model\.dropout\[0\]: 2\.0 is out of range; allowed: .*from 0 to 1"),
        ("alexnet", "channels", [64, -8, 3], r"model\.channels\[1\]: -8"),
        ("alexnet", "kernels", [4, 3, 0], r"model\.kernels\[2\]: 0"),
        ("alexnet", "hidden", [-5], r"model\.hidden\[0\]: -5"),
        ("alexnet", "dropout", [-0.1], r"model\.dropout\[0\]: -0\.1"),
        ("alexnet", "size", 0, r"model\.size: 0"),
        *((name, option, 0, rf"model\.{option}: 0 is out of range")
          for name in ("resnet18", "resnet18_norm") for option in ("filters", "stride", "size")),
    ],
)  # fmt: skip
def test_options_out_of_range_are_named(model: str, option: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        checked(MODELS[model], {option: value}, "model")
