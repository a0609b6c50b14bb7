"""How a sum over clients is formed: plainly, encoded in a ring, or by secure aggregation."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Literal

from fot.aggregation.codec import Codec
from fot.aggregation.encoded import EncodedAggregation
from fot.aggregation.interface import Aggregation, Kind, RoundAborted, Summation, Sums
from fot.aggregation.plain import PlainAggregation
from fot.aggregation.private import Privacy, PrivateAggregation
from fot.errors import UserError

__all__ = [
    "Aggregation",
    "Kind",
    "Privacy",
    "PrivateAggregation",
    "RoundAborted",
    "Summation",
    "Sums",
    "make_aggregation",
]


def make_aggregation(
    kind: Literal["plain", "encoded", "secure"],
    *,
    seed: int,
    update_bits: int = 32,
    update_clip: float = 4.0,
    statistics_bits: int = 64,
    statistics_clip: float = 2.0**32,
    clips: Mapping[str, float] | None = None,
    minimum: int = 3,
    neighbours: int = 0,
    threshold: float = 0.6,
    workers: int = 0,
    dropouts: Callable[[tuple[int, ...]], Mapping[int, int]] | None = None,
    entropy: Callable[[int], bytes] = os.urandom,
    privacy: Privacy | None = None,
) -> Aggregation:
    """The aggregation of that name: "plain", "encoded" or "secure".

    Parameters
    ----------
    kind : str
        "plain" adds floats; "encoded" adds integers of a ring, bit for bit what "secure" gives.
    seed : int
        The run's seed. Secrets do not depend on it: they come from `entropy`.
    update_bits, update_clip, statistics_bits, statistics_clip, clips
        The rings and public clips of "encoded" and "secure"; see `fot.aggregation.codec.Codec`.
    minimum, neighbours, threshold, workers, dropouts, entropy
        See `fot.aggregation.secure.SecureAggregation`.
    privacy : Privacy, optional
        Clip and add noise on top; see `fot.aggregation.private`.

    Examples
    --------
    >>> make_aggregation("encoded", seed=0, update_bits=24).codec.update_bits
    24
    """
    if kind == "plain":
        return _private(PlainAggregation(), privacy, seed, None)
    codec = Codec(update_bits, update_clip, statistics_bits, statistics_clip, clips)
    if kind == "encoded":
        return _private(EncodedAggregation(codec), privacy, seed, codec)
    if kind == "secure":
        from fot.aggregation.secure import SecureAggregation  # only this kind needs `cryptography`

        secure = SecureAggregation(
            codec,
            minimum=minimum,
            neighbours=neighbours,
            threshold=threshold,
            workers=workers,
            dropouts=dropouts,
            entropy=entropy,
        )
        return _private(secure, privacy, seed, codec)
    raise UserError(f"unknown aggregation '{kind}': choose plain, encoded or secure")


def _private(inner: Aggregation, privacy: Privacy | None, seed: int, codec: Codec | None) -> Aggregation:
    return PrivateAggregation(inner, privacy, seed=seed, codec=codec) if privacy else inner
