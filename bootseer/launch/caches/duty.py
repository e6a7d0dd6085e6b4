"""Duty of the attendant to publish new files in the caches of a start.

The duty is due some seconds after the job reports ready, once more ten minutes later, and when the
job has ended. A failure is one line in the log, and costs later starts a compilation. One thread;
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
from bootseer.launch.caches.records import CacheRecord, forget_unused, note, read_record
from bootseer.launch.caches.run import KeptCache
from bootseer.launch.job import PreloadHandoff
from bootseer.settings.config import Settings

_log = logging.getLogger(__name__)

STAGE = "keep caches"

_SETTLED_S = 5.0
"""Delay after `ready`: other ranks are some steps behind, and their compilers still write."""
_AGAIN_S = 600.0
"""Delay of the second round: evaluation, checkpoints and longer sequences are compiled later."""
_LIMIT_S = 300.0
"""Limit for one round; at the end of a job a scheduler kills the process after about this time."""
_WAIT_S = 120.0
"""Longest wait for another node that is publishing."""


class _Published(Struct, frozen=True):
    """Result of one round: by cache key, the state of the folder when all of it was published."""

    published: dict[str, str] = {}


class CachesDuty:
    """Publishing of the caches of one launcher's job."""

    limit_s = _LIMIT_S

    def __init__(
        self,
        settings: Settings,
        caches: tuple[KeptCache, ...],
        begun_ns: int,
        variables: Mapping[str, str],
        *,
        preloads: PreloadHandoff | None,
    ) -> None:
        """Keep the arguments; publish nothing before the job is ready.

        `variables` let stages get onto the start's timeline. With `preloads` the job's import
        records are kept, too.
        """
        self._settings = settings
        self._caches = caches
        self._begun_ns = begun_ns
        self._variables = dict(variables)
        self._preloads = preloads
        self._read_until_ns = 0
        self._published_states: dict[str, str] = {}
        # Empty until the job is ready: its compilers work until then, and files are half written.
        self._due_s: list[float] = []
        self._is_last = False

    def on_ready(self) -> None:
        """Schedule two rounds, if the job has not been ready before."""
        if not self._due_s and not self._is_last and not self._read_until_ns:
            now_s = time.monotonic()
            self._due_s = [now_s + _SETTLED_S, now_s + _SETTLED_S + _AGAIN_S]

    def on_exit(self) -> None:
        """Schedule the last round, since the job has ended."""
        self._is_last = True
        self._due_s = [time.monotonic()]

    def due_s(self) -> float:
        """Return when `work` is due, as a time of the monotonic clock; infinity if it is not."""
        return self._due_s[0] if self._due_s else math.inf

    def begin(self) -> bool:
        """Note that a round begins. Return whether `work` is to run now."""
        del self._due_s[:1]
        if not self._read_until_ns:
            # From now on, access times may be due to this process's own reads.
            self._read_until_ns = time.time_ns()
        return True

    def take_result(self, answer: bytes) -> None:
        """Store the result of `work`; empty if the copy was killed."""
        if answer:
            self._published_states |= from_line(answer, _Published).published

    def work(self) -> bytes:
        """Publish new files. Runs in a copy of this process. Never raises."""
        os.environ.update(self._variables)
        published: dict[str, str] = {}
        if self._preloads is not None:
            self._try(self._keep_records)
        self._try(lambda: self._publish_caches(published))
        if self._is_last:
            self._try(lambda: forget_unused(self._settings.cache_dir))
        return to_line(_Published(published)).encode("ascii")

    @staticmethod
    def _try(work: Callable[[], object]) -> None:
        try:
            work()
        except (BootseerError, OSError) as error:
            _log.warning("the caches of this start are not published: %s", error)
        except Exception:
            # A bug here ends this round alone; the next one may succeed.
            _log.exception("unexpected error with kept caches")

    def _publish_caches(self, published: dict[str, str]) -> None:
        now = {kept.cache.key: _state(kept.cache.folder) for kept in self._caches}
        todo = [kept for kept in self._caches if self._is_new(kept.cache, now)]
        if not todo:
            return
        from bootseer.launch.caches.publishing import (
            NOTHING_NEW,
            PUBLISHED,
            PublishingStart,
            publish_quietly,
        )
        from bootseer.store import open_own_store
        from bootseer.timeline import stage

        with stage(STAGE) as span, open_own_store(self._settings) as store:
            done = []
            for kept in todo:
                start = PublishingStart(self._begun_ns, self._read_until_ns, kept.is_damaged)
                done.append(
                    publish_quietly(self._settings, store, kept.cache, start, wait_s=_WAIT_S)
                )
            span.set("bootseer.how", ", ".join(sorted({one.how for one in done})))
            span.set("bootseer.bytes", sum(one.stored_bytes for one in done))
            span.set("bootseer.files", sum(one.new_files for one in done))
        for kept, one in zip(todo, done, strict=True):
            # After a failure, or if other nodes were publishing, the next round tries again.
            if one.how in (PUBLISHED, NOTHING_NEW):
                published[kept.cache.key] = now[kept.cache.key]
            new_files = one.new_files if one.how == PUBLISHED else 0
            self._note(kept.cache, one.index, one.how, new_files)
            _log.info("%s: %s, %d new files", kept.cache.name, one.how, one.new_files)

    def _keep_records(self) -> None:
        from bootseer.launch.import_records import keep_records

        assert self._preloads is not None
        keep_records(self._settings, self._preloads)

    def _is_new(self, cache: Cache, now: Mapping[str, str]) -> bool:
        """Return whether the folder has files, and has changed since they were published."""
        state = now[cache.key]
        return bool(state) and state != self._published_states.get(cache.key)

    def _note(self, cache: Cache, index: str, how: str, new_files: int) -> None:
        cache_dir = self._settings.cache_dir
        known = read_record(cache_dir, cache.key)
        record = known or CacheRecord(key=cache.key, name=cache.name, folder=str(cache.folder))
        new_files += record.new_files
        note(
            cache_dir,
            replace(record, index=index or record.index, last=how, new_files=new_files),
        )


def _state(folder: Path) -> str:
    """Return a digest of a folder's files (names, sizes and times); empty if there are none."""
    from bootseer.launch.caches.contents import read_contents

    try:
        files = read_contents(folder).files
    except (BootseerError, OSError):
        return ""
    listed = sorted((os.fsencode(path), one.size_bytes, one.put_ns) for path, one in files.items())
    return sha256(repr(listed).encode()).hexdigest() if listed else ""
