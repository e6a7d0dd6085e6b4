"""The node's folders that a process of this user may use: the folders that were set, or others.

Alone decides what is used instead of a folder that cannot be trusted (see `trust`), or made: a
start never fails because of that. Any thread.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bootseer.errors import PermissionDeniedError
from bootseer.linux.ownership import FOR_ALL_USERS, Owners, fault_of_folder, unwritable

_log = logging.getLogger(__name__)

TRUSTED = ("cache_dir", "run_dir", "timeline_dir", "registry_hosts_dir")
"""The settings whose folders decide what runs. What goes to `metrics_dir` is only written."""
_WRITTEN = frozenset(("cache_dir", "run_dir", "timeline_dir"))
# Jobs of several users write there, each in folders of its own.
_SHARED = frozenset(("timeline_dir",))
_OF_ROOT = {
    "cache_dir": "/var/cache/bootseer",
    "run_dir": "/run/bootseer",
    "timeline_dir": "/var/lib/bootseer/timeline",
    # Only where no store was named.
    "store_url": "/var/lib/bootseer/store",
}


def fault_of_setting(name: str, path: Path, owners: Owners) -> str:
    """Why the folder of the setting `name` must not be used; empty if it may be."""
    return fault_of_folder(path, owners, is_shared=name in _SHARED)


def _cannot_be_made(name: str, path: Path) -> str:
    """Why a folder that is missing remains so; empty where it is there, or can be made."""
    if name in _WRITTEN and not path.exists() and (there := unwritable(path)):
        return f"it is missing, and {there} is not for this user to write to"
    return ""


def trusted_folders(
    wanted: Mapping[str, Path], defaults: Mapping[str, Path], owners: Owners
) -> dict[str, Path]:
    """The folders of `wanted`, by setting, that are replaced, with a warning each.

    Raises: PermissionDeniedError where another user has taken all that could be used instead.
    """
    replaced: dict[str, Path] = {}
    for name, path in wanted.items():
        fault = fault_of_setting(name, path, owners)
        missing = "" if fault else _cannot_be_made(name, path)
        if not fault and not missing:
            continue
        for other in _others(name, path, defaults[name], owners):
            if not fault_of_setting(name, other, owners) and not _cannot_be_made(name, other):
                break
        else:
            if missing:
                continue  # The part of a start that needs it says so.
            raise PermissionDeniedError(
                f"the folder {path} of the setting {name} cannot be used: {fault}; name one of "
                "your own"
            )
        replaced[name] = other
        if fault.endswith(FOR_ALL_USERS) and other == _own_part(path):
            continue  # it is what such a folder is for
        hint = "; see trusted_owners in docs/operations.md" if fault else ""
        why = (fault or missing) + hint
        _log.warning("warning: %s %s is not used, but %s: %s", name, path, other, why)
    return replaced


def _own_part(path: Path) -> Path:
    """This user's folder in one that is for all users."""
    return path / f"bootseer-{os.geteuid()}"


def _others(name: str, path: Path, default: Path, owners: Owners) -> Iterator[Path]:
    own = _own_part(path)
    if not fault_of_folder(path, owners, is_shared=True):
        # Meant for all users (/scratch, mode 1777): each has a part of it.
        yield own
    yield default
    if name in _OF_ROOT:
        yield Path(_OF_ROOT[name]) if os.geteuid() == 0 else Path("/var/tmp", own.name, name)
    else:
        # Nothing is there, which is what most nodes have.
        yield Path("/etc/bootseer/none")
