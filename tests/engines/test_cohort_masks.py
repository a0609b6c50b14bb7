"""A cohort's dropout masks are those of its clients, bit for bit."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.dropout import keyed_dropout
from fot.engines.vectorized import masks
from fot.randomness import fold


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=4),
    rows=st.integers(1, 3),
    units=st.sampled_from([1, 7, 20_000]),
    p=st.floats(1e-9, 1),
)
def test_masks_equal_each_clients_own(keys: list[int], rows: int, units: int, p: float) -> None:
    shape, cpu = torch.Size((len(keys) * rows, units)), torch.device("cpu")
    cohort = masks.cohort_dropout(torch.tensor(keys))
    alone = [keyed_dropout(key) for key in keys]
    for call in range(2):
        together = cohort.mask(shape, p, cpu)
        single = torch.cat([one.mask(torch.Size((rows, units)), p, cpu) for one in alone])
        assert torch.equal(together, single)
        folded = fold(torch.tensor(keys).reshape(-1, 1), call)
        assert torch.equal(masks._at_once(folded, rows * units, masks._threshold(p)).view(shape), single)
