"""Settings: from flags, `BOOTSEER_*` variables and `bootseer.toml`, in that order of strength.

Owns the list of settings, their defaults and where each value came from. Reading is pure but for
`load_settings`, which looks at the environment and at one file. Settings are immutable.
"""

import os
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from bootseer.errors import InvalidInputError, from_oserror

RESTORE_MODES = ("auto", "mount", "link", "extract", "hardlink")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
# What a file offset can hold.
_SIZE_LIMIT_BYTES = 2**63
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_AGE_UNITS_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_AGE_MAX_S = 100 * 365 * 86_400
# Names that become file names or parts of store keys.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Settings(Struct, frozen=True):
    """What one command of Bootseer works with."""

    store_url: str
    """The shared store: any fsspec URL."""
    cache_dir: Path
    """This node's cache of image data and snapshots."""
    run_dir: Path
    """Sockets, locks and state of running mounts; on tmpfs where there is one."""
    timeline_dir: Path
    """Where each start's timeline is written."""
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
    """At what rate the rest of a started image is fetched in the background; 0: it is not."""
    metrics_dir: Path | None
    """Where images' figures are written for Prometheus; None: nowhere."""
    auto_index: bool
    """Whether an image that had to be pulled is published in the background, for later starts."""
    registry_hosts_dir: Path
    """Mirrors of registries: a folder with `HOST/hosts.toml`, as containerd reads it."""
    snapshot_max_age_s: float
    """An older snapshot is made anew by the set-up that would use it; 0: none is too old."""
    restore_mode: str
    """How snapshots are put in place: one of `RESTORE_MODES`."""


class Config(Struct, frozen=True):
    """Settings and, for each, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def parse_size(text: str) -> int:
    """Bytes from "512", "64MiB", "1.5 GB". Raises: InvalidInputError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidInputError(f"{text!r} is not a size; write for example 512MiB or 20GB")
    unit = (match[2] or "").lower()
    size_bytes = float(match[1]) * (_BINARY_UNITS.get(unit) or _UNITS[unit])
    if size_bytes >= _SIZE_LIMIT_BYTES:
        raise InvalidInputError(f"{text!r} is more than any disk holds; write for example 20GB")
    return int(size_bytes)


def parse_age(text: str) -> float:
    """Seconds from "7d", "12h", "30m", "2w" or "3600"; 0 from "off". Raises: InvalidInputError."""
    if text == "off":
        return 0.0
    match = _AGE.fullmatch(text.strip().lower())
    seconds = float(match[1]) * _AGE_UNITS_S[match[2]] if match else -1.0
    if not 0 <= seconds <= _AGE_MAX_S:
        raise InvalidInputError(f"{text!r} is not an age; write for example 12h, 7d, 4w or off")
    return seconds


def parse_name(text: str) -> str:
    """`text`, when it can be part of a file name or key. Raises: InvalidInputError."""
    if not _NAME.fullmatch(text):
        raise InvalidInputError(
            f"{text!r} is not a usable name; use letters, digits, '.', '_' and '-', at most 128"
        )
    return text


def _as_name(text: str) -> str:
    """What a scheduler calls something, as `parse_name` wants it; may be empty. Pure."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:128]


def _name_or_none(text: str) -> str:
    return "" if text == "none" else parse_name(text)


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InvalidInputError(f"{text!r} is not a whole number") from None
    if value < 0:
        raise InvalidInputError(f"{text!r} is negative")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InvalidInputError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < 86_400:
        raise InvalidInputError(f"{text!r} is not more than 0 and less than 86400 seconds")
    return value


def absolute_url(text: str) -> str:
    """`text`, made absolute where it is a bare path: servers have another working directory."""
    return text if "://" in text or not text else str(_path(text))


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _switch(text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidInputError(f"{text!r} is neither on nor off")
    return text == "on"


def _path_or_off(text: str) -> Path | None:
    return None if text == "off" else _path(text)


def _restore_mode(text: str) -> str:
    if text not in RESTORE_MODES:
        raise InvalidInputError(f"{text!r} is no restore mode; use {', '.join(RESTORE_MODES)}")
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
    "registry_hosts_dir": _path,
    "snapshot_max_age_s": parse_age,
    "restore_mode": _restore_mode,
}


def variable_of(setting: str) -> str:
    """The environment variable of a setting: `store_url` is read from BOOTSEER_STORE."""
    short = re.sub(r"_(url|bytes_per_s|s|bytes)$", "", setting)
    return "BOOTSEER_" + short.upper()


def _own_runtime_dir(environ: Mapping[str, str]) -> Path | None:
    """The login's folder for sockets, if it is this user's. `su` and `sudo -E` keep the variable of
    whoever was logged in, who could then do with it as they like, and whose logout removes it."""
    named = environ.get("XDG_RUNTIME_DIR")
    try:
        if named and os.stat(named).st_uid == os.geteuid():
            return Path(named)
    except OSError:
        pass
    return None


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that says something; empty where none does. Pure."""
    return next(filter(None, map(environ.get, names)), "")


def _submission(environ: Mapping[str, str]) -> str:
    """The scheduler's id of this submission, the same on all of its nodes. Pure.

    Each task of an array is a submission, as is a heterogeneous job with all its components.
    (torchrun's id is "none" where nobody gave one.)
    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if task:
        return f"{_first(environ, 'SLURM_ARRAY_JOB_ID', 'SLURM_JOB_ID')}_{task}"
    return _first(environ, "SLURM_HET_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


def _defaults(environ: Mapping[str, str]) -> dict[str, str]:
    home = Path(environ.get("HOME") or "/")
    cache = Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "bootseer"
    data = Path(environ.get("XDG_DATA_HOME") or home / ".local/share") / "bootseer"
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local/state") / "bootseer"
    runtime = _own_runtime_dir(environ)
    if runtime is not None:
        run = runtime / "bootseer"
    else:
        run = Path("/run/bootseer") if os.geteuid() == 0 else cache / "run"
    return {
        "store_url": (data / "store").as_uri(),
        "cache_dir": str(cache),
        "run_dir": str(run),
        "timeline_dir": str(state / "timeline"),
        "job": _as_name(_first(environ, "SLURM_JOB_NAME", "JOB_NAME")) or "default",
        "submission": _as_name(_submission(environ)) or "none",
        "attempt": _first(environ, "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT") or "0",
        "node": _as_name(socket.gethostname()) or "node",
        "rank": _first(environ, "RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX") or "0",
        "workload": "default",
        "deadline_s": "60",
        "cache_limit_bytes": "100GB",
        "memory_bytes": "512MiB",
        # A thousand nodes then ask 5 GB/s of the store at most.
        "fill_bytes_per_s": "5MB",
        "metrics_dir": "off",
        "auto_index": "on",
        "registry_hosts_dir": "/etc/containerd/certs.d",
        "snapshot_max_age_s": "off",
        "restore_mode": "auto",
    }


def _config_file(environ: Mapping[str, str]) -> Path | None:
    explicit = environ.get("BOOTSEER_CONFIG")
    if explicit:
        return Path(explicit)
    home = Path(environ.get("HOME") or "/")
    config_home = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    candidates = (
        Path("bootseer.toml"),
        config_home / "bootseer" / "bootseer.toml",
        Path("/etc/bootseer/bootseer.toml"),
    )
    return next((path for path in candidates if path.is_file()), None)


def _read_file(path: Path) -> dict[str, str]:
    # Here: most nodes have no file, and every command loads this module.
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise from_oserror(error, f"read the configuration {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from error
    short_names = {variable_of(name).removeprefix("BOOTSEER_").lower(): name for name in _PARSERS}
    values: dict[str, str] = {}
    for key, value in table.items():
        name = short_names.get(key, key)
        if name not in _PARSERS:
            known = ", ".join(sorted(short_names))
            raise InvalidInputError(f"{path}: unknown setting {key!r}; known are {known}")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise InvalidInputError(f"{path}: {key} must be a string or a number")
        values[name] = str(value)
    return values


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
                break
    return Config(Settings(**values), sources)


def load_config(
    flags: Mapping[str, str | None] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Settings as this process sees them, and their sources."""
    environ = os.environ if environ is None else environ
    path = _config_file(environ)
    file = _read_file(path) if path else {}
    return resolve(flags or {}, environ, file, str(path or ""), _defaults(environ))


def load_settings(flags: Mapping[str, str | None] | None = None) -> Settings:
    """`load_config` without the sources."""
    return load_config(flags).settings
