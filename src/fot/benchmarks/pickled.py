"""CIFAR's python version is a pickle, and loading a pickle runs what it asks for. This reader runs nothing.

It walks the opcodes as data and knows only what a dictionary of text, numbers, lists and byte arrays
needs. Names of functions are compared with a short list and never looked up.
"""

from __future__ import annotations

import pickletools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fot.benchmarks.formats import broken, reading
from fot.errors import UserError


@dataclass
class _Name:
    """A function or class that the file names; it stays a name."""

    text: str


@dataclass
class _Made:
    """What calling a `_Name` would have made: the name, its arguments, and later its state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


_MARK = object()
_KNOWN = frozenset(
    {
        "numpy.core.multiarray _reconstruct",
        "numpy._core.multiarray _reconstruct",
        "numpy ndarray",
        "numpy dtype",
        "_codecs encode",
    }
)
_PUSH = re.compile(
    "(SHORT_)?(BINSTRING|BINUNICODE|BINBYTES)8?|STRING|UNICODE|BININT[12]?|INT|LONG[14]?|(BIN)?FLOAT"
)
_CONSTANT = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLE = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickled_cifar(path: Path, label_key: str) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (N, 3, 32, 32) and labels of one file of CIFAR's python version."""
    with reading(path):
        data = path.read_bytes()
        try:
            found = _walk(data)
        except UserError as error:
            raise broken(path, str(error)) from None
        if not isinstance(found, dict):
            raise ValueError("it holds no dictionary")
        rows, labels = _array(found.get("data")), found.get(label_key)
        if rows.ndim != 2 or rows.shape[1] != 3072:
            raise ValueError(f"pictures of shape {rows.shape} are not 32 x 32 x 3")
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise ValueError(f"there is no list of numbers called {label_key}")
        return rows.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


def _walk(data: bytes) -> Any:
    argument: Any
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        place = next((i for i in range(len(stack) - 1, -1, -1) if stack[i] is _MARK), None)
        if place is None:
            raise ValueError("it lost its mark")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if _PUSH.fullmatch(name):
            stack.append(argument)
        elif name in _CONSTANT:
            stack.append(_CONSTANT[name])
        elif name in _TUPLE:
            items = [stack.pop() for _ in range(_TUPLE[name])]
            stack.append(tuple(reversed(items)))
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else since_mark()
            _expect(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else since_mark()
            target = _expect(stack[-1], dict)
            for at in range(0, len(items) - 1, 2):
                target[_text(items[at])] = items[at + 1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            named = argument if name == "GLOBAL" else " ".join(map(_text, [stack.pop(), stack.pop()][::-1]))
            if named not in _KNOWN:
                raise UserError(f"it asks to run {named!r}, which no picture needs; nothing was run")
            stack.append(_Name(named))
        elif name == "REDUCE":
            arguments, function = _expect(stack.pop(), tuple), _expect(stack.pop(), _Name)
            stack.append(_Made(function.text, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _expect(stack[-1], _Made).state = state
        elif name == "STOP":
            return stack[-1]
        elif name not in ("PROTO", "FRAME"):
            raise UserError(f"it asks for {name}, which no picture needs; nothing was run")
    raise ValueError("it breaks off")


def _expect(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} in place of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return str(_expect(value, str))


def _array(made: Any) -> np.ndarray:
    """The array of bytes that numpy's own `_reconstruct` and state stand for."""
    if (
        not isinstance(made, _Made)
        or not made.name.endswith("_reconstruct")
        or not isinstance(made.state, tuple)
    ):
        raise ValueError("there is no array called data")
    _, shape, dtype, fortran, values = made.state
    if (
        not isinstance(dtype, _Made)
        or dtype.name != "numpy dtype"
        or dtype.arguments[0] not in ("u1", b"u1", "|u1")
    ):
        raise ValueError("its array is not of unsigned bytes")
    if (
        isinstance(values, _Made) and values.name == "_codecs encode"
    ):  # how protocol 2 of Python 3 writes bytes
        values = values.arguments[0]
    if isinstance(values, str):
        values = values.encode("latin-1")
    array = np.frombuffer(_expect(values, bytes), np.uint8)
    return array.reshape(tuple(shape), order="F" if fortran else "C")
