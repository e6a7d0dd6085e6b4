"""The process behind a start that publishes what is new in its caches.

It looks when the job says that it is ready, once more some minutes later, and when the job has
ended; in between it sleeps. What it fails with costs later starts a compilation and is one line in
its log. One thread.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from bootseer.base.documents import from_line
from bootseer.errors import BootseerError, from_oserror
from bootseer.launch.caches.finding import Cache
from bootseer.launch.caches.publishing import (
    NOTHING_NEW,
    PUBLISHED,
    Published,
    Since,
    publish_quietly,
)
from bootseer.launch.caches.records import Record, forget_unused, note, read_record
from bootseer.launch.caches.run import Kept, Plan
from bootseer.linux.processes import wait_readable
from bootseer.served.ending import sweep
from bootseer.served.processes import KEEPER, Report, serve
from bootseer.served.ready_socket import ReadySocket
from bootseer.store import open_own_store
from bootseer.timeline import stage

_log = logging.getLogger(__name__)

STAGE = "keep caches"

_NICENESS = 15
_SETTLED_S = 5.0
"""After `ready`: other ranks are some steps behind, and their compilers still write."""
_AGAIN_S = 600.0
"""Evaluation, checkpoints and longer sequences are compiled later than the first step."""
_END_S = 300.0
"""What the last look may take; then a scheduler would end the process anyway."""
_WAIT_S = 120.0
"""So long another node's publishing is waited for."""


def keep(line: bytes, report: Report) -> None:
    """Carry a plan out. Raises: BootseerError."""
    plan = from_line(line, Plan)
    try:
        job = plan.job.open()
    except OSError as error:
        raise from_oserror(error, f"watch process {plan.job.pid}") from error
    ready = ReadySocket(plan.ready_name)
    report.ready()
    os.nice(_NICENESS)
    keeper = _Keeper(plan)
    # Not before the job is ready: its compilers work until then, and files are half written.
    while not (ended := _waited(job, ready, None)) and not ready.take():
        pass
    ready.close()
    if not ended and not wait_readable([job], _SETTLED_S):
        keeper.look()
        if not wait_readable([job], _AGAIN_S):
            keeper.look()
            wait_readable([job], None)
    _end_after(_END_S)
    keeper.look()
    forget_unused(plan.settings.cache_dir)
    # Logs of earlier starts, too.
    sweep(plan.settings.run_dir)


def _waited(job: int, ready: ReadySocket, timeout_s: float | None) -> bool:
    return job in wait_readable([job, ready.fileno()], timeout_s)


def _end_after(limit_s: float) -> None:
    """End this process whatever hangs."""
    timer = threading.Timer(limit_s, lambda: os._exit(1))
    timer.daemon = True
    timer.start()


class _Keeper:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._read_until_ns = 0
        self._seen: dict[str, object] = {}
        """By key, what the folder looked like when all of it was published."""

    def look(self) -> None:
        """Publish what is new. Never raises."""
        if not self._read_until_ns:
            # Later it may have been this process that read a file.
            self._read_until_ns = time.time_ns()
        for publish in (self._share_record, self._publish_caches):
            try:
                publish()
            except Exception:
                # The next look may be well.
                _log.exception("unexpected error in the keeper of caches")

    def _publish_caches(self) -> None:
        now = {kept.cache.key: _state(kept.cache.folder) for kept in self._plan.caches}
        todo = [kept for kept in self._plan.caches if self._is_new(kept.cache, now)]
        if not todo:
            return
        try:
            with (
                stage(STAGE) as span,
                open_own_store(self._settings) as store,
            ):
                done = []
                for kept in todo:
                    since = Since(self._plan.begun_ns, self._read_until_ns, kept.is_damaged)
                    done.append(
                        publish_quietly(self._settings, store, kept.cache, since, wait_s=_WAIT_S)
                    )
                span.set("bootseer.how", ", ".join(sorted({one.how for one in done})))
                span.set("bootseer.bytes", sum(one.stored_bytes for one in done))
                span.set("bootseer.files", sum(one.new_files for one in done))
            for kept, one in zip(todo, done, strict=True):
                # What has failed, or was left since others published, is tried again.
                if one.how in (PUBLISHED, NOTHING_NEW):
                    self._seen[kept.cache.key] = now[kept.cache.key]
                self._note(kept, one)
        except (BootseerError, OSError) as error:
            _log.warning("no cache of this start is published: %s", error)

    def _share_record(self) -> None:
        """Publish what workers have imported, so that other nodes may do that ahead."""
        if not self._plan.preloads:
            return
        from bootseer.launch.preloading import publish

        try:
            with open_own_store(self._settings) as store:
                publish(self._settings, store)
        except (BootseerError, OSError) as error:
            _log.warning("the record of imports is not published: %s", error)

    def _is_new(self, cache: Cache, now: Mapping[str, object]) -> bool:
        """Return whether there is anything, and not just what is published."""
        state = now[cache.key]
        return bool(state) and state != self._seen.get(cache.key)

    def _note(self, kept: Kept, done: Published) -> None:
        cache, cache_dir = kept.cache, self._settings.cache_dir
        known = read_record(cache_dir, cache.key)
        record = known or Record(key=cache.key, name=cache.name, folder=str(cache.folder))
        note(
            cache_dir,
            replace(
                record,
                index=done.index or record.index,
                last=done.how,
                new_files=record.new_files + (done.new_files if done.how == PUBLISHED else 0),
            ),
        )
        _log.info("%s: %s, %d new files", cache.name, done.how, done.new_files)


def _state(folder: Path) -> object:
    """What tells whether something was written below a folder: names, sizes and times."""
    from bootseer.launch.caches.contents import look

    try:
        files = look(folder).files
    except (BootseerError, OSError):
        return None
    return frozenset((path, one.size_bytes, one.put_ns) for path, one in files.items())


def main() -> None:
    """Entry point of the process."""
    code = serve(KEEPER, keep)
    logging.shutdown()
    # Not by way of the interpreter's end: a thread may hang in a dead file system.
    os._exit(code)


if __name__ == "__main__":
    main()
