"""Measures halfmesh beside the loops that people write by hand, and beside other engines: `python -m benchmarks`."""
