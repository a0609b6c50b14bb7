"""Convolutions, tails, norms and draws by kernel are what torch's are: on a GPU, or else interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, KEYS, close, first, gaussian, last, tail_of_torch
from torch import Tensor
from torch.nn import functional as F

from fot import randomness
from fot.engines.vectorized.kernels import Window

pytest.importorskip("triton")
from fot.engines.vectorized.kernels import convolve, draws, normal, tails


def assert_convolves(
    clients: int, images: int, inputs: int, outputs: int, size: tuple[int, int], window: Window,
    after: tuple[int, int] | None = None, shared: bool = False, splits: tuple[int | None, ...] = (None,),
) -> None:  # fmt: skip
    """The three products, against a convolution a client and what autograd makes of it.

    Maps may be padded otherwise after the last row and column than before the first.
    """
    (kh, kw), (sh, sw), (above, left) = window
    below, right = after or window.before
    x = gaussian(clients * images, inputs, *size, seed=1).requires_grad_()
    w = gaussian(1 if shared else clients, outputs, inputs, kh, kw, seed=2).expand(clients, -1, -1, -1, -1)
    own = [one.clone().requires_grad_() for one in w]
    padded = F.pad(x, (left, right, above, below))
    y = torch.cat([F.conv2d(a, b, None, (sh, sw)) for a, b in zip(padded.chunk(clients), own, strict=True)])
    d = gaussian(*y.shape, seed=3)
    at_x, *at_w = torch.autograd.grad(y, (x, *own), d)
    high, wide = y.shape[2:]

    filters = last(w[:1]).expand(clients, -1, -1, -1, -1) if shared else last(w)
    assert (filters.stride(0) == 0) == shared
    turned = filters[:1].transpose(1, 4).contiguous().expand(clients, -1, -1, -1, -1)
    turned = turned if shared else filters.transpose(1, 4).contiguous()
    close(first(convolve.forward(last(x), filters, window, (high, wide))), y)
    close(first(convolve.samples_gradient(last(d), turned, window, size)), at_x)
    wanted = 0.9 * w - 0.1 * torch.stack(at_w)
    for parts in splits:
        more: dict[str, Any] = {"splits": parts}
        out = filters.contiguous().clone() if parts == 1 else torch.full_like(filters.contiguous(), torch.nan)
        old = out if parts == 1 else filters  # in place or not
        also = None if parts is None else torch.full_like(turned.contiguous(), torch.nan)
        convolve.step(last(d), last(x), old, window, 0.9, 0.1, out, also, **more)
        close(first(out), wanted)
        assert also is None or torch.equal(also, out.transpose(1, 4))


@pytest.mark.parametrize(
    ("channels", "size", "window", "more"),
    [
        ((3, 5), (7, 7), Window((4, 4)), {}),
        ((3, 5), (8, 6), Window((3, 3), before=(1, 1)), {"shared": True}),
        ((5, 4), (9, 8), Window((3, 3), (2, 2), (1, 1)), {}),
        ((5, 4), (9, 8), Window((1, 1), (2, 2)), {}),
        ((4, 33), (9, 8), Window((2, 3), (2, 1), (1, 0)), {}),
        ((4, 4), (11, 10), Window((3, 3), (3, 3), (1, 1)), {}),
        ((15, 3), (6, 5), Window((3, 5), before=(1, 2)), {}),
        ((16, 3), (6, 5), Window((3, 5), before=(1, 2)), {}),
        ((17, 20), (6, 5), Window((3, 2), (1, 2), (1, 1)), {"shared": True}),
        ((34, 2), (4, 7), Window((1, 1), (2, 3)), {}),
        ((2, 3), (5, 6), Window((4, 4), before=(1, 1)), {"after": (2, 2)}),  # padding="same"
        ((20, 3), (5, 6), Window((4, 2), before=(1, 0)), {"after": (2, 1)}),
        ((20, 7), (1, 1), Window(), {}),
    ],
)
def test_convolution(
    channels: tuple[int, int], size: tuple[int, int], window: Window, more: dict[str, Any]
) -> None:
    """Few channels, whose taps are taken by rows, and many; whole sums over rows, and sums in parts."""
    assert_convolves(2, 2, *channels, size, window, splits=(None, 1, 3), **more)


@settings(max_examples=15, deadline=None)
@given(
    clients=st.integers(1, 3),
    inputs=st.sampled_from([1, 2, 16, 19]),
    outputs=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    before=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    extra=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    shared=st.booleans(),
)
def test_convolution_of_any_shape(
    clients: int, inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int],
    before: tuple[int, int], extra: tuple[int, int], shared: bool,
) -> None:  # fmt: skip
    size = (kernel[0] + extra[0], kernel[1] + extra[1])
    shared = shared and clients > 1
    assert_convolves(clients, 2, inputs, outputs, size, Window(kernel, stride, before), shared=shared)


def test_a_sum_over_many_rows_is_split_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolve, "SPLIT_ROWS", 16)
    made: list[tuple[int, ...]] = []
    empty = Tensor.new_empty

    def note(self: Tensor, *shape: int, **options: Any) -> Tensor:
        made.append(shape)
        return empty(self, *shape, **options)

    monkeypatch.setattr(Tensor, "new_empty", note)
    assert_convolves(2, 3, 2, 3, (6, 6), Window((3, 3)))
    assert (3, 2, 3, 3, 3, 2) in made  # the filters' step in three parts of 16 rows


@pytest.mark.parametrize("outputs", [10, 40, 70, 100])
@pytest.mark.parametrize("inputs", [3, 20])
@pytest.mark.parametrize("filled", [False, True])
def test_tiles_of_a_product_that_rounds(
    monkeypatch: pytest.MonkeyPatch, inputs: int, outputs: int, filled: bool
) -> None:
    """Large ones, which a GPU takes where it may round factors; the interpreter rounds none."""
    monkeypatch.setattr(convolve, "precision", lambda x: "tf32")
    if filled:  # as by many clients
        monkeypatch.setattr(convolve, "PROCESSORS", 1)
        monkeypatch.setattr(convolve, "MANY", 1)
    near = 1e-6 if DEVICE.type == "cpu" else 5e-3
    window, size = Window((3, 2), (2, 1), (1, 0)), (5, 6)
    x, w = gaussian(2 * 3, inputs, 9, 7).float(), gaussian(2, outputs, inputs, 3, 2, seed=1).float()
    d = gaussian(2 * 3, outputs, *size, seed=2).float()
    tiles = convolve._tiles(last(x), 2, 90, outputs, inputs)
    assert tiles != convolve.SMALL
    assert (tiles.rows == 64) == (outputs > 64 and not filled)
    both = [
        (one.double().requires_grad_(), own.double().requires_grad_())
        for one, own in zip(x.chunk(2), w, strict=True)
    ]
    y = torch.cat([F.conv2d(one, own, None, window.stride, window.before) for one, own in both])
    assert y.shape == d.shape
    gradients = torch.autograd.grad(y, [t for pair in both for t in pair], d.double())
    below = convolve.samples_gradient(last(d), last(w).transpose(1, 4).contiguous(), window, (9, 7))
    out = torch.empty_like(last(w))
    convolve.step(last(d), last(x), last(w), window, 0.9, 0.1, out)
    for got, wanted in (
        (convolve.forward(last(x), last(w), window, size), y.detach()),
        (below, torch.cat(gradients[::2])),
        (out, 0.9 * w - 0.1 * torch.stack(gradients[1::2])),
    ):
        assert (first(got) - wanted).norm() < near * wanted.norm()


@pytest.mark.parametrize(
    ("keys", "index"),
    [((), (7,)), ((5, 1), (7,)), ((5,), (5,)), ((4,), (3, 4)), ((1, 1), (600,)), ((2, 1), (2, 3))],
)
def test_draws(keys: tuple[int, ...], index: tuple[int, ...]) -> None:
    """Bit for bit, of tensors that broadcast and lie in strides; sums of keys and numbers overflow too."""
    count = torch.Size(keys).numel()
    key = torch.tensor([*KEYS, 0, 1][:count], device=DEVICE).view(keys)
    number = torch.randint(0, 1 << 40, (*index, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(draws.fold(key, number[..., 1]), randomness.fold(key, number[..., 1]))
    assert torch.equal(draws.bits(key, number[..., 1]), randomness.bits(key, number[..., 1]))
    assert torch.equal(draws.fold(key, 3), randomness.fold(key, 3))


@pytest.mark.parametrize("n", [1, 40, 300])
def test_order(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """As a stable sort has it, of numbers that are equal too; of many it is one."""
    numbers = torch.randint(0, 30, (3, n), generator=torch.Generator().manual_seed(0)) << 33
    numbers = numbers.to(DEVICE)
    assert torch.equal(draws.order(numbers), numbers.argsort(dim=1, stable=True))
    monkeypatch.setattr(draws, "MOST", 0)
    assert torch.equal(draws.order(numbers), numbers.argsort(dim=1, stable=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("pool", [1, 2, 3])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_other", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_tails(
    with_bias: bool, with_other: bool, relu: bool, p: float, pool: int, dtype: torch.dtype
) -> None:
    """Bit for bit the same, and behind a ReLU backward too; windows leave out the last row or column."""
    clients, images, channels, size = 3, 2, 3, (7, 5)
    z = gaussian(clients * images, channels, *size, seed=1).to(dtype).requires_grad_()
    bias = gaussian(clients, channels, seed=2).to(dtype) if with_bias else None
    other = gaussian(*z.shape, seed=3).to(dtype) if with_other else None
    wanted = tail_of_torch(z, clients, bias, other, relu, p, 4, pool)
    keys = torch.tensor(KEYS, device=DEVICE) if p else None
    y, places = tails.forward(
        last(z), clients, bias=bias, other=None if other is None else last(other), relu=relu, keys=keys,
        call=4, p=p, pool=pool,
    )  # fmt: skip
    assert y.dtype == dtype and torch.equal(first(y), wanted) and (places is None) == (pool == 1)
    if not relu:  # the result tells nothing, and dropout and pooling wait for a ReLU
        return
    d = gaussian(*wanted.shape, seed=4).to(dtype)
    (gradient,) = torch.autograd.grad(wanted, z, d)
    got = tails.backward(last(d), y, places, size, clients, p=p, pool=pool)
    assert torch.equal(first(got), gradient)


@settings(max_examples=15, deadline=None)
@given(
    images=st.integers(1, 3),
    channels=st.sampled_from([1, 3, 40]),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    pool=st.integers(1, 4),
    p=st.floats(1e-9, 1),
    call=st.integers(0, 99),
)
def test_tails_of_any_shape(
    images: int, channels: int, size: tuple[int, int], pool: int, p: float, call: int
) -> None:
    pool = min(pool, *size)
    z = gaussian(3 * images, channels, *size, seed=1).requires_grad_()
    wanted = tail_of_torch(z, 3, None, None, True, p, call, pool)
    keys = torch.tensor(KEYS, device=DEVICE)
    y, places = tails.forward(last(z), 3, relu=True, keys=keys, call=call, p=p, pool=pool)
    assert torch.equal(first(y), wanted)
    d = gaussian(*wanted.shape, seed=4)
    (gradient,) = torch.autograd.grad(wanted, z, d)
    assert torch.equal(first(tails.backward(last(d), y, places, size, 3, p=p, pool=pool)), gradient)


def test_of_equal_units_the_first_is_the_largest() -> None:
    z = gaussian(3, 2, 6, 6, seed=1).round().requires_grad_()
    wanted = tail_of_torch(z, 3, None, None, True, 0.0, 0, 3)
    y, places = tails.forward(last(z), 3, relu=True, pool=3)
    (gradient,) = torch.autograd.grad(wanted.sum(), z)
    back = tails.backward(torch.ones_like(y), y, places, (6, 6), 3, pool=3)
    assert torch.equal(first(back), gradient)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("pool", [1, 2])
def test_what_is_not_a_number_stays_so(pool: int) -> None:
    """Through ReLU and pooling; infinity that is dropped becomes NaN too, as where it is multiplied by 0."""
    z = gaussian(3, 2, 4, 4, seed=1)
    z[0, 0, 1, 2], z[1, 1, 3, 3], z[2, 0, 0, 0] = torch.nan, torch.inf, -torch.inf
    keys = torch.tensor(KEYS, device=DEVICE)
    for p in (0.0, 0.9, 1.0):
        wanted = tail_of_torch(z, 3, None, None, True, p, 0, pool)
        y, _ = tails.forward(last(z), 3, relu=True, keys=keys if p else None, p=p, pool=pool)
        torch.testing.assert_close(first(y), wanted, rtol=0, atol=0, equal_nan=True)
        assert first(y)[0, 0].isnan().any() and first(y)[1, 1].isnan().any() == (p > 0)
        assert not first(y)[2].isnan().any()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (40, 70), (33, 64)])
def test_biases_are_stepped_on_the_way_back(rows: int, columns: int, relu: bool) -> None:
    values, p = gaussian(3, columns, seed=1), 0.5 if relu else 0.0
    d, y = gaussian(3 * rows, 1, 1, columns, seed=2), gaussian(3 * rows, 1, 1, columns, seed=3).clamp(min=0)
    wanted = torch.where(y > 0, d / (1 - p), 0.0) if relu else d.clone()
    stepped = 0.9 * values - 0.1 * wanted.view(3, rows, columns).sum(1)
    got = tails.backward(d, y if relu else None, None, (1, 1), 3, p=p, bias=(values, 0.9, 0.1))
    close(got, wanted)
    close(values, stepped)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (20, 1, 1, 40), (3, 9, 8, 2)])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_batch_norm(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int], affine: bool, parts: int
) -> None:
    """Each client's own statistics, all three gradients, and the tail of what is normalised."""
    monkeypatch.setattr(normal, "ROWS", 16)
    monkeypatch.setattr(normal, "PROGRAMS", parts * 3 * -(-shape[3] // normal.COLUMNS))
    images, high, wide, channels = shape
    z = (3 + gaussian(3 * images, channels, high, wide, seed=1)).requires_grad_()
    weight, bias = (gaussian(3, channels, seed=n).requires_grad_() for n in (2, 3))
    own = [(a, b) if affine else (None, None) for a, b in zip(weight, bias, strict=True)]
    wanted = torch.cat([
        F.relu(F.batch_norm(part, None, None, a, b, True, eps=1e-3))
        for part, (a, b) in zip(z.chunk(3), own, strict=True)
    ])  # fmt: skip
    d = gaussian(*wanted.shape, seed=4)
    gradients = torch.autograd.grad(wanted, (z, weight, bias) if affine else (z,), d)

    given = (weight.detach(), bias.detach()) if affine else (None, None)
    known = normal.statistics(last(z), 3, *given, 1e-3)
    y, _ = tails.forward(last(z), 3, gain=known.gain, bias=known.shift, relu=True)
    close(first(y), wanted)
    back = tails.backward(last(d), y, None, (high, wide), 3)
    below, *others = normal.backward(back, last(z), known)
    close(first(below), gradients[0])
    for got, gradient in zip(others if affine else [], gradients[1:], strict=True):
        close(got, gradient)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("models", [1, 2, 3])
def test_total_change(models: int, dtype: torch.dtype) -> None:
    """Sums of differences in float64: in float32 half of their digits would be gone."""
    stack, sent = (gaussian(n, 3, 100, seed=n).to(dtype) for n in (6, models))
    sent += 1000
    wanted = stack.double().view(models, -1, 3, 100).sum(1) - 6 // models * sent.double()
    got = tails.total_change(stack, sent)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-12)
