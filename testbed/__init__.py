"""Servers and machines for tests and benchmarks.

Hides how HDFS, registries, S3, containerd, Kubernetes and Slurm are started, broken and removed on
one machine. Public names: those of its modules without a leading underscore. It may import the
product's doors (tests/doors.txt), and neither `tests`, `bench` nor pytest.
"""
