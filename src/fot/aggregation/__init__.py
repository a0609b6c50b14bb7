"""How a sum over clients is formed: plainly, encoded in a ring, or by secure aggregation."""

from __future__ import annotations

from typing import Any

from fot.aggregation.interface import Aggregation, Kind, Summation, Sums
from fot.aggregation.plain import PlainAggregation
from fot.errors import UserError

__all__ = ["Aggregation", "Kind", "Summation", "Sums", "make_aggregation"]


def make_aggregation(kind: str, *, seed: int, **options: Any) -> Aggregation:
    """The aggregation of that name: "plain", "encoded" or "secure".

    Examples
    --------
    >>> make_aggregation("plain", seed=0).__class__.__name__
    'PlainAggregation'
    """
    if kind == "plain":
        return PlainAggregation()
    raise UserError(f"unknown aggregation '{kind}': choose plain, encoded or secure")
