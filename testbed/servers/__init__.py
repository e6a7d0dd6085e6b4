"""Servers on loopback: registries, S3, collectors, and ones that fail on purpose."""
