"""Calls to NameNodes by Hadoop's RPC."""
