"""Files that something happened to."""

from __future__ import annotations

from hypothesis import strategies as st


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """The file with a few bytes changed, cut short, or something else altogether."""
    change = st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255))

    def apply(changes, end):
        data = bytearray(whole)
        for place, value in changes:
            data[place] = value
        return bytes(data[:end])

    return st.one_of(
        st.builds(apply, st.lists(change, min_size=1, max_size=6), st.integers(0, len(whole))),
        st.binary(max_size=300),
    )
