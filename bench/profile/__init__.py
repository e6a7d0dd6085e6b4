"""Starts whose faults are known, to measure the profiler by."""
