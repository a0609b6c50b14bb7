"""Attention and recurrent layers, composed of linear layers, softmax and dropout.

torch computes each of these in one call, which draws its own dropout and takes one set of weights. Composed
of others, their masks come from keys like all dropout (``fot.dropout``), and a cohort's clients can each have
weights of their own (``fot.engines.vectorized``). ``COMPOSED`` names what stands for what, with the same
arguments; a case that is left out here raises ``NotComposed``.

Examples
--------
>>> lstm, x = torch.nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3)
>>> class Swapped(torch.overrides.TorchFunctionMode):
...     def __torch_function__(self, func, types, args=(), kwargs=None):
...         return COMPOSED.get(func, func)(*args, **(kwargs or {}))
>>> with Swapped():
...     y, _ = lstm(x)
>>> torch.allclose(y, lstm(x)[0], atol=1e-6)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]
"""The hidden state of a recurrent layer, and for an LSTM its cells: ``[N, H]`` each."""


class NotComposed(Exception):
    """A case of such a function that is left to torch; the message says which."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ / √d + mask) V, with dropout on the weights."""
    if enable_gqa:
        raise NotComposed("attention whose heads share keys")
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.mT * factor
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``nn.MultiheadAttention`` does to a sequence ``[L, N, E]``."""
    extras = (bias_k, bias_v, static_k, static_v)
    if query.dim() != 3 or add_zero_attn or any(extra is not None for extra in extras):
        raise NotComposed("attention without a batch, or with keys of its own")
    projections = (q_proj_weight, k_proj_weight, v_proj_weight)
    heads: list[Tensor] = []  # of queries, keys and values, [N, heads, L, E / heads] each
    for i, (x, weight) in enumerate(zip((query, key, value), projections, strict=True)):
        third = slice(i * embed_dim_to_check, (i + 1) * embed_dim_to_check)
        weight = weight if in_proj_weight is None else in_proj_weight[third]
        assert weight is not None
        y = F.linear(x.transpose(0, 1), weight, None if in_proj_bias is None else in_proj_bias[third])
        heads.append(y.view(*y.shape[:2], num_heads, -1).transpose(1, 2))
    q, k, v = heads
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:  # a causal one is given as a mask too
        scores = _masked(scores, attn_mask if attn_mask.dim() == 2 else attn_mask.view_as(scores))
    if key_padding_mask is not None:
        scores = _masked(scores, key_padding_mask[:, None, None])
    weighed = F.dropout(scores.softmax(-1), dropout_p, training)
    y = F.linear((weighed @ v).transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias).transpose(0, 1)
    if not need_weights:
        return y, None
    return y, weighed.mean(1) if average_attn_weights else weighed


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores with what a mask forbids at -∞; one of numbers is added."""
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _lstm(given: Tensor, own: Tensor, state: State) -> State:
    i, f, g, o = (given + own).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(given: Tensor, own: Tensor, state: State) -> State:
    (r, z, n), (own_r, own_z, own_n) = given.chunk(3, -1), own.chunk(3, -1)
    z = (z + own_z).sigmoid()
    n = (n + (r + own_r).sigmoid() * own_n).tanh()
    return ((1 - z) * n + z * state[0],)


def _recurrent(cell: Callable[[Tensor, Tensor, State], State]) -> Callable[..., tuple[Tensor, ...]]:
    """A recurrent layer of such cells: each is given W_ih x + b_ih, W_hh h + b_hh and the state."""

    def layer(
        x: Tensor,
        hx: Tensor | State,
        weights: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout_p: float,
        training: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Tensor, ...]:
        states = hx if isinstance(hx, tuple) else (hx,)
        ways, each = 1 + bool(bidirectional), 4 if has_biases else 2
        if not isinstance(has_biases, bool) or len(weights) != num_layers * ways * each:
            raise NotComposed("a recurrent layer of packed sequences, or with projections")
        x = x if batch_first else x.transpose(0, 1)  # [N, T, F]
        ends: list[State] = []
        for number in range(num_layers):
            x = F.dropout(x, dropout_p, training) if number else x
            both = []
            for way in range(ways):
                at = len(ends)
                w_ih, w_hh, *b = weights[at * each : (at + 1) * each]
                b_ih, b_hh = b or (None, None)
                given = F.linear(x, w_ih, b_ih).unbind(1)
                state, hidden = tuple(s[at] for s in states), []
                for moment in reversed(given) if way else given:
                    state = cell(moment, F.linear(state[0], w_hh, b_hh), state)
                    hidden.append(state[0])
                both.append(torch.stack(hidden[::-1] if way else hidden, 1))
                ends.append(state)
            x = torch.cat(both, -1)
        return (
            x if batch_first else x.transpose(0, 1),
            *(torch.stack(end) for end in zip(*ends, strict=True)),
        )

    return layer


COMPOSED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: multi_head_attention,
    torch.lstm: _recurrent(_lstm),
    torch.gru: _recurrent(_gru),
    torch.rnn_tanh: _recurrent(lambda given, own, state: ((given + own).tanh(),)),
    torch.rnn_relu: _recurrent(lambda given, own, state: ((given + own).relu(),)),
}
