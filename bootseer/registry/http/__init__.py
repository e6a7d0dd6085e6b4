"""Requests to registries: connections, addresses that may be reached, attempts."""
