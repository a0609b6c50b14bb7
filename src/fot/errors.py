"""The one error that is the user's to mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: one line that names the cause and the remedy.

    The command line prints it without a trace and exits with code 2.
    """
