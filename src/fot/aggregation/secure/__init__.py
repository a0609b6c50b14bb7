"""Secure aggregation after Bonawitz et al. (2017), with the sparse graph of Bell et al. (2020).

`client` and `server` are the two sides as pure functions of state and message, `wire` is what passes between
them, `aggregation` drives both within one process. What is promised, and what is not: docs/security.md.
"""

from __future__ import annotations

from fot.aggregation.interface import RoundAborted
from fot.aggregation.secure.aggregation import SecureAggregation
from fot.aggregation.secure.wire import Refusal

__all__ = ["Refusal", "RoundAborted", "SecureAggregation"]
