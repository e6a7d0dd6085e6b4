"""Cache stage of a start: restore kept caches before the command, and list those to publish later.

This module alone guarantees that a cache neither delays a start for long nor makes it fail: on any
error the start prints one warning, and the job compiles as it would without Bootseer. Main thread
only.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import BootseerError, CorruptError, NotFoundError
from bootseer.launch.caches.finding import Cache, CacheJob, KeepRequest, find_caches
from bootseer.launch.caches.records import (
    IN_PLACE,
    MISS,
    RESTORED,
    CacheRecord,
    RestoreResult,
    note,
    note_user,
    read_record,
)
from bootseer.launch.job import Say
from bootseer.linux.private_files import make_directory
from bootseer.settings.config import Settings, is_default_store
from bootseer.timeline.recorder import Timeline

_log = logging.getLogger(__name__)

STAGE = "caches"
_FIRST_ANSWER_S = 5.0
"""Deadline for a silent store, unless the job names directories to keep."""


class KeptCache(Struct, frozen=True):
    """A cache of this start, and whether its newest generation was found damaged."""

    cache: Cache
    is_damaged: bool = False


class RestoredCaches(Struct, frozen=True):
    """Caches of the job that this process is going to be."""

    variables: dict[str, str] = {}
    """Variables by which the job finds them."""
    kept: tuple[KeptCache, ...] = ()
    """Caches to publish after the start; empty if there is no store to publish to."""
    begun_ns: int = 0


def restore_caches(
    settings: Settings,
    request: KeepRequest,
    job: CacheJob,
    timeline: Timeline,
    say: Say,
    show: Callable[[Path, str], None],
) -> RestoredCaches:
    """Restore the caches of `job`. Never raises: a failure is one warning.

    `show(folder, path)` makes a folder of the host visible to the job as `path`.
    """
    begun_ns = time.time_ns()
    # Other nodes, or other starts, are known to use the store.
    publishes = bool(request.directories) or not is_default_store(settings)
    try:
        caches = find_caches(settings, request, job)
        if not caches:
            return RestoredCaches()
        with timeline.span(STAGE) as span:
            if publishes and not WAIT_BUDGET.is_spent:
                found = _restore_all(settings, request, caches, say)
            else:
                found = [_make_folder(cache, is_silent=WAIT_BUDGET.is_spent) for cache in caches]
            results = [_recorded(settings, one, result, say) for one, result in found]
            span.set("bootseer.hit", all(one.how != MISS for one in results))
            span.set("bootseer.bytes", sum(one.moved_bytes for one in results))
            span.set("bootseer.files", sum(one.file_count for one in results))
            span.set("bootseer.how", ", ".join(sorted({one.how for one in results})))
        kept = tuple(one for one, _ in found)
        for one in kept:
            if one.cache.is_ours:
                show(one.cache.folder, one.cache.path)
        variables = {one.cache.name: one.cache.path for one in kept if one.cache.sets}
        return RestoredCaches(variables, kept if publishes else (), begun_ns)
    except (BootseerError, OSError) as error:
        reason = str(error)
    except Exception as error:
        # A bug here must not keep the job from starting.
        _log.exception("unexpected error with kept caches")
        reason = f"unexpected {type(error).__name__}: {error}"
    say(f"warning: no kept cache is used: {reason}")
    return RestoredCaches()


def _restore_all(
    settings: Settings, request: KeepRequest, caches: list[Cache], say: Say
) -> list[tuple[KeptCache, RestoreResult]]:
    # Imported here: most starts have no caches and never need this code.
    from bootseer.launch.caches.restoring import restore
    from bootseer.store import open_own_store

    found = []
    reason = ""
    # A job that names no directory to keep must not wait a whole deadline for a silent store.
    deadline_s = settings.deadline_s
    if not request.directories:
        deadline_s = min(deadline_s, _FIRST_ANSWER_S)
    with open_own_store(settings, deadline_s=deadline_s) as store:
        for cache in caches:
            result = RestoreResult(MISS, reason)
            is_damaged = False
            try:
                if reason:
                    _make_folder(cache)
                else:
                    result = restore(settings, store, cache)
            except (CorruptError, NotFoundError) as error:
                is_damaged = True
                say(f"warning: the kept cache {cache.name} is not used: {error}")
            except (BootseerError, OSError) as error:
                # The store has failed: do not let each other cache wait for it again.
                reason = str(error)
                warning = WAIT_BUDGET.warning(error)
                say(f"{warning}the kept cache {cache.name} is not used: {error}")
            if not cache.is_ours or cache.folder.is_dir():
                found.append((KeptCache(cache, is_damaged), result))
    return found


def _recorded(
    settings: Settings, kept: KeptCache, result: RestoreResult, say: Say
) -> RestoreResult:
    """Record the use of a cache on this node; return `result`."""
    cache = kept.cache
    known = read_record(settings.cache_dir, cache.key)
    record = known or CacheRecord(key=cache.key, name=cache.name, folder=str(cache.folder))
    hit = result.how != MISS
    note(
        settings.cache_dir,
        replace(
            record,
            hits=record.hits + hit,
            misses=record.misses + (not hit),
            index=result.index or record.index,
            last=f"{result.how}: {result.reason}" if result.reason else result.how,
            restored_files=record.restored_files + result.file_count,
        ),
    )
    if cache.is_ours:
        note_user(settings.cache_dir, cache.folder, os.getpid())
    if result.how == RESTORED:
        say(
            f"restored the cache {cache.name}: {result.file_count} files, "
            f"{result.moved_bytes} bytes moved, {result.how}: {result.reason}"
        )
    return result


def _make_folder(cache: Cache, *, is_silent: bool = False) -> tuple[KeptCache, RestoreResult]:
    """Make the folder without asking the store, which may be silent."""
    if cache.is_ours:
        make_directory(cache.folder)
    if is_silent:
        return KeptCache(cache), RestoreResult(MISS, "the store does not answer")
    return KeptCache(cache), RestoreResult(IN_PLACE)
