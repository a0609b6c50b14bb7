"""Compile the kernels of a round for a GPU that is not there; prints a line for each.

    python tests/engines/compiled_kernels.py WORK PRECISION

In the place of launching a kernel, Triton compiles it for an H100 or H200, with the arguments that a round of
this work of ``fot bench engine`` has, of four clients. A line holds its name, its tiles, warps and stages,
registers, bytes of registers spilled, and bytes of shared memory.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from fot.aggregation import make_aggregation
from fot.engines.base import Round
from fot.engines.bench import WORKS, _keys, _set_up
from fot.engines.vectorized import VectorizedEngine, kernels
from fot.engines.vectorized.kernels import draws
from fot.methods.base import Method, Server

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.int64: "*i64",
    torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
found: dict[str, str] = {}


def source(kernel: JITFunction[Any], given: dict[str, Any]) -> ASTSource:
    """The kernel as Triton would specialise it for these arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible: dict[tuple[int, ...], Any] = {}
    for number, param in enumerate(kernel.params):
        value = given[param.name]
        single = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or single:
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = TYPES[value.dtype] if isinstance(value, Tensor) else "i32"
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            signature[param.name] = "i64"
        if isinstance(value, Tensor) or (value % 16 == 0 and not param.do_not_specialize):
            divisible[(number,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, divisible)


class Compiled:
    """In the place of a kernel that is about to be launched."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel

    def __call__(self, *args: Any, **options: int) -> None:
        bound = inspect.signature(self.kernel.fn).bind(*args)
        src = source(self.kernel, bound.arguments)
        key = f"{self.kernel.fn.__name__} {src.signature} {src.constants} {src.attrs} {options}"
        if key in found:
            return
        made = triton.compile(src, target=TARGET, options=options)
        tiles = "x".join(str(v) for n, v in bound.arguments.items() if n in ("BM", "BN", "BK", "BLOCK"))
        warps = f"{made.metadata.num_warps}w {made.metadata.num_stages}s"
        found[key] = (
            f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__} {tiles} {warps} "
            f"{_registers(made)} {made.metadata.shared}"
        )


def _registers(made: Any) -> str:
    """Registers a thread, and bytes spilled, as the assembler of Triton's own package tells."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(made.asm["ptx"])
        command = [assembler, "-v", "--gpu-name", "sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    used, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    assert used and spilled
    return f"{used[1]} {spilled[1]}"


def main(name: str, precision: str) -> None:
    """Compile what a round of this work launches."""
    JITFunction.__getitem__ = lambda self, grid: Compiled(self)  # type: ignore[method-assign]
    kernels.at_hand = lambda device: True  # type: ignore[assignment]
    order = draws.order  # the one result that is a place to read from
    draws.order = lambda numbers: (order(numbers), numbers.argsort())[1]
    work = replace(WORKS[name], cohort=4)
    network, task, training = _set_up(work, "cpu", precision)
    clients = list(range(work.cohort))
    made = VectorizedEngine(network, Method(), training, at_once=work.cohort)
    summation = make_aggregation("plain", seed=0).open(clients, kind="update", path=(0, 0))
    round = Round(Server(network.tree(), {}), task, clients, _keys(0), {}, summation)
    made.local_cohort([round], (clients,), totals=True, recorded=False)
    print("\n".join(sorted(found.values())))


if __name__ == "__main__":
    main(*sys.argv[1:])
