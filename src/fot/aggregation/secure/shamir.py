"""Shamir's secret sharing over a prime field: any t shares give the secret, fewer give nothing.

The prime is the largest below 2**128: a share takes 16 bytes, and 128 bits are what X25519 is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

PRIME = 2**128 - 159


def split(secret: int, coefficients: Sequence[int], points: Sequence[int]) -> list[int]:
    """The values at `points` of the polynomial secret + Σ coefficients[j] x^(j+1).

    Examples
    --------
    >>> split(5, [2], [1, 2, 3])
    [7, 9, 11]
    """
    shares = []
    for x in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value + coefficient) * x % PRIME
        shares.append((value + secret) % PRIME)
    return shares


def combine(shares: Mapping[int, int], threshold: int) -> int:
    """The secret, from `threshold` of the shares {point: value}.

    Examples
    --------
    >>> combine({3: 11, 1: 7}, threshold=2)
    5
    """
    return Combiner(threshold, ()).combine(shares)


class Combiner:
    """Lagrange interpolation at 0 for many secrets whose holders are nearly the same.

    In a complete graph the holders of client u's shares are everybody but u. The weights of t + 1 points of
    the `pool` cost O(t**2), once; leaving out point j turns weight i into itself times (x_j - x_i) / x_j,
    which costs O(t).
    """

    def __init__(self, threshold: int, pool: Iterable[int]) -> None:
        self.threshold = threshold
        self.base = sorted(pool)[: threshold + 1]
        self._weights: dict[int, int] = {}

    def combine(self, shares: Mapping[int, int]) -> int:
        """The secret; too few shares are an error."""
        t = self.threshold
        if len(shares) < t:
            raise ValueError(f"{len(shares)} shares where {t} are needed")
        left_out = [x for x in self.base if x not in shares]
        if len(self.base) != t + 1 or len(left_out) > 1:
            weights = _weights(sorted(shares)[:t])
            return sum(shares[x] * weight for x, weight in weights.items()) % PRIME
        self._weights = self._weights or _weights(self.base)
        if not left_out:  # t + 1 points give a polynomial of degree t - 1 as well as t of them do
            return sum(shares[x] * weight for x, weight in self._weights.items()) % PRIME
        (j,) = left_out
        total = sum(shares[i] * w % PRIME * (j - i) for i, w in self._weights.items() if i != j)
        return total * pow(j, -1, PRIME) % PRIME


def _weights(points: Sequence[int]) -> dict[int, int]:
    """The Lagrange weights at 0: Π_{m ≠ i} x_m / (x_m - x_i)."""
    weights = {}
    for x in points:
        above, below = 1, 1
        for y in points:
            if y != x:
                above = above * y % PRIME
                below = below * (y - x) % PRIME
        weights[x] = above * pow(below, -1, PRIME) % PRIME
    return weights
