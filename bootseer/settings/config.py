"""Settings: from flags, `BOOTSEER_*` variables and `bootseer.toml`, in that order of strength.

Owns the list of settings, their defaults and where each value came from. Reading is pure but for
`load_config`, which looks at the environment, at one file and at the folders that are set. Settings
are immutable.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msgspec import Struct, structs

from bootseer.base.shown import nearest
from bootseer.base.urls import absolute_url
from bootseer.errors import InvalidInputError
from bootseer.linux.ownership import parse_owners
from bootseer.settings.config_file import read_config_file
from bootseer.settings.default_settings import default_settings
from bootseer.settings.trusted_folders import TRUSTED, trusted_folders
from bootseer.settings.values import (
    parse_duration,
    parse_max_age,
    parse_name,
    parse_size,
)

_log = logging.getLogger(__name__)

_PREFIX = "BOOTSEER_"
# Those that are no settings: docs/launch.md and docs/snapshots.md say what each is.
_OTHER_VARIABLES = frozenset(
    _PREFIX + name
    for name in (
        *("CONFIG", "CSI_SOURCE", "DISABLE", "IMAGE", "LAUNCHED", "PROCESS", "READY_SOCKETS"),
        *("SPAWNER", "TIMELINE"),
    )
)
# Of tests and preloaders; and what Kubernetes gives every pod beside a service called bootseer.
_NOT_OURS = re.compile(_PREFIX + r"(TEST_.*|REQUIRE_.*|PRELOAD.*|(.*_)?(SERVICE|PORT)(_.*)?)")
RESTORE_MODES = ("auto", "mount", "link", "extract", "hardlink")


class Settings(Struct, frozen=True):
    """What one command of Bootseer works with."""

    store_url: str
    """The shared store: any fsspec URL."""
    cache_dir: Path
    """This node's cache of image data and snapshots."""
    run_dir: Path
    """Sockets, locks and state of running mounts; on tmpfs where there is one."""
    timeline_dir: Path
    """The folder in which each start's timeline is written."""
    job: str
    """The job's name: the same on every node and at every attempt."""
    submission: str
    """Tells two submissions of one job apart: the scheduler's id, the same on every node; empty
    where nothing says it."""
    attempt: int
    """Which start of the submission this is, from 0."""
    node: str
    rank: int
    workload: str
    """Names the record of what a start touches, so that one image serves several workloads."""
    deadline_s: float
    """No single wait for a server or another node is longer than this."""
    cache_limit_bytes: int
    """The node's cache is kept below this."""
    memory_bytes: int
    """What one checkpoint mount may hold in memory."""
    fill_bytes_per_s: int
    """The rate at which the rest of a started image is fetched in the background; 0: it is not."""
    metrics_dir: Path | None
    """The folder of images' figures for Prometheus; None: they are not written."""
    auto_index: bool
    """Whether an image that had to be pulled is published in the background, for later starts."""
    publish_timelines: bool
    """Whether a node puts the timeline of its start into the store."""
    trace_python: bool
    """Whether the Python processes of a job note what they do until they are ready."""
    keep_caches: bool
    """Whether the caches that frameworks name by variables are kept between starts."""
    keep_limit_bytes: int
    """What one kept cache may hold; what was not used for longest goes first."""
    preload_limit_bytes: int
    """The memory of a process that imports modules ahead (`--preload`); it gives up beyond that."""
    linger_s: float
    """How long what a start has mounted stays after its job, for the next start; 0: not at all."""
    registry_hosts_dir: Path
    """Mirrors of registries: a folder with `HOST/hosts.toml`, as containerd reads it."""
    snapshot_max_age_s: float
    """An older snapshot is made anew by the set-up that would use it; 0: none is too old;
    AUTOMATIC_AGE_S: a week where what the set-up gets may change without notice."""
    restore_mode: str
    """How snapshots are put in place: one of `RESTORE_MODES`."""
    restore_privileges: bool
    """Whether set-user-ID and set-group-ID bits and file capabilities of snapshots are restored."""
    trusted_owners: str
    """Whose folders and configuration are trusted besides ours and root's; see `trust`."""


class Config(Struct, frozen=True):
    """Settings and, for each, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]
    overridden: Mapping[str, str]
    """What the configuration file says otherwise, where a variable is stronger."""


def _name_or_none(text: str) -> str:
    return "" if text == "none" else parse_name(text)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InvalidInputError(f"{text!r} is not a whole number") from None
    if not 0 <= value < 2**31:
        raise InvalidInputError(f"{text!r} is not from 0 to {2**31 - 1}")
    return value


def _seconds(text: str) -> float:
    value = parse_duration(text)
    if not 0 < value < 86_400:
        raise InvalidInputError(f"{text!r} is not more than 0 and less than 86400 seconds")
    return value


def parse_linger(text: str) -> float:
    """Seconds from "10m", less than a day; 0 from "off". Raises: InvalidInputError."""
    return 0.0 if text in ("off", "0") else _seconds(text)


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _switch(text: str, on: str = "on") -> bool:
    if text not in (on, "off"):
        raise InvalidInputError(f"{text!r} is neither {on} nor off")
    return text == on


def _path_or_off(text: str) -> Path | None:
    return None if text == "off" else _path(text)


def _restore_mode(text: str) -> str:
    if text not in RESTORE_MODES:
        raise InvalidInputError(f"{text!r} is no restore mode; use {', '.join(RESTORE_MODES)}")
    return text


def _owners(text: str) -> str:
    parse_owners(text)
    return text


_PARSERS: dict[str, Callable[[str], Any]] = {
    "store_url": absolute_url,
    "cache_dir": _path,
    "run_dir": _path,
    "timeline_dir": _path,
    "job": parse_name,
    "submission": _name_or_none,
    "attempt": _count,
    "node": parse_name,
    "rank": _count,
    "workload": parse_name,
    "deadline_s": _seconds,
    "cache_limit_bytes": parse_size,
    "memory_bytes": parse_size,
    "fill_bytes_per_s": parse_size,
    "metrics_dir": _path_or_off,
    "auto_index": _switch,
    "publish_timelines": _switch,
    "trace_python": _switch,
    "keep_caches": functools.partial(_switch, on="auto"),
    "keep_limit_bytes": parse_size,
    "preload_limit_bytes": parse_size,
    "linger_s": parse_linger,
    "registry_hosts_dir": _path,
    "snapshot_max_age_s": parse_max_age,
    "restore_mode": _restore_mode,
    "restore_privileges": _switch,
    "trusted_owners": _owners,
}


def variable_of(setting: str) -> str:
    """The environment variable of a setting: `store_url` is read from BOOTSEER_STORE."""
    return _PREFIX + _short(setting).upper()


def _short(setting: str) -> str:
    return re.sub(r"_(url|bytes_per_s|s|bytes)$", "", setting)


def resolve(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Mapping[str, str],
    file_name: str,
    defaults: Mapping[str, str],
) -> Config:
    """The strongest value of each setting, parsed. Pure. Raises: InvalidInputError."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    overridden: dict[str, str] = {}
    for name in Settings.__struct_fields__:
        variable = variable_of(name)
        for source, text in (
            ("flag", flags.get(name)),
            (f"variable {variable}", environ.get(variable)),
            (file_name, file.get(name)),
            ("default", defaults[name]),
        ):
            if text:
                try:
                    values[name] = _PARSERS[name](text)
                except InvalidInputError as error:
                    raise InvalidInputError(f"{name} ({source}): {error}") from error
                sources[name] = source
                if source.startswith("variable") and file.get(name, text) != text:
                    overridden[name] = file[name]
                break
    return Config(Settings(**values), sources, overridden)


def load_config(
    flags: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    checks_folders: bool = True,
) -> Config:
    """Settings as this process sees them, and their sources. Folders that cannot be trusted are
    replaced, with a warning, unless not `checks_folders`: a dead file system hangs who looks.

    Raises: BootseerError.
    """
    environ = os.environ if environ is None else environ
    flags = flags or {}
    short_names = {_short(name): name for name in _PARSERS}
    # Only the environment can say whose file is believed.
    owners = parse_owners(environ.get(variable_of("trusted_owners"), ""))
    path, file = read_config_file(environ, owners, short_names)
    defaults = default_settings(environ)
    config = resolve(flags, environ, file, path, defaults)
    _warn_of_unknown(environ)
    return _with_trusted_folders(config, defaults) if checks_folders else config


def _with_trusted_folders(config: Config, defaults: Mapping[str, str]) -> Config:
    settings = config.settings
    wanted: dict[str, Path] = {name: getattr(settings, name) for name in TRUSTED}
    chosen = {name: _path(defaults[name]) for name in TRUSTED}
    if config.sources["store_url"] == "default":
        # The owner of a store decides what runs. One that was named is believed, as a registry is.
        store = Path(unquote(settings.store_url.removeprefix("file://")))
        wanted["store_url"] = chosen["store_url"] = store
    folders = trusted_folders(wanted, chosen, parse_owners(settings.trusted_owners))
    if not folders:
        return config
    sources = {name: f"instead of {wanted[name]}" for name in folders}
    replaced: dict[str, Path | str] = {**folders}
    if "store_url" in folders:
        replaced["store_url"] = folders["store_url"].as_uri()
    return structs.replace(
        config,
        settings=structs.replace(settings, **replaced),
        sources={**config.sources, **sources},
    )


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    """A misspelt variable is not left out in silence."""
    known = {variable_of(name) for name in _PARSERS} | _OTHER_VARIABLES
    for name in environ:
        if name.startswith(_PREFIX) and name not in known and not _NOT_OURS.fullmatch(name):
            # The prefix, which all have, makes none of them alike.
            close = nearest(name[len(_PREFIX) :], [one[len(_PREFIX) :] for one in known])
            _warn_of(name, close and _PREFIX + close)


@functools.cache  # once in a process
def _warn_of(name: str, close: str) -> None:
    # Without its value, which may be a secret.
    hint = f"; is {close} meant?" if close else "; `bootseer config show` lists those there are"
    _log.warning("warning: the variable %s is unknown%s", name, hint)


def load_settings(flags: Mapping[str, str | None] | None = None) -> Settings:
    """`load_config` without the sources."""
    return load_config(flags).settings
