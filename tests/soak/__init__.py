"""The soak: several users of one node start jobs, and processes, disks, stores and registries fail.

A program (`make soak`), not collected by pytest; `tests/soak/test_soak.py` runs a few rounds of it.
"""
