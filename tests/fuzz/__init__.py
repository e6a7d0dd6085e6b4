"""Every parser of bytes that come from a disk or a network, with mutations of valid documents.

Bounded in `make test`, longer in `make fuzz`; `python -m tests.fuzz TARGET FILE` replays an input.
"""
