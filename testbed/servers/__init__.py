"""Servers on loopback for tests: registries, S3, collectors, and servers that fail on purpose."""
