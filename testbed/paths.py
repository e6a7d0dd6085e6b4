"""Path of this checkout."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
"""Folder that holds pyproject.toml."""
