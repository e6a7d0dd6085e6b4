"""Benchmarks: one declarative case per file, interleaved runs, ratios measured side by side.

Not part of the installed package: `python -m bench --list` in a checkout lists the cases. Hides how
cases are run, summed up and shown. It may import `testbed` and the product, but not `tests`.
"""
