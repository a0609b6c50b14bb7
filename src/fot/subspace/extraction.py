"""From a summed sketch to new directions: the linear algebra of GPSE's server side, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fot.randomness import generator

ROUNDING = 1e-4  # float32 leaves a sum of X* X*ᵀ less asymmetric than this, and noise below it hides little


def ranks(basis: Tensor) -> Tensor:
    """The rank of each group of a basis [g, d, r]: its columns that are not zero."""
    return (basis != 0).any(dim=1).sum(dim=-1)


def is_full(basis: Tensor) -> bool:
    """Whether every group of a basis [g, d, r] spans its whole input space."""
    return basis.shape[-1] == basis.shape[-2] and bool((basis != 0).any(dim=1).all())


def sampled_gram(gram: Tensor, size: int, key: int) -> Tensor:
    """A Aᵀ of a sketch with the law of X* G, drawn from M = X* X*ᵀ alone.

    With M = V L Vᵀ, the columns of A = V L^½ Z are independent N(0, M), as those of X* G are.
    """
    values, vectors = torch.linalg.eigh(gram)
    z = torch.empty(*gram.shape[:2], size, dtype=gram.dtype, device=gram.device)
    z.normal_(generator=generator(key, gram.device))
    a = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ z
    sampled: Tensor = a @ a.mT
    return sampled


def without_noise(gram: Tensor, basis: Tensor) -> Tensor:
    """The part of a noisy M = X* X*ᵀ [g, d, d] that stands out from the noise of differential privacy.

    M is symmetric, so what of the sum is not is noise, and shows its deviation σ: no one need tell. Outside
    the basis O of rank r, the noise (N + Nᵀ)/2 has no eigenvalue beyond σ√(2(d - r)) = edge, but for its own
    fluctuation, and an eigenvalue λ of M appears at λ + edge²/4λ. Those above the edge are put back to λ and
    the others, which are noise, to zero. A sum without noise is returned as it is.

    Examples
    --------
    >>> noise = torch.randn(1, 50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> spike = torch.zeros(1, 50, 50, dtype=torch.float64)
    >>> spike[0, 7, 7] = 100.0
    >>> spectrum = torch.linalg.eigvalsh(without_noise(spike + noise, spike[:, :, :0]))
    >>> int((spectrum > 1).sum()), bool(abs(spectrum.max() - 100) < 3)
    (1, True)
    """
    d = gram.shape[-1]
    deviation = torch.linalg.matrix_norm(gram - gram.mT) / (2 * d * max(1, d - 1)) ** 0.5
    edge = deviation * (2 * (d - ranks(basis))) ** 0.5
    if not bool((edge > ROUNDING * torch.linalg.matrix_norm(gram)).any()):
        return gram
    O = basis.to(gram)
    gram = (gram + gram.mT) / 2
    gram = gram - O @ (O.mT @ gram)
    values, vectors = torch.linalg.eigh(gram - (gram @ O) @ O.mT)
    edge = edge.unsqueeze(-1)
    values = torch.where(values > edge, (values + (values**2 - edge**2).clamp_min(0).sqrt()) / 2, 0.0)
    clean: Tensor = (vectors * values.unsqueeze(-2)) @ vectors.mT
    return clean


def principal_directions(gram: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """U [g, d, d] and S² [g, d], largest first, from A Aᵀ; U is orthogonal to the basis O.

    The clients have removed O already, in their own precision; what rounding left of it is removed here.
    """
    O = basis.to(gram)
    gram = gram - O @ (O.mT @ gram)
    gram = gram - (gram @ O) @ O.mT
    values, vectors = torch.linalg.eigh((gram + gram.mT) / 2)
    values, vectors = values.flip(-1).clamp_min(0), vectors.flip(-1)
    largest = vectors.gather(-2, vectors.abs().argmax(dim=-2, keepdim=True))
    return vectors * largest.sign(), values  # eigenvectors have no sign of their own: fix one


def chosen_rank(
    spectrum: Tensor,
    residual: Tensor,
    energy: Tensor,
    mean_ratio: Tensor,
    threshold: float,
    rule: str,
    eps: float,
) -> Tensor:
    """How many directions r [g] to add to each group.

    With share(r) = ΣS²[:r] / ΣS²,

    - ``energy``: rho = ‖X*‖² / ‖X‖²; the smallest r with (1 - rho) + rho · share(r) >= th; it may be 0;
    - ``authors``: w = mean over samples of ‖X*‖ / ‖X‖ (1 for the first task); the smallest r with
      (1 - w) + w · share(r) > th, and at least 1.

    Never more than there are directions above the rounding of the clients' arithmetic (`eps`): without this
    bound a threshold of 1 would fill the memory with noise, and zero inputs would add directions of nothing.

    Examples
    --------
    >>> s2, one = torch.tensor([[5.0, 2.0, 1.0]]).double(), torch.ones(1).double()
    >>> chosen_rank(s2, one, one, one, 0.875, "energy", 1e-7).item()             # 5 + 2 >= 0.875 · 8
    2
    >>> chosen_rank(s2, one, one, one, 0.875, "authors", 1e-7).item()            # but not > 0.875 · 8
    3
    >>> chosen_rank(s2, 0.125 * one, one, one, 0.875, "energy", 1e-7).item()     # 0.875 is protected already
    0
    """
    total = spectrum.sum(dim=-1, keepdim=True)
    shares = spectrum / torch.where(total > 0, total, torch.ones_like(total))
    rho = (residual / torch.where(energy > 0, energy, torch.ones_like(energy))).clamp(0, 1).unsqueeze(-1)
    reached = torch.cat([torch.zeros_like(total), shares.cumsum(dim=-1)], dim=-1)
    if rule == "energy":
        rank = ((1 - rho) + rho * reached < threshold).sum(dim=-1)
    else:
        w = mean_ratio.unsqueeze(-1)
        rank = ((1 - w) + w * reached <= threshold).sum(dim=-1).clamp_min(1)
    noise = spectrum.shape[-1] * max(eps**2, torch.finfo(spectrum.dtype).eps)
    return torch.minimum(rank, (rho * shares > noise).sum(dim=-1))


def append(basis: Tensor, directions: Tensor, chosen: Tensor) -> Tensor:
    """O and the first `chosen` [g] directions U of each group, orthonormal by QR; never beyond d columns."""
    groups, d, _ = basis.shape
    grown = []
    for O, U, old, new in zip(basis, directions, ranks(basis).tolist(), chosen.tolist(), strict=True):
        new = min(new, d - old)
        if old + new == d:  # full: the identity spans the same, and projects to zero exactly
            grown.append(torch.eye(d, dtype=basis.dtype, device=basis.device))
        elif new == 0:
            grown.append(O[:, :old])
        else:
            q, r = torch.linalg.qr(torch.cat([O[:, :old].to(U), U[:, :new]], dim=-1))
            grown.append((q * torch.where(r.diagonal() < 0, -1.0, 1.0)).to(basis.dtype))
    result = basis.new_zeros(groups, d, max(part.shape[-1] for part in grown))
    for O, part in zip(result, grown, strict=True):
        O[:, : part.shape[-1]] = part
    return result
