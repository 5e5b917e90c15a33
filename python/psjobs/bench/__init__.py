"""Measures this package on this machine: `python -m psjobs.bench`."""
