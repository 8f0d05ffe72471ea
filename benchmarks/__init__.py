"""Benchmarks. Every ratio compares figures of one run; each module is a command: ``python -m benchmarks.mixed``."""
