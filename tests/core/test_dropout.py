"""Keyed dropout is dropout: its rate, its scale, its gradients; and it is the same in every engine."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from fot.dropout import keyed_dropout
from fot.randomness import fold, key, uniform


def dropped(of, x, p, **options):
    with keyed_dropout(of):
        return functional.dropout(x, p, **options)


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_rate_and_scale(p):
    x = torch.full((200, 300), 3.0, dtype=torch.float64)
    y = dropped(1, x, p)
    kept = y != 0
    assert abs(float(kept.double().mean()) - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
    torch.testing.assert_close(y[kept], x[kept] / (1 - p), rtol=1e-15, atol=0)


def test_the_mask_is_the_hash_of_key_call_and_position():
    x = torch.ones(4, 5)
    with keyed_dropout(9):
        first, second = functional.dropout(x, 0.4), functional.dropout(x, 0.4)
    for call, y in enumerate((first, second)):
        assert torch.equal(y != 0, (uniform(fold(9, call), torch.arange(20)) >= 0.4).reshape(4, 5))
    assert not torch.equal(first, second)
    assert not torch.equal(first, dropped(10, x, 0.4))


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_nothing_is_dropped(p, training):
    x = torch.randn(3, 4)
    assert torch.equal(dropped(1, x, p, training=training), x)


def test_calls_that_drop_nothing_are_not_counted():
    """A layer in eval mode must not shift the masks of the others."""
    x = torch.ones(8, 8)
    with keyed_dropout(3):
        functional.dropout(x, 0.5, training=False)
        functional.dropout(x, 0.0)
        y = functional.dropout(x, 0.5)
    assert torch.equal(y, dropped(3, x, 0.5))


def test_everything_is_dropped():
    assert torch.equal(dropped(1, torch.randn(3, 4), 1.0), torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("drop", "shape"),
    [
        (functional.dropout1d, (6, 50, 4)),
        (functional.dropout2d, (6, 50, 4, 3)),
        (functional.dropout3d, (6, 50, 4, 3, 2)),
    ],
)
def test_whole_channels(drop, shape):
    with keyed_dropout(5):
        y = drop(torch.ones(shape), 0.5)
    channels = y.flatten(2)
    assert torch.equal(channels, channels[..., :1].expand_as(channels))
    assert set(channels.flatten().tolist()) == {0.0, 2.0}
    assert torch.equal(channels[..., 0] != 0, (uniform(fold(5, 0), torch.arange(300)) >= 0.5).reshape(6, 50))


@pytest.mark.parametrize("drop", [functional.dropout, functional.dropout2d])
def test_a_folded_cohort_equals_client_by_client(drop):
    """C clients of B rows each in one batch: every client's rows take the masks of its own key."""
    keys = [key(0, "dropout", client) for client in range(3)]
    x = torch.randn(3, 4, 5, 2, 2)
    with keyed_dropout(torch.tensor(keys)):
        folded = [drop(x.flatten(0, 1), 0.5) for _ in range(2)]
    for client, of in enumerate(keys):
        with keyed_dropout(of):
            for call in range(2):
                alone = drop(x[client], 0.5)
                assert torch.equal(folded[call].reshape(x.shape)[client], alone)


def test_padding_rows_do_not_disturb():
    """A client with a short batch, padded below, drops the same units as without the padding."""
    keys = torch.tensor([key(0, "dropout", client) for client in range(2)])
    x = torch.randn(2, 4, 6)
    with keyed_dropout(keys):
        padded = functional.dropout(x.flatten(0, 1), 0.5).reshape(x.shape)
    assert torch.equal(padded[1, :3], dropped(int(keys[1]), x[1, :3], 0.5))


def test_modules_draw_from_the_key_and_leave_torchs_generator_alone():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.2, inplace=True)).train()
    x = torch.randn(7, 4)
    outputs = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with keyed_dropout(11):
            outputs.append(model(x))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(*outputs)
    with keyed_dropout(11):
        assert torch.equal(model.eval()(x), model[1](x))


def test_in_place():
    x = torch.randn(5, 6)
    expected, kept = dropped(2, x, 0.5), x.clone()
    assert torch.equal(x, kept)
    y = dropped(2, x, 0.5, inplace=True)
    assert y is x and torch.equal(x, expected)


def test_gradients_pass_through_what_is_kept():
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    y = dropped(2, x, 0.2)
    (gradient,) = torch.autograd.grad((y * 3).sum(), x)
    torch.testing.assert_close(gradient, 3 * (y.detach() != 0).double() / 0.8, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_precision_stays(dtype):
    assert dropped(2, torch.ones(4, dtype=dtype), 0.3).dtype is dtype


def test_outside_the_context_dropout_is_torchs_own():
    x = torch.ones(50)
    torch.manual_seed(0)
    expected = functional.dropout(x, 0.5)
    dropped(1, x, 0.5)
    torch.manual_seed(0)
    assert torch.equal(functional.dropout(x, 0.5), expected)
