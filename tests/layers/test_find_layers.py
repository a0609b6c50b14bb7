"""Which layers are protected, which are not, and why; and what they receive."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations

from fot.errors import UserError
from fot.layers import Layer, find_layers, keeps_samples_apart, recorded_inputs


class Zoo(nn.Module):
    """One of each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embedding = nn.Embedding(10, 8)
        self.conv1 = nn.Conv1d(8, 8, 3)
        self.conv2 = nn.Conv2d(8, 8, 3, groups=4, bias=False)
        self.conv3 = nn.Conv3d(8, 8, 3)
        self.norms = nn.ModuleList(
            [nn.BatchNorm2d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)]
        )
        self.drifting = nn.BatchNorm1d(8, affine=False)
        self.still = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.attention = nn.MultiheadAttention(8, 2)
        self.rnn = nn.GRU(8, 8)
        self.bilinear = nn.Bilinear(8, 8, 2)
        self.fc = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.fc.weight
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8, bias=False))
        self.untrained = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.odd = Odd(8, 8, bias=False)
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 3)])

    def add_task(self, classes: int) -> None:
        self.heads.append(nn.Linear(8, classes))


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input**2)


def test_every_parameter_is_protected_or_named_with_a_reason() -> None:
    model = Zoo()
    found = find_layers(model)
    assert [layer.name for layer in found.layers] == ["conv1", "conv2", "conv3", "fc"]
    protected = {layer.weight for layer in found.layers}
    for name, _ in model.named_parameters():
        assert (name in protected) != any(name == s or name.startswith(f"{s}.") for s in found.skipped), name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("scale", "a parameter of Zoo"),
        ("embedding", "embedding"),
        ("conv1.bias", "a bias"),
        ("norms.0", r"norm layer \(BatchNorm2d.*its scale and shift.*its running statistics drift"),
        ("norms.1", r"norm layer \(LayerNorm\): its scale and shift act on each feature alone$"),
        ("norms.2", r"norm layer \(GroupNorm"),
        ("norms.3", r"norm layer \(InstanceNorm2d"),
        ("drifting", r"norm layer \(BatchNorm1d\): its running statistics drift$"),
        ("up", "transposed convolution"),
        ("attention", "joint input projection"),
        ("attention.out_proj", "without calling the layer"),
        ("rnn", r"recurrent layer \(GRU"),
        ("bilinear", "bilinear"),
        ("normed", "computed from other parameters"),
        ("untrained", "not trained"),
        ("odd", "forward of its own"),
        ("heads.0", "a task head"),
        ("heads.1", "a task head"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    found = find_layers(Zoo())
    assert re.search(reason, found.skipped[name])
    assert f"{name}: {found.skipped[name]}" in found.summary()


def test_a_norm_layer_that_keeps_nothing_is_not_named() -> None:
    assert "still" not in find_layers(Zoo()).skipped


class ViT(nn.Module):
    """One output for all tasks, in a module that happens to be called ``heads``, as in torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(4, 3))


def test_heads_are_those_of_a_multi_head_model() -> None:
    assert [layer.name for layer in find_layers(ViT()).layers] == ["body", "heads.head"]
    alone = nn.Sequential()
    alone.add_module("heads", nn.ModuleList([nn.Linear(2, 2)]))  # without add_task
    assert [layer.name for layer in find_layers(alone).layers] == ["heads.0"]
    inner = nn.Sequential(Zoo())  # a part of a model has no say in its tasks
    assert "0.heads.1" in {layer.name for layer in find_layers(inner).layers}


def test_a_head_is_named_whatever_it_is_made_of() -> None:
    model = Zoo()
    model.heads.append(nn.Sequential(nn.BatchNorm1d(8), parametrizations.weight_norm(nn.Linear(8, 2))))
    skipped = find_layers(model).skipped
    for name, _ in model.heads.named_parameters(prefix="heads"):
        assert any(name.startswith(f"{s}.") and "a task head" in why for s, why in skipped.items()), name


def test_a_bias_that_is_not_trained_is_not_protected() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    found = find_layers(model, bias=True)
    assert [(layer.bias, layer.dimension) for layer in found.layers] == [(None, 3), ("1.bias", 4)]
    assert found.skipped == {"0.bias": "a bias that is not trained (requires_grad is off)"}
    assert "not trained" in find_layers(model).skipped["0.bias"]


def test_the_summary_names_the_protected_layers() -> None:
    summary = find_layers(Zoo(), bias=True).summary()
    assert "conv1: Conv1d, inputs of dimension 25, with its bias" in summary
    assert "conv2: Conv2d, inputs of dimension 18, 4 groups\n" in summary


def test_patterns_choose_among_the_layers() -> None:
    found = find_layers(Zoo(), ["conv[12]", "heads.1"])
    assert [layer.name for layer in found.layers] == ["conv1", "conv2", "heads.1"]
    assert found.skipped["fc"] == "not among the layers that were named"
    assert [layer.name for layer in find_layers(Zoo(), "fc").layers] == ["fc"]


def test_a_pattern_that_names_nothing_is_refused_with_the_reason_or_the_choices() -> None:
    with pytest.raises(UserError, match=r"'up' names no layer.*transposed"):
        find_layers(Zoo(), ["conv1", "up"])
    with pytest.raises(UserError, match=r"'cnv\*' names no layer.*choose among conv1, conv2"):
        find_layers(Zoo(), ["cnv*"])


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"no layer to protect.*norm layer"):
        find_layers(nn.BatchNorm1d(3))


def test_a_lazy_layer_is_refused_until_it_has_weights() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UserError, match="run one batch"):
        find_layers(model)
    model(torch.zeros(1, 7))
    assert find_layers(model).layers[0].dimension == 7


def test_a_tied_weight_goes_by_its_name_in_the_tree() -> None:
    model = nn.Sequential()
    model.add_module("embedding", nn.Embedding(10, 4))
    model.add_module("out", nn.Linear(4, 10, bias=False))
    model.out.weight = model.embedding.weight
    found = find_layers(model)
    assert found.layers[0].weight == "embedding.weight" and found.skipped == {}
    assert "shares its weight with 'out'" in found.shared["embedding"]


def test_a_weight_that_is_projected_is_never_called_unprotected() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for protect, layer, other in ((None, "0", "1"), ("1", "1", "0")):
        found = find_layers(model, protect)
        assert [la.name for la in found.layers] == [layer]
        assert found.shared == {
            other: f"it shares its weight with '{layer}', which is protected for its own inputs alone"
        }
        assert list(found.skipped) == ["1.bias"]
        protected, unprotected = found.summary().split("not protected: 1")
        assert f"  {other}: it shares" in protected and "1.bias" in unprotected
    with pytest.raises(UserError, match=r"'1' names no layer.*shares its weight with '0'"):
        find_layers(model, ["0", "1"])


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(input=self.fc(x))
        return y


def received(model: nn.Module, run: object) -> list[tuple[str, Tensor]]:
    inputs: list[tuple[str, Tensor]] = []

    def receive(layer: Layer, x: Tensor) -> None:
        inputs.append((layer.name, x))

    with recorded_inputs(model, find_layers(model).layers, receive):
        run()  # type: ignore[operator]
    return inputs


def test_a_layer_called_twice_is_received_twice() -> None:
    model, x = Twice(), torch.randn(2, 3)
    (_, first), (_, second) = received(model, lambda: model(x))
    assert torch.equal(first, x)
    assert torch.equal(second, model.fc(x))


def test_inputs_are_seen_under_functional_call_with_its_parameters() -> None:
    model, x = Twice(), torch.randn(2, 3)
    tree = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    inputs = received(model, lambda: functional_call(model, tree, (x,)))
    assert torch.equal(inputs[1][1], torch.zeros(2, 3))


def test_the_transformer_layer_runs_its_linears_in_eval_mode_too() -> None:
    """Torch's fused path would bypass them."""
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        inputs = received(model, lambda: model(torch.randn(2, 5, 8)))
    assert [(name, tuple(x.shape)) for name, x in inputs] == [("linear1", (2, 5, 8)), ("linear2", (2, 5, 16))]


class Order(nn.Module):
    """Its layer receives samples in the order of the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x.view(-1, 2, 3).transpose(0, 1))
        return y


def test_which_models_keep_samples_apart() -> None:
    def apart(model: nn.Module, x: Tensor) -> bool:
        return keeps_samples_apart(model, find_layers(model).layers, x)

    wide, tokens = torch.randn(5, 3), torch.randn(5, 6)
    split = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 2))
    for x, y in ((wide, tokens), (wide[:1], tokens[:1])):
        assert apart(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), x) and apart(split, y)
    assert not apart(Twice(), wide) and not apart(Order(), tokens)
    centred = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    assert not apart(centred, wide)
    assert apart(nn.Linear(3, 2), wide * torch.nan)  # their sum will show it
    assert not centred[1]._forward_pre_hooks


def test_hooks_are_removed_even_after_an_error() -> None:
    model = Twice()
    with pytest.raises(RuntimeError):
        received(model, lambda: model(torch.randn(2, 4)))
    assert not model.fc._forward_pre_hooks


def test_layers_of_another_model_are_refused() -> None:
    with (
        pytest.raises(UserError, match="no layer 'fc'"),
        recorded_inputs(nn.Linear(3, 3), find_layers(Twice()).layers, lambda layer, x: None),
    ):
        pass
