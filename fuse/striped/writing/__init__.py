"""Bytes of a new generation: gathered into units, and stored in parallel past failures."""
