"""A start as a graph of events, its clocks, its replay and the questions put to it. Pure (no
I/O)."""
