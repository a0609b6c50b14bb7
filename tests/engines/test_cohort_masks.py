"""A cohort's dropout masks are those of its clients, bit for bit."""

from __future__ import annotations

import warnings

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
    for call in range(2):
        together = cohort.mask(shape, p, cpu)
        single = torch.cat([one.mask(torch.Size((rows, units)), p, cpu) for one in alone])
        assert torch.equal(together, single)
        counter, least = torch.arange(rows * units), torch.tensor(masks._threshold(p))
        whole = masks._whole(torch.tensor(keys).reshape(-1, 1), torch.tensor(call), counter, least)
        assert torch.equal(whole.view(shape), single)


@given(p=st.floats(0.01, 1))
@settings(max_examples=10, deadline=None)
def test_one_kernel_drops_as_the_reference_does(p: float) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    with keyed_dropout(7):
        wanted = torch.nn.functional.dropout(x, p)
    mask = keyed_dropout(7).mask(x.shape, p, x.device)
    got = masks._Kept.apply(x, mask, 1 / (1 - p) if p < 1 else 0.0)
    assert torch.equal(got, wanted)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (got, wanted)]
    assert torch.equal(*gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernel_is_compiled_once_on_a_gpu() -> None:
    """No warning, the right bits, and no compiling anew for another shape, call or probability."""
    keys = torch.tensor([3, 1 << 60, 12345])
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number, p, units in ((3, 0.2, 400), (2, 0.5, 861), (3, 0.999, 31)):
            alone, there = masks.cohort_dropout(keys[:number]), masks.cohort_dropout(keys[:number].cuda())
            for _ in range(3):
                shape = torch.Size((number * 5, units))
                assert torch.equal(there.mask(shape, p, gpu).cpu(), alone.mask(shape, p, cpu))
    assert masks._kernel(gpu) is not masks._whole
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
