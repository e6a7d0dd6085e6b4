"""The duty to publish what is new in the caches of a start.

It is due when the job says that it is ready, once more some minutes later, and when the job has
ended. What it fails with costs later starts a compilation and is one line in the log. One thread;
the work itself runs in a copy of the process that has the duty.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.documents import from_line, to_line
from bootseer.errors import BootseerError
from bootseer.launch.caches.finding import Cache
from bootseer.launch.caches.records import Record, forget_unused, note, read_record
from bootseer.launch.caches.run import Kept
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

STAGE = "keep caches"

_SETTLED_S = 5.0
"""After `ready`: other ranks are some steps behind, and their compilers still write."""
_AGAIN_S = 600.0
"""Evaluation, checkpoints and longer sequences are compiled later than the first step."""
_LIMIT_S = 300.0
"""What a look may take; at the end a scheduler would end the process then anyway."""
_WAIT_S = 120.0
"""So long another node's publishing is waited for."""


class _Look(Struct, frozen=True):
    """What one look has done: by key, what the folder looked like when all of it was published."""

    seen: dict[str, str] = {}


class CachesDuty:
    """The caches of one launcher's job, as far as they are published."""

    limit_s = _LIMIT_S

    def __init__(
        self,
        settings: Settings,
        caches: tuple[Kept, ...],
        begun_ns: int,
        variables: Mapping[str, str],
        *,
        preloads: bool,
    ) -> None:
        """`preloads`: whether the record of its imports is for other nodes, too. `variables`: the
        environment by which stages get on the start's timeline."""
        self._settings = settings
        self._caches = caches
        self._begun_ns = begun_ns
        self._variables = dict(variables)
        self._preloads = preloads
        self._read_until_ns = 0
        self._seen: dict[str, str] = {}
        # Not before the job is ready: its compilers work until then, and files are half written.
        self._due_s: list[float] = []
        self._is_last = False

    def ready(self) -> None:
        """The job is ready."""
        if not self._due_s and not self._is_last and not self._read_until_ns:
            now_s = time.monotonic()
            self._due_s = [now_s + _SETTLED_S, now_s + _SETTLED_S + _AGAIN_S]

    def over(self) -> None:
        """The job has ended."""
        self._is_last = True
        self._due_s = [time.monotonic()]

    def due_s(self) -> float:
        """Return when `work` is due, by the monotonic clock."""
        return self._due_s[0] if self._due_s else math.inf

    def begin(self) -> bool:
        """Return whether `work` is to run now."""
        del self._due_s[:1]
        if not self._read_until_ns:
            # Later it may have been this process that read a file.
            self._read_until_ns = time.time_ns()
        return True

    def took(self, answer: bytes) -> None:
        """Take what `work` has returned; empty where it was killed."""
        if answer:
            self._seen |= from_line(answer, _Look).seen

    def work(self) -> bytes:
        """Publish what is new, in a copy. Never raises."""
        os.environ.update(self._variables)
        seen: dict[str, str] = {}
        if self._preloads:
            self._quietly(self._share_record)
        self._quietly(lambda: self._publish_caches(seen))
        if self._is_last:
            self._quietly(lambda: forget_unused(self._settings.cache_dir))
        return to_line(_Look(seen)).encode("ascii")

    @staticmethod
    def _quietly(do: Callable[[], object]) -> None:
        try:
            do()
        except (BootseerError, OSError) as error:
            _log.warning("no cache of this start is published: %s", error)
        except Exception:
            # The next look may be well.
            _log.exception("unexpected error with kept caches")

    def _publish_caches(self, seen: dict[str, str]) -> None:
        now = {kept.cache.key: _state(kept.cache.folder) for kept in self._caches}
        todo = [kept for kept in self._caches if self._is_new(kept.cache, now)]
        if not todo:
            return
        from bootseer.launch.caches.publishing import (
            NOTHING_NEW,
            PUBLISHED,
            Since,
            publish_quietly,
        )
        from bootseer.store import open_own_store
        from bootseer.timeline import stage

        with stage(STAGE) as span, open_own_store(self._settings) as store:
            done = []
            for kept in todo:
                since = Since(self._begun_ns, self._read_until_ns, kept.is_damaged)
                done.append(
                    publish_quietly(self._settings, store, kept.cache, since, wait_s=_WAIT_S)
                )
            span.set("bootseer.how", ", ".join(sorted({one.how for one in done})))
            span.set("bootseer.bytes", sum(one.stored_bytes for one in done))
            span.set("bootseer.files", sum(one.new_files for one in done))
        for kept, one in zip(todo, done, strict=True):
            # What has failed, or was left since others published, is tried again.
            if one.how in (PUBLISHED, NOTHING_NEW):
                seen[kept.cache.key] = now[kept.cache.key]
            new_files = one.new_files if one.how == PUBLISHED else 0
            self._note(kept.cache, one.index, one.how, new_files)
            _log.info("%s: %s, %d new files", kept.cache.name, one.how, one.new_files)

    def _share_record(self) -> None:
        """Publish what workers have imported, so that other nodes may do that ahead."""
        from bootseer.launch.preloading import publish
        from bootseer.store import open_own_store

        with open_own_store(self._settings) as store:
            publish(self._settings, store)

    def _is_new(self, cache: Cache, now: Mapping[str, str]) -> bool:
        """Return whether there is anything, and not just what is published."""
        state = now[cache.key]
        return bool(state) and state != self._seen.get(cache.key)

    def _note(self, cache: Cache, index: str, how: str, new_files: int) -> None:
        cache_dir = self._settings.cache_dir
        known = read_record(cache_dir, cache.key)
        record = known or Record(key=cache.key, name=cache.name, folder=str(cache.folder))
        new_files += record.new_files
        note(
            cache_dir,
            replace(record, index=index or record.index, last=how, new_files=new_files),
        )


def _state(folder: Path) -> str:
    """Return what tells whether something was written below a folder: a digest of names, sizes and
    times; empty where nothing is there."""
    from bootseer.launch.caches.contents import look

    try:
        files = look(folder).files
    except (BootseerError, OSError):
        return ""
    listed = sorted((os.fsencode(path), one.size_bytes, one.put_ns) for path, one in files.items())
    return sha256(repr(listed).encode()).hexdigest() if listed else ""
