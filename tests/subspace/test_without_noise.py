"""Noisy sums of X* X*ᵀ: what stands out from the noise is kept at its true size, the rest is dropped."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fot.layers import find_layers
from fot.subspace import SubspaceMemory, sketch
from fot.subspace.extraction import without_noise

D, SIGMA = 240, 3.0
EDGE = SIGMA * math.sqrt(2 * D)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spiked(seed: int, *values: float) -> tuple[Tensor, Tensor]:
    """A matrix [1, d, d] of these eigenvalues, and their directions."""
    v = torch.linalg.qr(normal(seed, 1, D, len(values))).Q
    return (v * torch.tensor(values, dtype=torch.float64)) @ v.mT, v


def spectrum(gram: Tensor) -> list[float]:
    values = torch.linalg.eigvalsh(gram)[0].flip(0)
    return [float(value) for value in values if value.abs() > 1e-6]


def test_a_sum_without_noise_passes_bit_for_bit() -> None:
    x = normal(0, 1, 30, 20).float()
    gram = (x @ x.mT).double()
    assert without_noise(gram, gram[:, :, :0]) is gram


@pytest.mark.parametrize("seed", range(4))
def test_noise_alone_leaves_nothing_worth_a_name(seed: int) -> None:
    """The largest eigenvalue of noise fluctuates about the edge: at most one pokes out, hardly."""
    left = spectrum(without_noise(SIGMA * normal(seed, 1, D, D), torch.zeros(1, D, 0)))
    assert len(left) <= 1
    assert all(value < 0.65 * EDGE for value in left)  # what lies on the edge is put to half of it


def test_spikes_come_back_at_their_size_and_those_below_the_edge_do_not() -> None:
    true = (8 * EDGE, 3 * EDGE, EDGE, 0.3 * EDGE)
    gram, v = spiked(1, *true)
    noisy = gram + SIGMA * normal(2, 1, D, D)
    clean = without_noise(noisy, torch.zeros(1, D, 0))
    found = spectrum(clean)
    assert len(found) == 3
    assert found == pytest.approx(true[:3], abs=0.06 * EDGE)
    observed = torch.linalg.eigvalsh((noisy + noisy.mT) / 2)[0].flip(0)
    assert float(observed[2]) > 1.15 * EDGE  # uncorrected, the third is at 1.25
    u = torch.linalg.eigh(clean).eigenvectors[0].flip(-1)[:, :3]
    cosines = (u.mT @ v[0, :, :3]).square().diagonal()
    assert cosines.tolist() == pytest.approx([1 - (EDGE / 2 / value) ** 2 for value in true[:3]], abs=0.06)


def test_noise_within_the_basis_is_not_counted() -> None:
    """With a basis of three quarters of the space, the edge is half as high: a spike at 0.4 is seen."""
    q = torch.linalg.qr(normal(3, 1, D, D)).Q
    basis, v = q[:, :, : 3 * D // 4], q[:, :, -1:]
    noisy = 0.4 * EDGE * v @ v.mT + SIGMA * normal(4, 1, D, D)
    assert spectrum(without_noise(noisy, basis[:, :, :0])) == pytest.approx([], abs=0)
    clean = without_noise(noisy, basis)
    assert spectrum(clean) == pytest.approx([0.4 * EDGE], abs=0.06 * EDGE)
    assert float((basis.mT @ clean).abs().max()) < 1e-9


def test_groups_have_noise_of_their_own() -> None:
    a, _ = spiked(5, 3 * EDGE)
    noise = normal(6, 2, D, D) * torch.tensor([SIGMA, 100 * SIGMA]).reshape(2, 1, 1)
    clean = without_noise(torch.cat([a, a]) + noise, torch.zeros(2, D, 0))
    assert spectrum(clean[:1])[0] == pytest.approx(3 * EDGE, abs=0.1 * EDGE)
    assert len(spectrum(clean[:1])) <= 2
    assert all(value < 100 * 0.65 * EDGE for value in spectrum(clean[1:]))


def test_the_memory_takes_the_directions_of_the_data_and_none_of_the_noise() -> None:
    model = nn.Linear(60, 3, bias=False, dtype=torch.float64)
    memory = SubspaceMemory.empty(find_layers(model).layers, torch.float64)
    x = normal(7, 500, 4) @ normal(8, 4, 60)
    sums = sketch(model, [x], memory.layers, memory.bases, size="d", key=1, exact=True)
    noise = 0.01 * float(torch.linalg.matrix_norm(sums["/gram"])) * normal(9, 1, 60, 60)
    noisy = {**sums, "/gram": sums["/gram"] + noise}
    grown, growth = memory.expand(noisy, threshold=1.0, key=2, size="d")
    assert growth[""].rank == 4
    O = grown.bases[""][0]
    assert float((x - (x @ O) @ O.mT).square().sum() / x.square().sum()) < 0.02
