"""A folded forward and backward pass equals one pass a client, for every layer that has a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fot.engines.vectorized import CannotBatch, Fold, Stacked
from fot.engines.vectorized.products import Convolution, product

C, B = 3, 4


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(module: nn.Module, x: Tensor, valid: Tensor | None = None) -> None:
    """Values, gradients of every parameter, gradient of the samples and moved buffers, folded and alone."""
    module.double().train()
    stacks = {
        name: gaussian(C, *p.shape, seed=i + 1).requires_grad_()
        for i, (name, p) in enumerate(module.named_parameters())
    }
    buffers = {name: b.expand(C, *b.shape).clone() for name, b in module.named_buffers()}
    x = x.detach()
    if x.is_floating_point():
        x.requires_grad_()
    with Fold(C, valid):
        marked = {name: Stacked.of(t) for name, t in (stacks | buffers).items()}
        y = functional_call(module, marked, (x,))
    assert type(y) is Tensor
    counts = torch.ones(C * B, dtype=torch.bool) if valid is None else valid.bool()
    cotangent = gaussian(*y.shape, seed=99)
    cotangent[~counts] = 0
    wanted = [*stacks.values(), *([x] if x.is_floating_point() else [])]
    folded = torch.autograd.grad((y * cotangent).sum(), wanted)

    for c in range(C):
        rows = torch.arange(c * B, (c + 1) * B)
        rows = rows[counts[rows]]
        own = {name: t[c].detach().clone().requires_grad_() for name, t in stacks.items()}
        own_buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
        own_x = x[rows].detach()
        if x.is_floating_point():
            own_x.requires_grad_()
        alone = functional_call(module, own | own_buffers, (own_x,))
        torch.testing.assert_close(y[rows], alone, rtol=1e-11, atol=1e-11)
        inputs = [*own.values(), *([own_x] if x.is_floating_point() else [])]
        gradients = torch.autograd.grad((alone * cotangent[rows]).sum(), inputs)
        for name, got, want in zip(own, folded, gradients, strict=False):
            torch.testing.assert_close(got[c], want, rtol=1e-10, atol=1e-11, msg=name)
        if x.is_floating_point():
            torch.testing.assert_close(folded[-1][rows], gradients[-1], rtol=1e-10, atol=1e-11)
        for name, buffer in own_buffers.items():
            torch.testing.assert_close(buffers[name][c], buffer, rtol=1e-11, atol=1e-11)


class Shifted(nn.Module):
    """Parameters met by plain arithmetic, a matrix on the right, and a function of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(5))
        self.scale = nn.Parameter(torch.zeros(1, 6, 1))
        self.matrix = nn.Parameter(torch.zeros(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        assert self.scale.shape == (1, 6, 1) and self.matrix.size(1) == 2 and self.shift.dim() == 1
        y = 2 - (x + self.shift) * self.scale / (1 + self.scale**2)
        y = torch.where(x > 0, y, self.shift)
        y += self.shift
        return y @ (self.matrix / self.matrix.norm()) + self.matrix.t().sum(1)


class Sequences(nn.Module):
    """A layer of sequences, of which the first result counts."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.layer, nn.MultiheadAttention)
        y: Tensor = (self.layer(x, x, x) if attends else self.layer(x))[0]
        return y


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 2), (5,)),
    "linear on sequences": (lambda: nn.Linear(5, 2), (6, 5)),
    "linear without bias": (lambda: nn.Linear(5, 2, bias=False), (5,)),
    "conv1d": (lambda: nn.Conv1d(2, 4, 3, stride=2, padding=1), (2, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 7, 6)),
    "conv2d groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 4, padding="same"), (2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), (2, 4, 4, 5)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1), (2, 5)),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 2, 3, groups=2, bias=False), (4, 5, 4)),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (2, 3, 2, 2)),
    "attention": (lambda: Sequences(nn.MultiheadAttention(6, 2, batch_first=True)), (5, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 7, 0.0, batch_first=True), (5, 6)),
    "lstm": (lambda: Sequences(nn.LSTM(5, 3, batch_first=True)), (6, 5)),
    "gru": (lambda: Sequences(nn.GRU(5, 3, 2, bidirectional=True, batch_first=True)), (6, 5)),
    "rnn": (lambda: Sequences(nn.RNN(5, 3, bias=False, batch_first=True)), (6, 5)),
    "layer norm": (lambda: nn.LayerNorm([3, 5]), (3, 5)),
    "rms norm": (lambda: nn.RMSNorm(5), (3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
    "batch norm of the batch": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 3)),
    "batch norm bare": (lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False), (4,)),
    "prelu": (lambda: nn.PReLU(4), (4, 3)),
    "prelu single": (lambda: nn.PReLU(), (4, 3)),
    "arithmetic": (Shifted, (6, 5)),
    "network": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        (2, 6, 6),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_folded_equals_alone(name: str) -> None:
    make, shape = LAYERS[name]
    compare(make(), gaussian(C * B, *shape, seed=50))


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "batch norm bare"])
def test_padding_does_not_count(name: str) -> None:
    make, shape = LAYERS[name]
    compare(make(), gaussian(C * B, *shape, seed=51), torch.tensor([1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]))


def test_embedding() -> None:
    module = nn.Sequential(nn.Embedding(7, 3, padding_idx=-1), nn.Flatten(), nn.Linear(6, 2))
    compare(module, torch.randint(0, 7, (C * B, 2), generator=torch.Generator().manual_seed(0)))


class Function(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: torch.einsum("ni,oi->no", x, self.weight),
        lambda self, x: self.weight @ x.t(),
        lambda self, x: torch.cat([x, self.weight.expand(3, 4, 4)[0]]),
        lambda self, x: x[:4] + self.weight,
        lambda self, x: F.bilinear(x, x, self.weight[None]),
        lambda self, x: x * float(self.weight.sum()),
    ],
)
def test_what_has_no_rule_is_refused(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with pytest.raises(CannotBatch), Fold(C):
        functional_call(
            Function(function), {"weight": Stacked.of(torch.ones(C, 4, 4))}, (torch.ones(C * B, 4),)
        )


def test_a_composed_layer_in_a_form_that_is_left_to_torch() -> None:
    layer = nn.LSTM(5, 4, proj_size=2, batch_first=True)
    stacks = {n: Stacked.of(p.detach().expand(C, *p.shape)) for n, p in layer.named_parameters()}
    with pytest.raises(CannotBatch, match="projections has no rule"), Fold(C):
        functional_call(layer, stacks, (torch.ones(C * B, 6, 5),))


def test_outside_of_a_fold_a_stack_is_refused() -> None:
    with pytest.raises(CannotBatch, match="no rule"):
        Stacked.of(torch.ones(C, 4)) + 1


def assert_convolves(x: Tensor, w: Tensor, stride: int, padding: Any, dilation: Any) -> None:
    y = product(Convolution(w.shape[2:], stride, padding, dilation), x, w)
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    both = zip(x.chunk(len(w)), w, strict=True)
    alone = torch.cat([convolve(one, own, None, stride, padding, dilation) for one, own in both])
    torch.testing.assert_close(y, alone, rtol=1e-11, atol=1e-11)
    back = gaussian(*y.shape, seed=3)
    gradients = [torch.autograd.grad((of * back).sum(), (x, w)) for of in (y, alone)]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(
    axes=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    channels=st.integers(1, 3),
    extra=st.integers(0, 3),
)
def test_convolution(
    axes: int, kernel: int, stride: int, padding: int, dilation: int, channels: int, extra: int
) -> None:
    """Each client's own convolution, in the value and both adjoints."""
    length = dilation * (kernel - 1) + 1 + extra
    x = gaussian(2 * 3, channels, *[length + i for i in range(axes)], seed=1).requires_grad_()
    w = gaussian(2, 4, channels, *[kernel] * axes, seed=2).requires_grad_()
    assert_convolves(x, w, stride, padding, dilation)


@pytest.mark.parametrize(
    ("kernel", "padding", "dilation"),
    [((4,), "same", 1), ((4, 3), "same", (2, 1)), ((3, 2), (1, 0), 1), ((2, 1), (4, 0), (1, 3))],
)
def test_convolution_whose_padding_is_uneven(
    kernel: tuple[int, ...], padding: str | tuple[int, ...], dilation: int | tuple[int, ...]
) -> None:
    x = gaussian(2 * 3, 3, *[9, 8][: len(kernel)], seed=1).requires_grad_()
    w = gaussian(2, 4, 3, *kernel, seed=2).requires_grad_()
    assert_convolves(x, w, 1, padding, dilation)
