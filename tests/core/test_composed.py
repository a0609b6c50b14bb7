"""What is composed of others equals what torch computes in one call, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fot.composed import COMPOSED, NotComposed, attention
from fot.dropout import keyed_dropout

N, L, E = 3, 5, 8


class Swapped(TorchFunctionMode):
    """Every composed function in the place of torch's own; what is inside goes on to torch."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None):
        return COMPOSED.get(func, func)(*args, **(kwargs or {}))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same(module: nn.Module, call: Callable[[nn.Module, Tensor], tuple[Tensor, ...]]) -> None:
    module.double().train()
    x = gaussian(N, L, E).requires_grad_()
    wanted = call(module, x)
    with Swapped():
        got = call(module, x)
    assert len(got) == len(wanted)
    leaves = [x, *module.parameters()]
    gradients = []
    for ys in (got, wanted):
        total = sum((y * gaussian(*y.shape, seed=i)).sum() for i, y in enumerate(ys))
        gradients.append(torch.autograd.grad(total, leaves, allow_unused=True))
    for one, other in zip([*got, *gradients[0]], [*wanted, *gradients[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


BEFORE = torch.ones(L, L, dtype=torch.bool).triu(1)
AWAY = torch.arange(L).expand(N, L) >= torch.tensor([[5], [3], [4]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": BEFORE},
        {"attn_mask": BEFORE, "is_causal": True, "need_weights": False},
        {"attn_mask": gaussian(L, L, seed=3)},
        {"attn_mask": gaussian(2 * N, L, L, seed=3)},
        {"attn_mask": BEFORE, "key_padding_mask": AWAY},
        {"key_padding_mask": AWAY, "need_weights": False},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention(options: dict[str, Any], batch_first: bool) -> None:
    def call(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        x = x if batch_first else x.transpose(0, 1)
        return tuple(y for y in module(x, x, x, **options) if y is not None)

    assert_same(nn.MultiheadAttention(E, 2, batch_first=batch_first), call)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_to_another_sequence(bias: bool) -> None:
    """Keys and values of other widths, and of another length, have projections of their own."""
    keys, values = gaussian(N, 7, 6, seed=1), gaussian(N, 7, 4, seed=2)
    module = nn.MultiheadAttention(E, 2, batch_first=True, bias=bias, kdim=6, vdim=4)
    assert_same(module, lambda module, x: module(x, keys, values))


def test_a_transformers_layer() -> None:
    assert_same(nn.TransformerEncoderLayer(E, 2, 12, 0.0, batch_first=True), lambda m, x: (m(x),))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}],
    ids=["one", "both ways", "without bias"],
)
def test_recurrent_layers(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    def call(module: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        y, state = module(x)
        return (y, *(state if isinstance(state, tuple) else (state,)))

    assert_same(kind(E, 4, **options), call)


def test_a_given_state_and_relu() -> None:
    state = gaussian(1, N, 4, seed=4)
    assert_same(nn.RNN(E, 4, nonlinearity="relu", batch_first=True), lambda module, x: module(x, state))


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": ~BEFORE}])
def test_attention_alone(options: dict[str, Any]) -> None:
    q, k, v = (gaussian(N, 2, L, 4, seed=i) for i in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(attention(q, k, v, **options), wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        attention(q, k, v[..., :3], gaussian(L, L)),
        F.scaled_dot_product_attention(q, k, v[..., :3], gaussian(L, L)), rtol=1e-10, atol=1e-12,
    )  # fmt: skip


def packed(module: nn.Module, x: Tensor) -> Tensor:
    return module(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2]), batch_first=True))[0].data


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nn.MultiheadAttention(E, 2, add_bias_kv=True).double()(x, x, x),
        lambda x: nn.MultiheadAttention(E, 2).double()(x[0], x[0], x[0]),
        lambda x: nn.LSTM(E, 4, proj_size=2).double()(x),
        lambda x: packed(nn.LSTM(E, 4).double(), x),
        lambda x: packed(nn.GRU(E, 4, num_layers=2, dropout=0.5).double(), x),
        lambda x: F.scaled_dot_product_attention(x, x, x, enable_gqa=True),
    ],
)
def test_what_is_left_to_torch(call: Callable[[Tensor], Any]) -> None:
    x = gaussian(N, L, E)
    with pytest.raises(NotComposed), Swapped():
        call(x)
    with keyed_dropout(1):
        call(x)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.MultiheadAttention(E, 2, dropout=0.4, batch_first=True),
    "transformer": lambda: nn.TransformerEncoderLayer(E, 2, 12, dropout=0.3, batch_first=True),
    "lstm": lambda: nn.LSTM(E, 4, num_layers=2, dropout=0.5, batch_first=True),
    "gru": lambda: nn.GRU(E, 4, num_layers=3, dropout=0.5, batch_first=True),
}


def through(name: str, of: int | Tensor, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(9)
    module = MODULES[name]().double()
    torch.manual_seed(seed)
    with keyed_dropout(of):
        y = module(x, x, x) if name == "attention" else module(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", MODULES)
def test_dropout_inside_comes_from_the_key(name: str) -> None:
    x = gaussian(N, L, E)
    y = through(name, 5, x)
    assert torch.equal(y, through(name, 5, x, seed=1)) and not torch.allclose(y, through(name, 6, x))
    folded = through(name, torch.tensor([5, 6]), torch.cat([x, x + 1]))
    alone = torch.cat([through(name, 5, x), through(name, 6, x + 1)])
    torch.testing.assert_close(folded, alone, rtol=1e-12, atol=1e-12)


def test_weights_of_attention_are_dropped_and_scaled() -> None:
    """Keys all alike: each of 400 values has the weight 1/400, or twice that, or none."""
    like, values = torch.zeros(1, 400, 2), torch.eye(400)[None]
    with keyed_dropout(3):
        y = F.scaled_dot_product_attention(like, like, values, dropout_p=0.5)
    assert set(y.flatten().tolist()) == {0.0, float(torch.tensor(1 / 400) * 2)}
    assert abs(float((y != 0).float().mean()) - 0.5) < 0.01
