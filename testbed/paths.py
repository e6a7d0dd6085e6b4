"""Where this checkout is."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
"""The folder of pyproject.toml."""
