"""Bytes of a generation: fetched in parallel, verified, and kept for the next readers."""
