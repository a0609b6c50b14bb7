"""A cohort's dropout masks are those of its clients, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.dropout import keyed_dropout
from fot.engines.vectorized import masks


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
    for _ in range(2):
        together = cohort.mask(shape, p, cpu)
        single = torch.cat([one.mask(torch.Size((rows, units)), p, cpu) for one in alone])
        assert torch.equal(together, single)


@settings(max_examples=25, deadline=None)
@given(p=st.floats(1e-9, 1, exclude_max=True))
def test_a_unit_is_kept_from_the_very_draw_that_reaches_p(p: float) -> None:
    """A draw is k / 2**24, and is compared with p in float32; by k - 1 the unit is dropped."""
    drawn = torch.arange(1 << 24, dtype=torch.float32) / 2**24
    k = int(torch.searchsorted(drawn, torch.tensor(p)))  # the first that is not below p
    if k < 1 << 24:  # else p is 1 in float32, and nothing is kept
        assert masks._threshold(p) == (k << 40) - (1 << 63)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", [(400,), (3, 37), (7, 5, 6)])
def test_masks_on_a_gpu_are_those_on_a_cpu(shape: tuple[int, ...]) -> None:
    """Bit for bit, of samples in any layout; and the gradient meets the same masks."""
    keys = torch.tensor([3, 1 << 60, 2**63 - 1])
    x = torch.randn(3 * 5, *shape, generator=torch.Generator().manual_seed(0))
    results = []
    for device in ("cpu", "cuda"):
        own = x.to(device)
        own = own.to(memory_format=torch.channels_last) if x.dim() == 4 and device == "cuda" else own
        own.requires_grad_()
        with masks.cohort_dropout(keys.to(device)):
            dropped = [torch.nn.functional.dropout(own, p) for p in (0.2, 0.5, 0.999)]
        gradients = [torch.autograd.grad(y.square().sum(), own)[0] for y in dropped]
        results.append([t.detach().cpu() for t in (*dropped, *gradients)])
    for there, here in zip(*results, strict=True):
        assert torch.equal(there, here)
