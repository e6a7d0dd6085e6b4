"""Blocks read from and written to DataNodes by Hadoop's data transfer protocol."""
