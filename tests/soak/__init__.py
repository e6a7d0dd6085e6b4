"""Soak test: several users of one node start jobs while processes, disks and servers fail.

A program (`make soak`), not collected by pytest; `tests/soak/test_soak.py` tests its state.
"""
