"""What a sequence of noisy sums reveals: the epsilon of Gaussian mechanisms, alone and composed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

from fot.errors import UserError


def gaussian_delta(noise: float, epsilon: float) -> float:
    """The smallest delta of the Gaussian mechanism (Balle & Wang, 2018, Theorem 8); sensitivity 1.

    Φ(1/2z - εz) - exp(ε) Φ(-1/2z - εz)

    Examples
    --------
    >>> round(gaussian_delta(1.0, 1.0), 4)
    0.1269
    """
    half = 0.5 / noise
    return _phi(half - epsilon * noise) - math.exp(epsilon + _log_phi(-half - epsilon * noise))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """The smallest epsilon of the Gaussian mechanism at `delta`.

    Examples
    --------
    >>> round(gaussian_epsilon(0.685, 1e-5), 1)
    6.8
    """
    if noise <= 0:
        return math.inf
    high = 1.0
    while gaussian_delta(noise, high) > delta:
        high *= 2
    return _bisect(lambda epsilon: gaussian_delta(noise, epsilon) <= delta, 0.0, high)


def gaussian_noise(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier that is (epsilon, delta)-private.

    Examples
    --------
    >>> round(gaussian_noise(1.0, 1e-5), 4)
    3.7306
    """
    high = 1.0
    while gaussian_delta(high, epsilon) > delta:
        high *= 2
    return _bisect(lambda noise: gaussian_delta(noise, epsilon) <= delta, 1e-6, high)


class Accountant:
    """The releases of a run and the epsilon of all together, at one delta.

    Gaussian mechanisms compose exactly: multipliers z_i are together one multiplier (Σ z_i⁻²)^(-½).
    Against somebody who sees the released sums but not who was asked, sampling of the cohort helps; that is
    accounted by Rényi divergences (Wang et al., 2019), for cohorts of fixed size.

    Examples
    --------
    >>> accountant = Accountant(delta=1e-5)
    >>> for _ in range(4):
    ...     accountant.add(2 * gaussian_noise(1.0, 1e-5))
    >>> round(accountant.epsilon(), 6)
    1.0
    """

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self.releases: list[tuple[float, tuple[int, int] | None]] = []

    def add(self, noise: float, sample: tuple[int, int] | None = None) -> None:
        """One more release: its noise multiplier and, if the cohort was drawn, (cohort, population)."""
        self.releases.append((noise, sample))

    def epsilon(self, *, sampled: bool = False) -> float:
        """The epsilon of all releases; with `sampled`, for somebody who does not know the cohorts."""
        if not self.releases:
            return 0.0
        if any(noise <= 0 for noise, _ in self.releases):
            return math.inf
        known = gaussian_epsilon(1 / math.sqrt(sum(z**-2 for z, _ in self.releases)), self.delta)
        if not sampled or all(sample is None for _, sample in self.releases):
            return known
        return min(known, self._renyi())

    def _renyi(self) -> float:
        import dp_accounting
        from dp_accounting import rdp

        accountant = rdp.RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
        counts: dict[tuple[float, tuple[int, int] | None], int] = {}
        for release in self.releases:
            counts[release] = counts.get(release, 0) + 1
        for (noise, sample), count in counts.items():
            if sample is None:
                event = dp_accounting.GaussianDpEvent(noise)
            else:
                # In a cohort of fixed size, a client left out is another one in: the sum moves by 2 L, not L.
                drawn = dp_accounting.GaussianDpEvent(noise / 2)
                event = dp_accounting.SampledWithoutReplacementDpEvent(sample[1], sample[0], drawn)
            accountant.compose(event, count)
        return float(accountant.get_epsilon(self.delta))


def check_installed() -> None:
    """Refuse to account for sampled cohorts where dp-accounting is missing."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise UserError("dp.amplify: it needs dp-accounting; pip install 'fot[privacy]'")


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _log_phi(x: float) -> float:
    """log Φ(x); below -30 by its asymptotic series, since erfc has underflown near -38."""
    if x > -30:
        return math.log(_phi(x))
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2 + 3 / x**4)
