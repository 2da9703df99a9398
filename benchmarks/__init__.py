"""Benchmarks: `python -m benchmarks NAME` prints JSON lines; see `benchmarks/README.md`."""

import sys
from pathlib import Path

# Servers and clients of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
