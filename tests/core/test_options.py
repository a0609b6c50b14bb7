"""A wrong option is one line that names the key and what is allowed; nothing else ever comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fot.errors import NotFinite, UserError
from fot.options import Between, checked, convert, defaults

if TYPE_CHECKING:
    from pathlib import Path

Positive = Annotated[int, Between(1)]
Share = Annotated[float, Between(0, 1)]
Old = Optional[int]  # noqa: UP045 - older forms, which users write too
Either = Union[str, Positive]  # noqa: UP007


def refusal(value, hint) -> str:
    with pytest.raises(UserError) as caught:
        convert(value, hint, "table.key")
    text = str(caught.value)
    assert "\n" not in text and text.startswith("table.key")
    return text


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        ("a", str, "a"),
        (True, bool, True),
        (False, bool, False),
        (None, int | None, None),
        ("none", int | None, None),
        (4, Old, 4),
        ("none", str | None, "none"),
        ("iid", Literal["iid", "shards"], "iid"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ((1, 2), list[float], (1.0, 2.0)),
        ([], Sequence[int], ()),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        ({"a": [1]}, Mapping[str, tuple[int, ...]], {"a": (1,)}),
        (1, Positive, 1),
        (0, Share, 0.0),
        (1, Share, 1.0),
        (7, Positive | tuple[Positive, ...], 7),
        ([7, 1], Positive | tuple[Positive, ...], (7, 1)),
        ("5d", Positive | str | dict[str, Positive | str], "5d"),
        ({"*": "d", "a": 2}, Positive | str | dict[str, Positive | str], {"*": "d", "a": 2}),
        (2, Either, 2),
        (object, Any, object),
        (5, Annotated[int | None, Between(1, 9)], 5),
        (None, Annotated[int | None, Between(1, 9)], None),
    ],
)
def test_allowed(value, hint, result):
    converted = convert(value, hint, "table.key")
    assert converted == result and type(converted) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "said"),
    [
        (True, int, "True is not allowed; allowed: a whole number"),
        (True, float, "allowed: a number"),
        (1, bool, "1 is not allowed; allowed: true or false"),
        (1.0, int, "1.0 is not allowed"),
        ("3", int, "'3' is not allowed"),
        (3, str, "allowed: a text"),
        (None, int, "None is not allowed"),
        (math.nan, float, "nan is not allowed"),
        (math.inf, float, "inf is not allowed; allowed: a number"),
        (-math.inf, float, "-inf is not allowed"),
        (math.inf, Annotated[float, Between(0)], "inf is not allowed; allowed: a number at least 0"),
        ([0.5, math.inf], tuple[float, ...], "table.key[1]: inf is not allowed"),
        (10**400, float, "allowed: a number"),
        (10**400, int, "allowed: a whole number"),
        (2**63, int, "allowed: a whole number"),
        (-(2**63) - 1, int, "allowed: a whole number"),
        ("x", Literal["iid", "shards"], "allowed: iid, shards"),
        ("ab", tuple[str, ...], "'ab' is not allowed; allowed: a list of a text"),
        ([1], dict[str, int], "allowed: a table of a whole number"),
        ([1, "a"], tuple[int, ...], "table.key[1]: 'a' is not allowed"),
        ({"a": "b"}, dict[str, int], "table.key.a: 'b' is not allowed"),
        (0, Positive, "0 is out of range; allowed: a whole number at least 1"),
        (-0.1, Share, "out of range; allowed: a number from 0 to 1"),
        (1.1, Share, "out of range"),
        (3, Annotated[int, Between(high=2)], "allowed: a whole number at most 2"),
        (0, Positive | tuple[Positive, ...], "0 is out of range"),
        ([1, 0], Positive | tuple[Positive, ...], "table.key[1]: 0 is out of range"),
        ({"a": 0}, Positive | str | dict[str, Positive | str], "table.key.a: 0 is out of range"),
        (1.5, Positive | str, "allowed: a whole number at least 1 or a text"),
        (10, Annotated[int | None, Between(1, 9)], "allowed: a whole number or none from 1 to 9"),
        ("x", int | None, "allowed: a whole number or none"),
        (1, complex, "is not allowed"),
    ],
)
def test_refused(value, hint, said):
    assert said in refusal(value, hint)


def test_the_ends_of_int64_are_allowed():
    assert convert(2**63 - 1, int, "k") == 2**63 - 1
    assert convert(-(2**63), int, "k") == -(2**63)


def model(width: int, dropout: Share = 0.0, *, name="x", seed: int = 0): ...


@dataclass(frozen=True)
class Options:
    lr: Share = 0.1


class Plain:
    def __init__(self, size: int = 3) -> None: ...


class Bare: ...


def unresolved(root: Path, width: int = 3): ...


def anything(first, *rest, **more): ...


def test_checked_converts():
    assert checked(model, {"width": 2, "dropout": 1}, "model") == {"width": 2, "dropout": 1.0}
    assert checked(model, {"width": 2, "name": [1]}, "model") == {"width": 2, "name": [1]}
    assert checked(Options, {"lr": 1}, "o") == {"lr": 1.0}
    assert checked(Plain, {"size": 1}, "o") == {"size": 1}
    assert checked(Bare, {}, "o") == {}
    assert checked(unresolved, {"root": "a", "width": "b"}, "o") == {"root": "a", "width": "b"}


@pytest.mark.parametrize(
    ("target", "table", "said"),
    [
        (model, {"widht": 1}, "m.widht: no such option; did you mean width? (allowed: dropout, name, width)"),
        (model, {"zzz": 1}, "m.zzz: no such option (allowed: dropout, name, width)"),
        (model, {"width": 1, "seed": 1}, "m.seed: no such option"),
        (model, {}, "m.width: missing; allowed: a whole number"),
        (model, {"width": "a"}, "m.width: 'a' is not allowed"),
        (Options, {"lr": 2}, "m.lr: 2 is out of range; allowed: a number from 0 to 1"),
        (Plain, {"size": 1.5}, "m.size: 1.5 is not allowed"),
        (Bare, {"x": 1}, "m.x: no such option (allowed: none)"),
        (anything, {"rest": 1}, "m.rest: no such option"),
        (anything, {}, "m.first: missing; allowed: anything"),
        (Options, {"a\nb": 1}, "m.a b: no such option"),
    ],
)
def test_checked_refuses(target, table, said):
    with pytest.raises(UserError) as caught:
        checked(target, table, "m", given=["seed"])
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)


def test_defaults():
    assert defaults(model, given=["seed"]) == {"dropout": 0.0, "name": "x"}
    assert defaults(Options) == {"lr": 0.1}
    assert defaults(Bare) == {}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
hints = st.sampled_from(
    [
        *(int, float, str, bool, Any, int | None, Positive, Share, Old, Literal["a", "b", 1]),
        *(tuple[int, ...], list[str], dict[str, Share], Positive | str | dict[str, Positive | str]),
        *(Positive | tuple[Positive, ...], Annotated[float | None, Between(0)], tuple[str, ...] | None),
    ]
)


@settings(max_examples=300)
@given(values, hints)
def test_nothing_but_a_user_error_comes_out(value, hint):
    try:
        result = convert(value, hint, "k")
    except UserError as error:
        assert str(error).startswith("k") and "\n" not in str(error)
    else:
        if hint is Positive:
            assert type(result) is int and result >= 1
        if hint is Share:
            assert type(result) is float and 0 <= result <= 1


@settings(max_examples=100)
@given(st.dictionaries(st.text(max_size=8), values, max_size=3))
def test_no_table_crashes(table):
    try:
        checked(model, table, "model")
    except UserError as error:
        assert str(error).startswith("model.") and len(str(error).splitlines()) == 1


def test_errors_are_one_line():
    assert str(UserError("first\nsecond\r\nthird")) == "first second third"
    assert issubclass(NotFinite, UserError)
