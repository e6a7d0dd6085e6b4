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


class CacheStage:
    """Restores the kept caches of the job that this process is going to be."""

    def __init__(
        self, settings: Settings, request: KeepRequest, say: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._request = request
        self._say = say
        self.kept: tuple[KeptCache, ...] = ()
        """Caches to publish after the start; empty if there is no store to publish to."""
        self.begun_ns = time.time_ns()

    @property
    def _publishes(self) -> bool:
        """Whether there is a store that other nodes, or later starts, are known to use."""
        return bool(self._request.directories) or not is_default_store(self._settings)

    def restore(
        self, timeline: Timeline, job: CacheJob, show: Callable[[Path, str], None]
    ) -> dict[str, str]:
        """Restore the caches of `job`; return the variables for them. Never raises.

        `show(folder, path)` makes a folder of the host visible to the job as `path`.
        """
        try:
            caches = find_caches(self._settings, self._request, job)
            if not caches:
                return {}
            with timeline.span(STAGE) as span:
                kept, results = self._restore_all(caches)
                span.set("bootseer.hit", all(one.how != MISS for one in results))
                span.set("bootseer.bytes", sum(one.moved_bytes for one in results))
                span.set("bootseer.files", sum(one.file_count for one in results))
                span.set("bootseer.how", ", ".join(sorted({one.how for one in results})))
            for one in kept:
                if one.cache.is_ours:
                    show(one.cache.folder, one.cache.path)
            if self._publishes:
                self.kept = tuple(kept)
            return {one.cache.name: one.cache.path for one in kept if one.cache.sets}
        except (BootseerError, OSError) as error:
            reason = str(error)
        except Exception as error:
            # A bug here must not keep the job from starting.
            _log.exception("unexpected error with kept caches")
            reason = f"unexpected {type(error).__name__}: {error}"
        self._say(f"warning: no kept cache is used: {reason}")
        return {}

    def _restore_all(self, caches: list[Cache]) -> tuple[list[KeptCache], list[RestoreResult]]:
        if not self._publishes or WAIT_BUDGET.is_spent:
            reason = "the store does not answer" if WAIT_BUDGET.is_spent else ""
            return self._make_folders(caches, reason)
        # Imported here: most starts have no caches and never need this code.
        from bootseer.launch.caches.restoring import restore
        from bootseer.store import open_own_store

        settings = self._settings
        kept, results = [], []
        reason = ""
        # A job that names no directory to keep must not wait a whole deadline for a silent store.
        deadline_s = settings.deadline_s
        if not self._request.directories:
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
                    self._say(f"warning: the kept cache {cache.name} is not used: {error}")
                except (BootseerError, OSError) as error:
                    # The store has failed: do not let each other cache wait for it again.
                    reason = str(error)
                    self._say(f"warning: the kept cache {cache.name} is not used: {error}")
                if cache.is_ours and not cache.folder.is_dir():
                    continue
                kept.append(KeptCache(cache, is_damaged))
                results.append(result)
                self._note(cache, result)
        return kept, results

    def _make_folders(
        self, caches: list[Cache], reason: str
    ) -> tuple[list[KeptCache], list[RestoreResult]]:
        """Make the folders without asking the store: the files on this node are all there is."""
        results = []
        for cache in caches:
            _make_folder(cache)
            results.append(RestoreResult(MISS if reason else IN_PLACE, reason))
            self._note(cache, results[-1])
        return [KeptCache(cache) for cache in caches], results

    def _note(self, cache: Cache, result: RestoreResult) -> None:
        cache_dir = self._settings.cache_dir
        known = read_record(cache_dir, cache.key)
        record = known or CacheRecord(key=cache.key, name=cache.name, folder=str(cache.folder))
        hit = result.how != MISS
        note(
            cache_dir,
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
            note_user(cache_dir, cache.folder, os.getpid())
        if result.how == RESTORED:
            self._say(
                f"restored the cache {cache.name}: {result.file_count} files, "
                f"{result.moved_bytes} bytes moved, {result.how}: {result.reason}"
            )


def _make_folder(cache: Cache) -> None:
    if cache.is_ours:
        make_directory(cache.folder)
