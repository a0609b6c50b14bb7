"""Linear layers and the loss by kernel are what torch's are: on a GPU, or else interpreted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, KEYS, close, gaussian, tail_of_torch
from torch.nn import functional as F

pytest.importorskip("triton")
from fot.engines.vectorized.kernels import linear


@pytest.mark.parametrize("shape", [(3, 5, 7, 20), (2, 70, 40, 70), (2, 16, 130, 10), (1, 1, 1, 1)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_with_what_follows_it(
    shape: tuple[int, int, int, int], shared: bool, with_bias: bool, relu: bool, p: float
) -> None:
    clients, rows, outputs, inputs = shape
    x, bias = gaussian(clients, rows, inputs, seed=1), gaussian(clients, outputs, seed=2)
    w = gaussian(1 if shared else clients, outputs, inputs, seed=3).expand(clients, -1, -1)
    z = (x @ w.mT).view(clients * rows, outputs, 1, 1)
    wanted = tail_of_torch(z, clients, bias if with_bias else None, None, relu, p, 4, 1)
    keys = torch.tensor(KEYS[:clients], device=DEVICE) if p else None
    y = linear.forward(x, w, bias=bias if with_bias else None, relu=relu, keys=keys, call=4, p=p)
    close(y, wanted.view(clients, rows, outputs))


@pytest.mark.parametrize("rows", [10, 33, 70])
@pytest.mark.parametrize("outputs", [10, 70, 150])
@pytest.mark.parametrize("filled", [False, True])
def test_tiles_of_a_linear_layer_that_rounds(
    monkeypatch: pytest.MonkeyPatch, rows: int, outputs: int, filled: bool
) -> None:
    """Large ones, of weights as they lie and of a table's columns; the interpreter rounds none."""
    monkeypatch.setattr(linear, "precision", lambda x: "tf32")
    if filled:  # as by many clients
        monkeypatch.setattr(linear, "PROCESSORS", 1)
    near = 1e-6 if DEVICE.type == "cpu" else 5e-3
    x, w = gaussian(2, rows, 300).float(), gaussian(2, outputs, 300, seed=1).float()
    turned = w.mT.contiguous().mT
    assert linear._tiles(x, w, rows).columns == (128 if filled and outputs > 10 else 16)
    for weights in (w, turned):
        y, wanted = linear.forward(x, weights), x.double() @ w.double().mT
        assert linear._tiles(x, weights, rows).warps == (2 if weights is turned and rows > 32 else 4)
        assert (y - wanted).norm() < near * wanted.norm()


@pytest.mark.parametrize("with_factor", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_a_product_with_a_slice_of_a_table(with_base: bool, with_factor: bool) -> None:
    """Of the table's rows, and of its columns."""
    x, table = gaussian(2, 5, 9, seed=1), gaussian(2, 40, 9, seed=2)
    more, other, factor = gaussian(2, 5, 30, seed=3), gaussian(2, 5, 9, seed=4), gaussian(2, 1, 1, seed=5)
    close(linear.forward(x, table[:, :30]), x @ table[:, :30].mT)
    wanted = more @ table[:, :30] + (other if with_base else 0)
    y = linear.forward(
        more, table[:, :30].mT, base=other if with_base else None, factor=factor if with_factor else None
    )
    close(y, wanted * factor if with_factor else wanted)


def test_a_linear_layer_keeps_what_is_not_a_number() -> None:
    x, w = gaussian(3, 4, 5, seed=1), gaussian(3, 6, 5, seed=2)
    x[1, 2, 0], x[2, 1, 3] = torch.nan, torch.inf
    y = linear.forward(x, w, relu=True, keys=torch.tensor(KEYS, device=DEVICE), p=1.0)
    assert y.isnan().any(2).nonzero().tolist() == [[1, 2], [2, 1]]


@pytest.mark.parametrize("columns", [3, 400])
def test_rows_are_appended_to_a_table(columns: int) -> None:
    rows, table = gaussian(2, 7, columns, seed=1), gaussian(2, 20, columns, seed=2)
    by, wanted = gaussian(2, 1, 1, seed=3), table.clone()
    wanted[:, 4:11], wanted[:, 11:18] = rows, rows * by
    linear.append(rows, table, 4)
    linear.append(rows, table, 11, by)
    assert torch.equal(table, wanted)


@pytest.mark.parametrize("shape", [(3, 5, 7, 20), (2, 64, 40, 70), (2, 16, 10, 130), (1, 1, 1, 1)])
@pytest.mark.parametrize("shared", [False, True])
def test_the_way_back_through_a_linear_layer(shape: tuple[int, int, int, int], shared: bool) -> None:
    clients, rows, outputs, inputs = shape
    d, x = gaussian(clients, rows, outputs, seed=1), gaussian(clients, rows, inputs, seed=2)
    w = gaussian(1 if shared else clients, outputs, inputs, seed=3).expand(clients, -1, -1)
    below, stepped = d @ w, 0.9 * w - 0.1 * d.mT @ x
    out = torch.full_like(stepped, torch.nan)
    got = linear.backward(d, x, w, 0.9, 0.1, out, True)
    assert got is not None
    close(got, below)
    close(out, stepped)
    own = w.clone()
    got = linear.backward(d, x, own, 0.9, 0.1, own, True)
    assert got is not None
    close(got, below)
    close(own, stepped)
    out.fill_(torch.nan)
    assert linear.backward(d, x, w, 0.9, 0.1, out, False) is None
    close(out, stepped)


@settings(max_examples=10, deadline=None)
@given(clients=st.integers(1, 3), rows=st.sampled_from([1, 7, 70]), classes=st.integers(1, 130))
def test_cross_entropy(clients: int, rows: int, classes: int) -> None:
    """Each client's own loss and the gradient; rows of weight 0 count for nothing."""
    n = clients * rows
    logits = (500 * gaussian(n, classes, seed=1)).requires_grad_()
    y = torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    weight = gaussian(n, seed=3).abs()
    weight[-rows // 2 :] = 0
    each = F.cross_entropy(logits, y, reduction="none") * weight
    (gradient,) = torch.autograd.grad(each.sum(), logits)
    losses, d = linear.cross_entropy(logits.detach(), y, weight, clients)
    close(losses, each.detach().view(clients, rows).sum(1))
    close(d, gradient)


def test_a_loss_that_is_not_a_number_is_its_clients_own() -> None:
    logits, y = gaussian(6, 5), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    logits[3, 4] = torch.nan
    losses, d = linear.cross_entropy(logits, y, torch.ones_like(logits[:, 0]), 3)
    assert losses.isnan().tolist() == [False, True, False]
    assert d.isnan().any(1).tolist() == [False, False, False, True, False, False]
