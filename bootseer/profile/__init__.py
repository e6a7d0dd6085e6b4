"""The profiler of starts: one start of a job as a graph over all its nodes, and what it says.

`model` is pure: timelines in, answers out. `generate` makes starts whose faults are known.
"""
