"""Benchmarks: one declarative case per file, interleaved runs, ratios measured side by side.

Not part of the installed package: run `python -m bench --list` in a checkout.
"""
