"""Holding a mount while its worker processes come and go."""
