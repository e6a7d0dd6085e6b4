"""The submission of a start that no scheduler names: the first node chooses, the others ask.

The nodes meet where their timelines do. In the store they find a lease that nobody gives up, whose
token is the submission; in the folder of timelines a file, which each reads and writes locked. A
node whose own timeline has that submission already begins another one. Main thread: it forks before
anything else has begun.
"""

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.linux.locks import lock_file
from bootseer.linux.private_files import open_private_directory
from bootseer.linux.processes import in_a_copy
from bootseer.profile.publish.note import is_stored
from bootseer.settings.config import DEFAULT_JOB, Settings, is_default_store

_log = logging.getLogger(__name__)

# Nodes that begin later than this after the first one are taken for another submission's.
_TOGETHER_S = 600.0
# Beyond that a start goes without.
_DEADLINE_S = 3.0
_NAME_LENGTH = 16
_NAME = re.compile(r"[0-9a-f]{16}")
# What all nodes of one job say alike, and those of another job beside it hardly.
_SAME_OPTION = re.compile(r"--(?:rdzv[-_]id|master[-_]port)")
_PLACE = re.compile(r"[0-9]+|is_host=\w+")
_SAME_VARIABLES = ("PET_RDZV_ID", "MASTER_PORT", "PET_MASTER_PORT")


def choose_submission(settings: Settings, command: Sequence[str]) -> str:
    """The submission of this start, shared with the other nodes; empty where it cannot be had.

    Never raises, and takes some seconds at most.
    """
    words = _alike(command, os.environ)
    if settings.job == DEFAULT_JOB:
        # Nobody has given the job a name, so that starts of one node may be of any job.
        words += [str(os.geteuid()), *_without_places(command)]
    key = f"{settings.attempt}/{_digest(words)}"
    try:
        if is_default_store(settings) or not is_stored(settings):
            return _by_folder(settings, key)
        return _by_store(settings, key)
    except Exception as error:
        _log.info("no node says which submission this start is of: %s", error)
        return ""


def _by_folder(settings: Settings, key: str) -> str:
    """Of the nodes that share the folder of timelines. Not by a lease of the store's: a start may
    need nothing else of a store, whose code takes longer to load than all this.

    Raises: BootseerError, OSError.
    """
    os.close(open_private_directory(settings.timeline_dir, [settings.job]))
    file = lock_file(settings.timeline_dir / settings.job / ".submissions" / key, _DEADLINE_S)
    try:
        found = os.pread(file, _NAME_LENGTH, 0).decode("ascii", "replace")
        # Written once: whoever only asks leaves the time as it is.
        age_s = time.time() - os.fstat(file).st_mtime
        if not _NAME.fullmatch(found) or age_s > _TOGETHER_S or _is_over(settings, found):
            found = os.urandom(_NAME_LENGTH // 2).hex()
            os.pwrite(file, found.encode(), 0)
        return found
    finally:
        os.close(file)


def _by_store(settings: Settings, key: str) -> str:
    """Of the nodes that share the store. It may be slow, or not answer: a copy of us asks."""
    # Here, and not in the copy: who names a store needs it later, too.
    from bootseer.store import open_backend
    from bootseer.store.objects.lease import agree_on_token

    def is_over(token: str) -> bool:
        return _is_over(settings, token[:_NAME_LENGTH])

    def ask() -> bytes:
        lease = f"leases/starts/{settings.job}/{key}"
        try:
            with contextlib.closing(open_backend(settings.store_url, deadline_s=_DEADLINE_S)) as at:
                token = agree_on_token(
                    at, lease, ttl_s=_TOGETHER_S, owner=settings.node, is_over=is_over
                )
        except Exception as error:
            _log.info("the store does not say which submission this start is of: %s", error)
            return b""
        return token[:_NAME_LENGTH].encode()

    limit_s = min(_DEADLINE_S, WAIT_BUDGET.left_s)
    began_s = time.monotonic()
    answer = in_a_copy(ask, limit_s).decode()
    if not answer:
        WAIT_BUDGET.spend(time.monotonic() - began_s)
    return answer


def _is_over(settings: Settings, submission: str) -> bool:
    """Whether this process had the submission before, and begins another."""
    own = settings.timeline_dir / settings.job / str(settings.attempt)
    return any(own.glob(f"{submission}/*-{settings.node}-{settings.rank}.jsonl"))


def _alike(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return what tells jobs of one name apart that run at one time. Pure."""
    words = [environ.get(name, "") for name in _SAME_VARIABLES]
    for place, word in enumerate(command):
        option, is_joined, value = word.partition("=")
        if _SAME_OPTION.fullmatch(option):
            words.append(value if is_joined else "".join(command[place + 1 : place + 2]))
    return words


def _without_places(command: Sequence[str]) -> list[str]:
    """Return the words of a command without what differs between the nodes of one job. Pure.

    Ranks and addresses are numbers, and torchrun's host is told that it is one.
    """
    return [_PLACE.sub("", word) for word in command]


def _digest(words: Sequence[str]) -> str:
    data = "\0".join(words).encode("utf-8", "surrogateescape")
    return hashlib.sha256(data).hexdigest()[:_NAME_LENGTH]
