"""Bytes of a generation: fetched in parallel, verified, and kept for those who come next."""
