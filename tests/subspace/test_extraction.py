"""The server's linear algebra: rank rules against their words, directions against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fot.subspace.extraction import append, chosen_rank, principal_directions, ranks, sampled_gram


def orthonormal(d: int, r: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(1, d, r, generator=draw, dtype=torch.float64)).Q


positive = st.floats(0.01, 1)


@settings(max_examples=150, deadline=None)
@given(st.lists(positive, min_size=1, max_size=8), st.floats(0.001, 1), positive, st.floats(0, 1.2))
def test_the_rules_are_their_words(spectrum: list[float], rho: float, w: float, threshold: float) -> None:
    spectrum.sort(reverse=True)
    total, d = sum(spectrum), len(spectrum)

    def first(protected: float, strictly: bool) -> int:
        """The smallest r that satisfies the rule, or d; cumulated like the tensors."""
        shares = torch.tensor([0.0, *spectrum]).double().cumsum(0) / total
        for r, share in enumerate(shares.tolist()):
            reached = (1 - protected) + protected * share
            if abs(reached - threshold) < 1e-9:
                return -1  # a tie that rounding decides
            if reached > threshold if strictly else reached >= threshold:
                return r
        return d

    tensors = [torch.tensor([v]).double() for v in (rho * 7.0, 7.0, w)]
    s2 = torch.tensor([spectrum]).double()
    energy, authors = first(rho, strictly=False), first(w, strictly=True)
    if energy >= 0:
        assert chosen_rank(s2, *tensors, threshold, "energy", 1e-7).item() == energy
    if authors >= 0:
        assert chosen_rank(s2, *tensors, threshold, "authors", 1e-7).item() == max(1, authors)


@pytest.mark.parametrize(("rule", "rank"), [("energy", 2), ("authors", 3)])
def test_a_tie_is_enough_for_the_energy_rule_and_not_for_the_authors(rule: str, rank: int) -> None:
    s2, one = torch.tensor([[5.0, 2, 1]]).double(), torch.ones(1).double()
    assert chosen_rank(s2, one, one, one, 0.875, rule, 1e-7).item() == rank


def test_each_group_has_a_rank_of_its_own() -> None:
    s2 = torch.tensor([[8.0, 1, 1, 0], [3, 3, 2, 2], [0, 0, 0, 0]]).double()
    ones = torch.ones(3).double()
    energies = torch.tensor([1.0, 1, 0]).double()
    assert chosen_rank(s2, energies, energies, ones, 0.75, "energy", 1e-7).tolist() == [1, 3, 0]
    assert chosen_rank(s2, energies, energies, ones, 1.0, "energy", 1e-7).tolist() == [3, 4, 0]
    assert chosen_rank(s2, energies, energies, ones, 0.1, "authors", 1e-7).tolist() == [1, 1, 0]


@pytest.mark.parametrize("rule", ["energy", "authors"])
def test_rounding_is_no_direction(rule: str) -> None:
    """A residual, or a direction, of the size of float32's rounding is never added."""
    one = torch.ones(1).double()
    s2 = torch.tensor([[1.0, 1e-15, 0.0]]).double()
    assert chosen_rank(s2, one, one, one, 2.0, rule, 1.2e-7).item() == 1
    assert chosen_rank(s2, 1e-14 * one, one, 1e-7 * one, 2.0, rule, 1.2e-7).item() == 0


def test_directions_diagonalise_what_the_basis_leaves() -> None:
    d = 7
    O = orthonormal(d, 2, 0)
    a = torch.randn(1, d, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    U, s2 = principal_directions(a @ a.mT, O)
    rest = a - O @ O.mT @ a
    assert torch.equal(s2, s2.sort(descending=True).values)
    torch.testing.assert_close((U * s2.unsqueeze(-2)) @ U.mT, rest @ rest.mT, atol=1e-10, rtol=0)
    torch.testing.assert_close(s2[0, :5], torch.linalg.svdvals(rest)[0, :5] ** 2)
    assert (O.mT @ U[..., :5]).abs().max() < 1e-12
    largest = U[0].gather(0, U[0].abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


def test_the_sampled_gram_has_the_law_of_the_sketch() -> None:
    """Rows of L⁻¹ A are standard normal: their squared lengths are chi-square in s."""
    factor = torch.tensor([[[3.0, 0, 0], [1, 2, 0], [-1, 1, 0.5]]]).double()
    s, M = 12, factor @ factor.mT
    inverse = torch.linalg.inv(factor)
    white = torch.stack([(inverse @ sampled_gram(M, s, key) @ inverse.mT)[0] for key in range(300)])
    assert stats.kstest(white.diagonal(dim1=1, dim2=2).flatten().numpy(), "chi2", args=(s,)).pvalue > 0.001
    assert (white.mean(0) - s * torch.eye(3)).abs().max() < 5 * (2 * s / 300) ** 0.5
    assert torch.linalg.matrix_rank(sampled_gram(M, 2, 0)).item() == 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 12), st.integers(0, 12), st.integers(0, 99))
def test_append_keeps_the_basis_orthonormal_and_within_d(d: int, old: int, a: int, b: int, seed: int) -> None:
    old = min(old, d)
    basis = orthonormal(d, old, seed).float()
    basis = torch.cat([basis, basis])
    U, _ = principal_directions(torch.eye(d).double().repeat(2, 1, 1), basis)
    grown = append(basis, U, torch.tensor([a, b]))
    assert grown.dtype == torch.float32
    assert ranks(grown).tolist() == [min(d, old + a), min(d, old + b)]
    assert grown.shape[-1] == max(ranks(grown).tolist())
    for O, before, added, U_g in zip(grown.double(), basis.double(), (a, b), U, strict=True):
        O = O[:, : min(d, old + added)]
        assert (O.mT @ O - torch.eye(O.shape[1])).abs().max() < 1e-6 if O.numel() else True
        for inside in (before, U_g[:, : min(added, d - old)]):
            torch.testing.assert_close(O @ (O.mT @ inside), inside, atol=1e-6, rtol=0)
        if O.shape[1] == d:
            assert torch.equal(O, torch.eye(d).double())
