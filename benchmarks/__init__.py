"""Benchmarks: `python -m benchmarks NAME` prints JSON lines; see `benchmarks/README.md`."""
