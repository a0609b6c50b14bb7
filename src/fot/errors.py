"""The errors that are the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: one line that names the cause and the remedy.

    The command line prints it without a trace and exits with code 2.

    >>> str(UserError("a key with\\na line break: no such key"))
    'a key with a line break: no such key'
    """

    def __str__(self) -> str:
        return " ".join(super().__str__().splitlines())


class NotFinite(UserError):
    """Numbers of one client that are NaN, infinite or overflow: engines leave that client out."""
