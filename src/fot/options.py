"""Options checked against the signature that takes them.

Methods, models, benchmarks and settings declare their options as annotated keywords. A recipe is a
table of them: :func:`checked` turns it into keyword arguments, and an unknown key, a wrong type or a
value out of range is one line that names the key and what is allowed.

>>> def mlp(width: int = 100, dropout: Annotated[float, Between(0, 1)] = 0.0): ...
>>> checked(mlp, {"width": 50}, "model")
{'width': 50}
>>> checked(mlp, {"widht": 50}, "model")
Traceback (most recent call last):
fot.errors.UserError: model.widht: no such option; did you mean width? (allowed: dropout, width)
>>> checked(mlp, {"dropout": 2.0}, "model")
Traceback (most recent call last):
fot.errors.UserError: model.dropout: 2.0 is out of range; allowed: a number from 0 to 1
"""

from __future__ import annotations

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fot.errors import UserError


@dataclass(frozen=True)
class Between:
    """The range of a number, ends included."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"


def checked(
    target: Callable[..., Any], table: Mapping[str, Any], where: str, *, given: Sequence[str] = ()
) -> dict[str, Any]:
    """Keyword arguments for ``target`` from ``table``, every key checked.

    ``given`` names parameters that the caller fills in and a table may not.
    """
    allowed = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in given and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    known = _hints(target)
    hints = {name: known.get(name, Any) for name in allowed}
    found = check_table(table, hints, where)
    missing = [n for n, p in allowed.items() if p.default is p.empty and n not in table]
    if missing:
        raise UserError(f"{where}.{missing[0]}: missing; allowed: {_describe(hints[missing[0]])}")
    return found


def check_table(table: Mapping[str, Any], hints: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a table as the annotated types ``hints`` say; every key of it must be one of theirs."""
    for name in table:
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            listed = ", ".join(sorted(hints)) or "none"
            raise UserError(f"{where}.{name}: no such option{hint} (allowed: {listed})")
    return {name: convert(value, hints[name], f"{where}.{name}") for name, value in table.items()}


def defaults(target: Callable[..., Any], *, given: Sequence[str] = ()) -> dict[str, Any]:
    """The default of every option of ``target``."""
    parameters = inspect.signature(target).parameters.items()
    return {n: p.default for n, p in parameters if n not in given and p.default is not p.empty}


def convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the annotated type ``hint``, or a UserError that names ``where`` and what is allowed."""
    bare, bounds = _strip(hint)
    for form in get_args(bare) if get_origin(bare) in (Union, types.UnionType) else (bare,):
        form, own = _strip(form)
        found, result = _match(value, form, where)
        if found:
            allowed = own or bounds
            if allowed and isinstance(result, (int, float)) and not allowed.low <= result <= allowed.high:
                raise UserError(f"{where}: {value!r} is out of range; allowed: {_describe(hint)}")
            return result
    raise UserError(f"{where}: {value!r} is not allowed; allowed: {_describe(hint)}")


def _match(value: Any, form: Any, where: str) -> tuple[bool, Any]:
    origin = get_origin(form)
    if form is Any:
        return True, value
    if form in (None, type(None)):
        return value is None or value == "none", None
    if origin is Literal:
        return value in get_args(form), value
    if form is bool or isinstance(value, bool):
        return form is bool and isinstance(value, bool), value
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return False, value  # no tensor holds it
    if form is float and isinstance(value, (int, float)):
        return math.isfinite(value), float(value)
    if form in (int, str):
        return isinstance(value, form), value
    if origin in (tuple, list) or origin is Sequence:
        if not isinstance(value, (list, tuple)):
            return False, value
        element = get_args(form)[0]
        return True, tuple(convert(item, element, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            return False, value
        return True, {str(k): convert(v, get_args(form)[1], f"{where}.{k}") for k, v in value.items()}
    return False, value


def _strip(hint: Any) -> tuple[Any, Between | None]:
    if get_origin(hint) is Annotated:
        bare, *notes = get_args(hint)
        return bare, next((note for note in notes if isinstance(note, Between)), None)
    return hint, None


def _describe(hint: Any) -> str:
    bare, bounds = _strip(hint)
    origin = get_origin(bare)
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Any: "anything"}
    if origin in (Union, types.UnionType):
        text = " or ".join(_describe(form) for form in get_args(bare))
    elif origin is Literal:
        text = ", ".join(map(str, get_args(bare)))
    elif origin in (tuple, list) or origin is Sequence:
        text = f"a list of {_describe(get_args(bare)[0])}"
    elif origin in (dict, Mapping):
        text = f"a table of {_describe(get_args(bare)[1])}"
    elif bare is type(None):
        text = "none"
    else:
        text = words.get(bare, str(bare))
    return f"{text} {bounds}" if bounds else text


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, of a dataclass, or of another class's constructor."""
    own = inspect.isfunction(target) or hasattr(target, "__dataclass_fields__")
    try:
        return typing.get_type_hints(target if own else target.__init__, include_extras=True)
    except NameError:  # a name that is imported for type checkers only: nothing to check against
        return {}
