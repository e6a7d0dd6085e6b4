"""Fuzzing of every parser of bytes from disks and networks, by mutations of valid documents.

Bounded in `make test`, longer in `make fuzz`; `python -m tests.fuzz TARGET FILE` replays an input.
"""
