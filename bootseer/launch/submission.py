"""Choice of the submission of a start without a scheduler: the first node chooses, others follow.

Nodes agree where their timelines meet. In the store that is a lease that is never released, whose
token is the submission; in the folder of timelines it is a file, read and written under a lock. A
node that has a timeline of that submission already begins another submission. Main thread: it forks
before anything else has begun.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence

from bootseer.base.redact import public_url
from bootseer.base.short_digest import short_digest
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import DeadlineError
from bootseer.linux.locks import lock_file
from bootseer.linux.private_files import open_private_directory
from bootseer.linux.processes import run_forked
from bootseer.profile.publish.note import is_stored
from bootseer.settings.config import DEFAULT_JOB, Settings, is_default_store

_log = logging.getLogger(__name__)

# A node that begins later than this after the first one belongs to another submission.
_TOGETHER_S = 600.0
# Longest wait for the lock of the folder of timelines.
_LOCK_S = 3.0
# Longest time that the store may take for the whole agreement; for its first answer it has less.
_STORE_S = 7.0
# Begins the answer of a copy that found the store away; the reason follows.
_AWAY = "!"
# Time in which a copy ends whose requests have reached their limit.
_ENDING_S = 1.0
_NAME_LENGTH = 16
_NAME = r"[0-9a-f]{16}"
# Options and variables that are equal on all nodes of a job, and rarely equal in two jobs.
_COMMON_OPTION = r"--(?:rdzv[-_]id|master[-_]port)"
_NODE_SPECIFIC = r"[0-9]+|is_host=\w+"
_COMMON_VARIABLES = ("PET_RDZV_ID", "MASTER_PORT", "PET_MASTER_PORT")


def choose_submission(
    settings: Settings, command: Sequence[str], say: Callable[[str], None]
) -> str:
    """Return the submission of this start, equal on all its nodes; empty if they cannot agree.

    Takes a few seconds at most. Mostly the first request of a start to its store: `say` gets a
    warning if the store is away. Never raises.
    """
    words = _common_words(command, os.environ)
    if settings.job == DEFAULT_JOB:
        # Unnamed jobs share one name, so the user and the command must tell them apart.
        words += [str(os.geteuid()), *_without_node_specific(command)]
    key = f"{settings.attempt}/{_digest(words)}"
    try:
        if is_default_store(settings) or not is_stored(settings):
            return _by_folder(settings, key)
        return _by_store(settings, key, say)
    except Exception as error:
        _log.info("cannot agree with other nodes on a submission: %s", error)
        return ""


def _by_folder(settings: Settings, key: str) -> str:
    """Agree among the nodes that share the folder of timelines. Raises: BootseerError, OSError.

    Not by a lease of the store, whose code takes longer to load than all of this.
    """
    os.close(open_private_directory(settings.timeline_dir, [settings.job]))
    file = lock_file(settings.timeline_dir / settings.job / ".submissions" / key, _LOCK_S)
    try:
        found = os.pread(file, _NAME_LENGTH, 0).decode("ascii", "replace")
        # Only the node that chooses writes, so the file's time is that of the choice.
        age_s = time.time() - os.fstat(file).st_mtime
        if (
            not re.fullmatch(_NAME, found)
            or age_s > _TOGETHER_S
            or _has_timeline_of(settings, found)
        ):
            found = os.urandom(_NAME_LENGTH // 2).hex()
            os.pwrite(file, found.encode(), 0)
        return found
    finally:
        os.close(file)


def _by_store(settings: Settings, key: str, say: Callable[[str], None]) -> str:
    """Agree among the nodes that share the store. A copy of this process asks.

    If the store cannot hang, this process asks itself. A copy that nothing answers ends by the
    limit for the first answer, and says so: this process then asks the store for nothing else.

    Raises: BootseerError.
    """
    # Imported before the fork: a start with a store needs this code later, too.
    from bootseer.store import open_backend
    from bootseer.store.objects.lease import agree_on_token

    def is_used(token: str) -> bool:
        return _has_timeline_of(settings, token[:_NAME_LENGTH])

    with contextlib.closing(
        open_backend(settings.store_url, deadline_s=settings.deadline_s)
    ) as backend:

        def ask() -> str:
            lease = f"leases/starts/{settings.job}/{key}"
            token = agree_on_token(
                backend, lease, ttl_s=_TOGETHER_S, owner=settings.node, is_used=is_used
            )
            return token[:_NAME_LENGTH]

        def ask_in_copy() -> bytes:
            try:
                return ask().encode()
            except Exception as error:
                is_late = isinstance(error, DeadlineError) and WAIT_BUDGET.awaits_first_answer
                if is_late or WAIT_BUDGET.is_spent:
                    return f"{_AWAY}{error}".encode(errors="replace")
                _log.info("cannot agree with other nodes on a submission: %s", error)
                return b""

        if backend.is_of_this_node:
            return ask()
        began_s = time.monotonic()
        limit_s = max(_STORE_S, WAIT_BUDGET.left_s + _ENDING_S)
        answer = run_forked(ask_in_copy, limit_s).decode()
        if answer.startswith(_AWAY):
            WAIT_BUDGET.spend(time.monotonic() - began_s)
            WAIT_BUDGET.give_up()
            url = public_url(settings.store_url)
            error = DeadlineError(answer.removeprefix(_AWAY))
            say(f"{WAIT_BUDGET.warning(error)}starting without the store {url}: {error}")
            return ""
        if answer:
            WAIT_BUDGET.answered()
        return answer


def _has_timeline_of(settings: Settings, submission: str) -> bool:
    own = settings.timeline_dir / settings.job / str(settings.attempt) / submission
    try:
        names = os.listdir(own)
    except FileNotFoundError:
        return False
    return any(name.endswith(f"-{settings.node}-{settings.rank}.jsonl") for name in names)


def _common_words(command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the words that tell apart jobs of one name that start at the same time. Pure."""
    words = [environ.get(name, "") for name in _COMMON_VARIABLES]
    for place, word in enumerate(command):
        option, is_joined, value = word.partition("=")
        if option.startswith("--") and re.fullmatch(_COMMON_OPTION, option):
            words.append(value if is_joined else "".join(command[place + 1 : place + 2]))
    return words


def _without_node_specific(command: Sequence[str]) -> list[str]:
    """Return a command's words without numbers, addresses and torchrun's `is_host`. Pure."""
    return [re.sub(_NODE_SPECIFIC, "", word) for word in command]


def _digest(words: Sequence[str]) -> str:
    data = "\0".join(words).encode("utf-8", "surrogateescape")
    return short_digest(data)[:_NAME_LENGTH]
