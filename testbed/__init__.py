"""Servers and machines for tests and benchmarks. Imports neither of them."""
