"""The settings as JSON, for the processes that a mount starts.

Settings are handed over through private files and pipes, never on a command line: a store's URL
may carry credentials.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bootseer.config import Settings

_PATHS = frozenset(("cache_dir", "run_dir", "timeline_dir", "registry_hosts_dir"))


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Only strings and numbers."""
    return {
        name: str(value) if name in _PATHS else value for name, value in asdict(settings).items()
    }


def settings_from_json(document: Mapping[str, Any]) -> Settings:
    """The inverse. The document is our own: what is wrong with it raises KeyError."""
    values: dict[str, Any] = {
        field.name: Path(document[field.name]) if field.name in _PATHS else document[field.name]
        for field in fields(Settings)
    }
    return Settings(**values)
