"""Bootseer cuts the start-up time of large training jobs."""

__version__ = "0.1.0"
