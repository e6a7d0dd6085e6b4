"""Settings, from flags, `BOOTSEER_*` variables and `bootseer.toml`, in that order of strength.

The class `Settings` is the table of all settings: each field has its type, how its value is
written, its default and its help. Variables, flags, the file's names, `config` and the
reference (docs/cli.md) are made of it. Reading is pure but for `load_config`, which looks at the
environment, the login's folders, one file and the folders that are set. Settings are immutable.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msgspec import Struct, structs

from bootseer.base.display import closest_word
from bootseer.base.urls import absolute_url
from bootseer.errors import InvalidInputError
from bootseer.linux.ownership import parse_owners, unwritable_folder
from bootseer.settings.file import TRUSTED, read_config_file, trusted_folders
from bootseer.settings.values import (
    COUNT,
    FILE_OR_OFF,
    FOLDER,
    FOLDER_OR_OFF,
    LINGER,
    MAX_AGE,
    NAME,
    NAME_OR_NONE,
    PORT,
    SECONDS,
    SIZE,
    SWITCH,
    SettingKind,
    as_name,
    choice,
    switch,
)

_log = logging.getLogger(__name__)

_PREFIX = "BOOTSEER_"
FANOUT_KEY = _PREFIX + "FANOUT_KEY"
"""The variable with the secret of a job's nodes; no setting, since settings are shown."""
# Variables that are no settings; docs/launch.md and docs/snapshots.md explain them.
_OTHER_VARIABLES = frozenset(
    _PREFIX + name
    for name in (
        *("CONFIG", "CSI_SOURCE", "DISABLE", "IMAGE", "LAUNCHED", "PROCESS", "READY_SOCKETS"),
        *("FANOUT_KEY", "SPAWNER", "TIMELINE"),
    )
)
# Variables of tests and preloaders, and those that Kubernetes sets in every pod of a namespace with
# a service called bootseer.
_NOT_OURS = _PREFIX + r"(TEST_.*|REQUIRE_.*|PRELOAD.*|(.*_)?(SERVICE|PORT)(_.*)?)"
RECORD_MODES = ("auto", "always", "never")
RESTORE_MODES = ("auto", "mount", "link", "extract")
DEFAULT_JOB = "default"
"""Name of a job without a name of its own."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


# ---- the login -------------------------------------------------------------------------------


def _first(environ: Mapping[str, str], *names: str) -> str:
    """Return the value of the first of these variables that is set; "" if none is. Pure."""
    return next(filter(None, map(environ.get, names)), "")


def launcher_rank(environ: Mapping[str, str]) -> str:
    """Return the rank, as text, of a launcher with these variables; "" if none names one.

    The setting wins over the scheduler's variables. Programs that record a stage for a launcher
    (the daemons of a node, the report's own view of a pod) must agree with it on the rank. Pure.
    """
    return _first(environ, "BOOTSEER_RANK", *_RANKS)


class _Login(Struct, dict=True):
    """Environment of a start: folders of the login, and variables of the scheduler."""

    environ: Mapping[str, str]

    @cached_property
    def home(self) -> Path:
        """Home of the login, or a folder that the user can write to instead."""
        # A pod's user often has a number only, and / as HOME.
        named = Path(self.environ.get("HOME") or "/").absolute()
        if unwritable_folder(named):
            for folder in ("/var/tmp", self.environ.get("TMPDIR") or "/tmp"):
                if not unwritable_folder(Path(folder)):
                    return Path(folder) / f"bootseer-{os.geteuid()}"
        return named

    def folder(self, variable: str, below_home: str) -> Path:
        """Return Bootseer's folder of a kind in the XDG Base Directory Specification."""
        return Path(self.environ.get(variable) or self.home / below_home) / "bootseer"

    @property
    def cache(self) -> Path:
        """Bootseer's folder for data that can be fetched again."""
        return self.folder("XDG_CACHE_HOME", ".cache")

    @property
    def run(self) -> Path:
        """Bootseer's folder for sockets.

        In the login's XDG_RUNTIME_DIR, if that belongs to this user: `su` and `sudo -E` keep the
        variable of another user, who could change the folder and whose logout removes it.
        """
        named = self.environ.get("XDG_RUNTIME_DIR")
        try:
            if named and os.stat(named).st_uid == os.geteuid():
                return Path(named) / "bootseer"
        except OSError:
            pass
        return Path("/run/bootseer") if os.geteuid() == 0 else self.cache / "run"

    @property
    def submission(self) -> str:
        """Id that the scheduler gives this submission, the same on all of its nodes.

        Each task of an array is a submission, as is a heterogeneous job with all its components.
        (torchrun's id is "none" where none was given.)
        """
        if task := self.environ.get("SLURM_ARRAY_TASK_ID"):
            return f"{_first(self.environ, 'SLURM_ARRAY_JOB_ID', 'SLURM_JOB_ID')}_{task}"
        return _first(self.environ, "SLURM_HET_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")

    def first_of(self, *variables: str) -> str:
        """Return the value of the first of these variables that is set; "" if none is."""
        return _first(self.environ, *variables)


# ---- the table --------------------------------------------------------------------------------


class Setting(Struct, frozen=True):
    """Row of the table of settings: how a value is written, its default, its help."""

    kind: SettingKind
    default: str | Callable[[_Login], str]
    help: str
    default_help: str = ""
    """Default in words, if it differs between logins, nodes or starts."""


def _setting(*row: Any, **rest: Any) -> Any:
    """Return a row of the table as the default of a field; `Settings` is made with all fields."""
    return Setting(*row, **rest)


def _owners(text: str) -> str:
    parse_owners(text)
    return text


_OF_USER = "a folder of the user's"
_OF_SCHEDULER = "what the scheduler says; "


class Settings(Struct, frozen=True):
    """Settings of one command of Bootseer."""

    store_url: str = _setting(
        SettingKind("URL", absolute_url),
        lambda login: (login.folder("XDG_DATA_HOME", ".local/share") / "store").as_uri(),
        "The shared store (any fsspec URL).",
        _OF_USER,
    )
    cache_dir: Path = _setting(
        FOLDER, lambda login: str(login.cache), "This node's cache.", _OF_USER
    )
    run_dir: Path = _setting(
        FOLDER,
        lambda login: str(login.run),
        "Sockets, locks and state of running mounts; best on tmpfs.",
        "`/run/bootseer` for root's services, else a folder of the login's",
    )
    timeline_dir: Path = _setting(
        FOLDER,
        lambda login: str(login.folder("XDG_STATE_HOME", ".local/state") / "timeline"),
        "Folder of timelines.",
        _OF_USER,
    )
    job: str = _setting(
        NAME,
        lambda login: as_name(login.first_of("SLURM_JOB_NAME", "JOB_NAME")) or DEFAULT_JOB,
        "The job's name, the same on every node and at every attempt.",
        f"{_OF_SCHEDULER}`{DEFAULT_JOB}`",
    )
    submission: str = _setting(
        NAME_OR_NONE,
        lambda login: as_name(login.submission) or "none",
        "Identity of a submission of the job; the same on every node.",
        f"{_OF_SCHEDULER}`none`",
    )
    attempt: int = _setting(
        COUNT,
        lambda login: login.first_of("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT") or "0",
        "Number of the start within the submission, from 0.",
        f"{_OF_SCHEDULER}`0`",
    )
    node: str = _setting(
        NAME,
        lambda _: as_name(os.uname().nodename) or "node",
        "Name of this node.",
        "the host's name",
    )
    rank: int = _setting(
        COUNT,
        lambda login: login.first_of(*_RANKS) or "0",
        "This launcher's number among those of the start.",
        f"{_OF_SCHEDULER}`0`",
    )
    workload: str = _setting(
        NAME,
        "default",
        "Name of the record of a start's reads: one image may have several workloads.",
    )
    deadline_s: float = _setting(
        SECONDS,
        "60",
        "Longest single wait, and limit for the sum of a start's waits without success; a start "
        "waits up to 6 s, or a twelfth of this if that is more, for its store's first answer.",
    )
    cache_limit_bytes: int = _setting(SIZE, "100GB", "Limit for the node's cache.")
    memory_bytes: int = _setting(SIZE, "512MiB", "Memory limit of a checkpoint mount.")
    # With this default a thousand nodes read at most 5 GB/s from the store.
    fill_bytes_per_s: int = _setting(
        SIZE, "5MB", "Rate at which the rest of a started image is fetched; 0: it is not fetched."
    )
    record: str = _setting(
        choice(RECORD_MODES, "way to record"),
        "auto",
        "Whether a start's reads of an image are recorded; auto: if no bundle fits them well.",
    )
    record_window_s: float = _setting(
        SECONDS, "120", "Time after which a record ends if ready() was not called."
    )
    prefetch: bool = _setting(
        SWITCH, "on", "Whether the pages of an image that earlier starts read are fetched ahead."
    )
    metrics_dir: Path | None = _setting(
        FOLDER_OR_OFF, "off", "Folder for Prometheus figures, read by node-exporter."
    )
    auto_index: bool = _setting(
        SWITCH, "on", "Whether a pulled image is published for later starts."
    )
    copy_layers: bool = _setting(
        SWITCH,
        "on",
        "Whether an image's layers are copied to the store; off: nodes read layers of a registry "
        "from the registry, by seek points.",
    )
    publish_timelines: bool = _setting(
        SWITCH, "on", "Whether a node puts the timeline of its start into the store."
    )
    trace_python: bool = _setting(
        SWITCH,
        "on",
        "Whether a job's Python processes record their imports and stages until they are ready.",
    )
    keep_caches: bool = _setting(
        switch("auto"), "auto", "Whether caches that frameworks name by variables are kept."
    )
    keep_limit_bytes: int = _setting(
        SIZE, "4GB", "Size limit of a kept cache; the least recently used files are removed first."
    )
    preload_limit_bytes: int = _setting(
        SIZE, "8GB", "Memory limit of a preloader (`--preload`), which gives up beyond it."
    )
    linger_s: float = _setting(
        LINGER, "off", "Time for which a start's mounts stay after its job, for the next start."
    )
    fanout: bool = _setting(
        switch("auto"),
        "auto",
        "Whether the nodes of a job feed each other; auto: from four known nodes on.",
    )
    fanout_hosts: str = _setting(
        SettingKind("HOSTS|FILE|auto", str),
        "auto",
        "Nodes of the job, such as `node[01-16],login`, or a file with their names.",
        "`auto`: the scheduler's list",
    )
    fanout_port: int = _setting(
        PORT,
        "auto",
        "Port of fan-out, the same on all nodes.",
        "`auto`: one from 27000 to 27999, by job, submission and attempt",
    )
    fanout_key_file: Path | None = _setting(
        FILE_OR_OFF, "off", "File with the shared key of fan-out: 64 hexadecimal digits; mode 0600."
    )
    registry_hosts_dir: Path = _setting(
        FOLDER,
        "/etc/containerd/certs.d",
        "Folder with mirrors of registries, in containerd's format (hosts.toml).",
    )
    snapshot_max_age_s: float = _setting(
        MAX_AGE,
        "auto",
        "Age beyond which a snapshot is made again; auto: a week, if its set-up may change.",
    )
    restore_mode: str = _setting(
        choice(RESTORE_MODES, "restore mode"), "auto", "How snapshots are put in place."
    )
    restore_privileges: bool = _setting(
        SWITCH, "off", "Whether set-ID bits and file capabilities of snapshots are restored."
    )
    trusted_owners: str = _setting(
        SettingKind("USERS", _owners),
        "root",
        "Users whose folders are trusted, besides this user and root.",
    )


TABLE: Mapping[str, Setting] = dict(
    zip(Settings.__struct_fields__, Settings.__struct_defaults__, strict=True)
)
"""Rows of all settings, by the name of their field."""


def short_name(setting: str) -> str:
    """Return the name of a setting in the file, which has no unit: `store` of `store_url`."""
    return re.sub(r"_(url|bytes_per_s|s|bytes)$", "", setting)


def variable_of(setting: str) -> str:
    """Return the environment variable of a setting: BOOTSEER_STORE for `store_url`."""
    return _PREFIX + short_name(setting).upper()


def assignment(text: str) -> tuple[str, str]:
    """Return field and value of "NAME=VALUE", where NAME is a setting as the file has it.

    Raises: InvalidInputError.
    """
    key, _, value = text.partition("=")
    names = {short_name(name): name for name in TABLE}
    name = names.get(key.replace("-", "_"), key)
    if name not in TABLE:
        close = closest_word(key, names)
        hint = f"is {close} meant?" if close else "`bootseer config` lists those there are"
        raise InvalidInputError(f"--set {key}: there is no such setting; {hint}")
    if not value:
        raise InvalidInputError(f"--set {key}: write --set {key}=VALUE")
    return name, value


def default_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the default of each setting, as text."""
    login = _Login(environ)
    return {
        name: one.default if isinstance(one.default, str) else one.default(login)
        for name, one in TABLE.items()
    }


def is_default_store(settings: Settings) -> bool:
    """Return whether the store is the user's default folder, which no other node sees."""
    return settings.store_url == default_settings(os.environ)["store_url"]


# ---- reading ----------------------------------------------------------------------------------


class Config(Struct, frozen=True):
    """Settings and, for each, where its value came from."""

    settings: Settings
    sources: Mapping[str, str]
    overridden: Mapping[str, str]
    """Values of the configuration file that a variable overrides."""


def resolve(
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    file: Mapping[str, str],
    file_name: str,
    defaults: Mapping[str, str],
) -> Config:
    """Return the strongest value of each setting, parsed. Pure. Raises: InvalidInputError."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    overridden: dict[str, str] = {}
    for name, setting in TABLE.items():
        variable = variable_of(name)
        for source, text in (
            ("flag", flags.get(name)),
            (f"variable {variable}", environ.get(variable)),
            (file_name, file.get(name)),
            ("default", defaults[name]),
        ):
            if text:
                try:
                    values[name] = setting.kind.parse(text)
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
    """Return the settings of this process, and their sources.

    Args:
        flags: Values by field, as text; None or "" stands for no value.
        environ: Variables in place of this process's own.
        checks_folders: Whether folders that cannot be trusted are replaced, with a warning. A check
            of a folder on a dead file system hangs.

    Raises: BootseerError.
    """
    environ = os.environ if environ is None else environ
    flags = flags or {}
    short_names = {short_name(name): name for name in TABLE}
    # Only the environment can name the users whose configuration file is trusted.
    owners = parse_owners(environ.get(variable_of("trusted_owners"), ""))
    path, file = read_config_file(environ, owners, short_names)
    defaults = default_settings(environ)
    config = resolve(flags, environ, file, path, defaults)
    _warn_of_unknown(environ)
    return _with_trusted_folders(config, defaults) if checks_folders else config


def _with_trusted_folders(config: Config, defaults: Mapping[str, str]) -> Config:
    settings = config.settings
    wanted: dict[str, Path] = {name: getattr(settings, name) for name in TRUSTED}
    chosen = {name: FOLDER.parse(defaults[name]) for name in TRUSTED}
    if config.sources["store_url"] == "default":
        # The owner of a store decides what runs. A store that was named is trusted, as a registry
        # is.
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
    """Warn of variables that look like misspelt settings."""
    known = set(map(variable_of, TABLE)) | _OTHER_VARIABLES
    for name in environ:
        if name.startswith(_PREFIX) and name not in known and not re.fullmatch(_NOT_OURS, name):
            # Compared without the prefix, which makes all names similar.
            close = closest_word(name[len(_PREFIX) :], [one[len(_PREFIX) :] for one in known])
            _warn_of(name, close and _PREFIX + close)


@functools.cache  # once in a process
def _warn_of(name: str, close: str) -> None:
    # The message has no value, which may be a secret.
    hint = f"; is {close} meant?" if close else "; `bootseer config` lists those there are"
    _log.warning("warning: the variable %s is unknown%s", name, hint)


def load_settings(flags: Mapping[str, str | None] | None = None) -> Settings:
    """Return the settings of this process; see `load_config`."""
    return load_config(flags).settings
