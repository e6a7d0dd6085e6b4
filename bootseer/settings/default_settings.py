"""The default of every setting: for this user, this node and this job.

Looks at the host's name and at the login's folders. Any thread.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from bootseer.linux.ownership import unwritable
from bootseer.settings.values import as_name


def _own_runtime_dir(environ: Mapping[str, str]) -> Path | None:
    """The login's folder for sockets, if it is this user's. `su` and `sudo -E` keep the variable of
    a user who was logged in, who could then do with it as they like, and whose logout removes
    it."""
    named = environ.get("XDG_RUNTIME_DIR")
    try:
        if named and os.stat(named).st_uid == os.geteuid():
            return Path(named)
    except OSError:
        pass
    return None


def _home(environ: Mapping[str, str]) -> Path:
    """The login's folder, or one instead where the user cannot write to it: a pod's user often has
    a number only, whose HOME is /."""
    named = Path(environ.get("HOME") or "/").absolute()
    if unwritable(named):
        for folder in ("/var/tmp", environ.get("TMPDIR") or "/tmp"):
            if not unwritable(Path(folder)):
                return Path(folder) / f"bootseer-{os.geteuid()}"
    return named


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that says something; empty where none does. Pure."""
    return next(filter(None, map(environ.get, names)), "")


def _submission(environ: Mapping[str, str]) -> str:
    """The scheduler's id of this submission, the same on all of its nodes. Pure.

    Each task of an array is a submission, as is a heterogeneous job with all its components.
    (torchrun's id is "none" where none was given.)
    """
    task = environ.get("SLURM_ARRAY_TASK_ID")
    if task:
        return f"{_first(environ, 'SLURM_ARRAY_JOB_ID', 'SLURM_JOB_ID')}_{task}"
    return _first(environ, "SLURM_HET_JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


DEFAULT_JOB = "default"
"""The name of a job that nobody has named."""
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def launcher_rank(environ: Mapping[str, str]) -> str:
    """Return the rank, as text, that a launcher with these variables has; "" if none tells one.

    The setting wins over what schedulers say. Whatever notes a stage beside a launcher (the
    daemons of a node, the report's own view of a pod) must agree with the launcher. Pure.
    """
    return _first(environ, "BOOTSEER_RANK", *_RANKS)


def default_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Each setting's value, as text, where nothing else says one."""
    home = _home(environ)
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
        "job": as_name(_first(environ, "SLURM_JOB_NAME", "JOB_NAME")) or DEFAULT_JOB,
        "submission": as_name(_submission(environ)) or "none",
        "attempt": _first(environ, "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT") or "0",
        "node": as_name(os.uname().nodename) or "node",
        "rank": _first(environ, *_RANKS) or "0",
        "workload": "default",
        "deadline_s": "60",
        "cache_limit_bytes": "100GB",
        "memory_bytes": "512MiB",
        # A thousand nodes then ask 5 GB/s of the store at most.
        "fill_bytes_per_s": "5MB",
        "metrics_dir": "off",
        "auto_index": "on",
        "publish_timelines": "on",
        "trace_python": "on",
        "keep_caches": "auto",
        "keep_limit_bytes": "4GB",
        "preload_limit_bytes": "8GB",
        "linger_s": "off",
        "registry_hosts_dir": "/etc/containerd/certs.d",
        "snapshot_max_age_s": "auto",
        "restore_mode": "auto",
        "restore_privileges": "off",
        "trusted_owners": "root",
    }
