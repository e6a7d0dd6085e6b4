"""Benchmarks of container images; each module declares one as `CASE`."""
