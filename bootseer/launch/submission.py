"""The submission of a start that no scheduler names: the first node chooses, the others ask.

The nodes meet where their timelines do: in the store, or in the folder of timelines. What they find
there is a lease that nobody gives up; its token is the submission. A node whose own timeline has
that submission already begins another one. Main thread: it forks before anything else has begun.
"""

import hashlib
import logging
import os
import re
import signal
from collections.abc import Mapping, Sequence

from bootseer.linux.private_files import open_private_directory
from bootseer.linux.processes import wait_readable
from bootseer.profile.publish.begin import is_stored
from bootseer.settings.config import Settings
from bootseer.settings.default_settings import default_settings

_log = logging.getLogger(__name__)

# Nodes that begin later than this after the first one are taken for another submission's.
_TOGETHER_S = 600.0
# Beyond that a start goes without.
_DEADLINE_S = 3.0
_NAME_LENGTH = 16
# What all nodes of one job say alike, and those of another job beside it hardly.
_SAME_OPTION = re.compile(r"--(?:rdzv[-_]id|master[-_]port)")
_SAME_VARIABLES = ("PET_RDZV_ID", "MASTER_PORT", "PET_MASTER_PORT")


def choose_submission(settings: Settings, command: Sequence[str]) -> str:
    """The submission of this start, shared with the other nodes; empty where it cannot be had.

    Never raises, and takes some seconds at most: a store may be slow, or not answer. So a process
    of its own asks, whose threads and connections go with it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(writing, _chosen(settings, command).encode())
        except Exception as error:
            _log.info("nobody says which submission this start is of: %s", error)
        finally:
            os._exit(0)
    try:
        os.close(writing)
        found = os.read(reading, 64) if wait_readable([reading], _DEADLINE_S) else b""
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found.decode()


def _chosen(settings: Settings, command: Sequence[str]) -> str:
    """Raises: BootseerError, OSError."""
    # Here: the process that becomes the job needs none of it yet.
    from bootseer.store import open_backend
    from bootseer.store.objects.lease import agree

    folder = settings.timeline_dir / settings.job
    os.close(open_private_directory(settings.timeline_dir, [settings.job]))
    own = folder / str(settings.attempt)

    def is_over(token: str) -> bool:
        files = f"{token[:_NAME_LENGTH]}/*-{settings.node}-{settings.rank}.jsonl"
        return any(own.glob(files))

    key = f"starts/{settings.job}/{settings.attempt}/{_alike(command, os.environ)}"
    is_default = settings.store_url == default_settings(os.environ)["store_url"]
    in_store = is_stored(settings) and not is_default
    url = settings.store_url if in_store else f"{folder}/.submissions"
    backend = open_backend(url, deadline_s=_DEADLINE_S)
    try:
        token = agree(
            backend, f"leases/{key}", ttl_s=_TOGETHER_S, owner=settings.node, is_over=is_over
        )
    finally:
        backend.close()
    return token[:_NAME_LENGTH]


def _alike(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Tells jobs of one name apart that run at one time, as far as they say something. Pure."""
    words = [environ.get(name, "") for name in _SAME_VARIABLES]
    for place, word in enumerate(command):
        option, is_joined, value = word.partition("=")
        if _SAME_OPTION.fullmatch(option):
            words.append(value if is_joined else "".join(command[place + 1 : place + 2]))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:_NAME_LENGTH]
