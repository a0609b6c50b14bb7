from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
sys.modules["cryptography"] = sys.modules["dp_accounting"] = None  # importing either now fails
import torch
from fot.aggregation import Privacy, make_aggregation
for kind in ("plain", "encoded"):
    summation = make_aggregation(kind, seed=0, privacy=Privacy()).open([0, 1], kind="statistics", path=(0, 0))
    summation.add([0, 1], {"a": torch.ones(2, 3)})
    summation.close()
"""


def test_plain_and_encoded_sums_run_without_the_optional_packages():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120, env=environment)
