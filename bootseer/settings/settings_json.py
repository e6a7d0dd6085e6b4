"""The settings as JSON, for the processes that a mount starts.

Settings are handed over through private files and pipes, never on a command line: a store's URL
may carry credentials.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bootseer.base.structs import asdict
from bootseer.settings.config import Settings

_PATHS = frozenset(("cache_dir", "run_dir", "timeline_dir", "registry_hosts_dir", "metrics_dir"))


def settings_to_json(settings: Settings) -> dict[str, Any]:
    """Only strings, numbers and null."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in asdict(settings).items()
    }


def settings_from_json(document: Mapping[str, Any]) -> Settings:
    """The inverse. The document is our own: what is wrong with it raises KeyError."""
    values: dict[str, Any] = {
        name: Path(value) if name in _PATHS and value is not None else value
        for name in Settings.__struct_fields__
        for value in (document[name],)
    }
    return Settings(**values)
