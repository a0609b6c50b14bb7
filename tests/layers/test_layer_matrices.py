"""W X is what the layer computes, whatever its geometry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fot.errors import UserError
from fot.layers import Layer, find_layers

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@st.composite
def modules(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A layer in float64 and an input for it."""
    torch.manual_seed(draw(st.integers(0, 99)))
    axes = draw(st.sampled_from([0, 1, 2, 3]))
    bias = draw(st.booleans())
    if axes == 0:
        lead = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 2)]))
        return nn.Linear(5, 4, bias=bias).double(), torch.randn(*lead, 5).double()
    groups = draw(st.sampled_from([1, 2, 4]))
    padding: Any = draw(st.sampled_from(["same", "valid", 0, 1, tuple(range(1, axes + 1))]))
    stride = 1 if padding == "same" else draw(st.sampled_from([1, 2, tuple(range(1, axes + 1))]))
    conv = CONV[axes](
        4,
        8,
        draw(st.sampled_from([1, 2, 3, tuple(range(1, axes + 1))])),
        stride=stride,
        padding=padding,
        dilation=draw(st.sampled_from([1, 2])),
        groups=groups,
        bias=bias,
        padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    ).double()
    batch = draw(st.sampled_from([(), (1,), (2,)]))
    if conv.padding_mode != "zeros" and batch == ():
        batch = (1,)  # torch pads an unbatched input in the zeros mode only
    return conv, torch.randn(*batch, 4, *range(6, 6 + axes)).double()


def product(layer: Layer, module: nn.Module, x: Tensor, like: Tensor) -> Tensor:
    """W X, laid out as the module's output."""
    y = layer.matrix(dict(module.named_parameters())) @ layer.columns(x)
    y = y.reshape(layer.outputs, -1)
    if layer.kind == "Linear":
        return y.mT.reshape(like.shape)
    batched = like if like.dim() == len(layer.shape) else like.unsqueeze(0)
    return y.reshape(layer.outputs, len(batched), *batched.shape[2:]).transpose(0, 1).reshape(like.shape)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@settings(max_examples=120, deadline=None)
@given(modules(), st.booleans())
def test_matrix_times_columns_is_the_layer(case: tuple[nn.Module, Tensor], protect_bias: bool) -> None:
    module, x = case
    (layer,) = find_layers(module, bias=protect_bias).layers
    y = module(x)
    if module.bias is not None and not protect_bias:
        with torch.no_grad():
            module.bias.zero_()
        y = module(x)
    has_bias = protect_bias and module.bias is not None
    assert layer.dimension == module.weight[0].numel() + has_bias
    assert layer.columns(x).shape[:2] == (layer.groups, layer.dimension)
    torch.testing.assert_close(product(layer, module, x, y), y, atol=1e-12, rtol=0)


@settings(max_examples=30, deadline=None)
@given(modules(), st.booleans(), st.sampled_from([(), (3,), (2, 3)]))
def test_unmatrix_undoes_matrix(
    case: tuple[nn.Module, Tensor], protect_bias: bool, lead: tuple[int, ...]
) -> None:
    module, _ = case
    (layer,) = find_layers(module, bias=protect_bias).layers
    tree = {name: torch.randn(*lead, *p.shape) for name, p in module.named_parameters()}
    matrix = layer.matrix(tree)
    assert matrix.shape == (*lead, layer.groups, layer.outputs // layer.groups, layer.dimension)
    for name, tensor in layer.unmatrix(matrix).items():
        assert torch.equal(tensor, tree[name])
    assert set(layer.unmatrix(matrix)) == {n for n in (layer.weight, layer.bias) if n}


def test_columns_come_sample_by_sample() -> None:
    """Cutting a batch in two cuts the columns in two: a sketch does not depend on the batch size."""
    layer = Layer.of("", nn.Conv2d(3, 2, 2, padding=1), "weight")
    x = torch.randn(5, 3, 4, 4)
    torch.testing.assert_close(
        layer.columns(x), torch.cat([layer.columns(x[:2]), layer.columns(x[2:])], dim=-1), atol=0, rtol=0
    )


@pytest.mark.parametrize("shape", [(2, 4), (4, 5, 1), (5,)])
def test_a_tree_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    layer = Layer.of("fc", nn.Linear(5, 4), "fc.weight")
    with pytest.raises(UserError, match=r"fc\.weight.*\(4, 5\)"):
        layer.matrix({"fc.weight": torch.zeros(shape)})


def test_a_tree_without_the_weight_is_refused() -> None:
    with pytest.raises(UserError, match=r"no 'fc\.weight'"):
        Layer.of("fc", nn.Linear(5, 4), "fc.weight").matrix({})


def test_a_bias_stacked_unlike_its_weight_is_refused() -> None:
    layer = Layer.of("", nn.Linear(5, 4), "weight", "bias")
    with pytest.raises(UserError, match="leading axes"):
        layer.matrix({"weight": torch.zeros(3, 4, 5), "bias": torch.zeros(4)})


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Linear(5, 4), (3, 4)), (nn.Conv2d(2, 2, 3), (1, 3, 8, 8)), (nn.Conv1d(2, 2, 3), (8,))],
)
def test_inputs_of_another_shape_are_refused(module: nn.Linear, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="cannot take an input"):
        Layer.of("x", module, "weight").columns(torch.zeros(shape))
