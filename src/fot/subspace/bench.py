"""How much memory a sketch takes: measured in a process of its own, where nothing else has grown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from fot.layers import find_layers
from fot.subspace.sketch import sketch

LIMIT_MB = 400.0


def sketch_memory(
    width: int = 2048, samples: int = 100_000, size: int | str = "d", batch: int = 1000
) -> dict[str, float | str]:
    """Sketch the inputs of one layer, and measure the peak of the memory beyond that of the idle process.

    Returns
    -------
    dict
        ``width``, ``samples``, ``size``, ``extra_mb`` (the peak, in 10^6 bytes), ``sketch_mb`` (the sketch
        alone), ``limit_mb`` (what the peak is to stay under) and ``seconds``.
    """
    command = [sys.executable, "-m", "fot.subspace.bench", str(width), str(samples), str(size), str(batch)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float | str] = json.loads(done.stdout)
    return figures


def _measure(width: int, samples: int, size: int | str, batch: int) -> dict[str, float | str]:
    model = nn.Linear(width, 1, bias=False)
    draw = torch.Generator().manual_seed(0)
    batches = (torch.randn(min(batch, samples - i), width, generator=draw) for i in range(0, samples, batch))
    layers = find_layers(model).layers
    basis = torch.linalg.qr(torch.randn(width, width // 2, generator=draw)).Q.unsqueeze(0)
    idle, start = _memory_mb("VmRSS"), time.perf_counter()
    arrays = sketch(model, batches, layers, {"": basis}, size=size, key=0)
    seconds = time.perf_counter() - start
    return {
        "width": width,
        "samples": samples,
        "size": size,
        "extra_mb": round(_memory_mb("VmHWM") - idle, 1),
        "sketch_mb": arrays["/sketch"].numel() * arrays["/sketch"].element_size() / 1e6,
        "limit_mb": LIMIT_MB,
        "seconds": round(seconds, 1),
    }


def _memory_mb(field: str) -> float:
    """Resident memory, now (VmRSS) or at its peak (VmHWM)."""
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: on Linux its peak is inherited from the parent process
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024 / 1e6
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


if __name__ == "__main__":
    width, samples, size, batch = sys.argv[1:]
    s = int(size) if size.isdigit() else size
    print(json.dumps(_measure(int(width), int(samples), s, int(batch))))
