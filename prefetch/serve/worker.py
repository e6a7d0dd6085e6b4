"""The worker of a mounted image: streams, replay, record, upkeep and control around one tree.

Alone decides when a record begins and ends and whether it is worth publishing. Made anew in each
worker process (a killed worker has a successor), around a tree and an access log that outlive it.
"""

import contextlib
import enum
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.fanout.local import SharedReads
from bootseer.fuse.kernel.unmount import detach, unmount
from bootseer.linux.processes import ProcessId, start_time
from bootseer.prefetch.bundle.bundle_accuracy import is_worthwhile
from bootseer.prefetch.bundle.replay import Replaying
from bootseer.prefetch.cache.damage import note_damage
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.index.stream_contents import StreamContents
from bootseer.prefetch.publish.publishing import RecordInfo, start_publisher
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.reading.repairs import second_source
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.bundle_use import BundleUse
from bootseer.prefetch.serve.launch_figures import (
    LaunchFigures,
    PrefetchFigures,
    prefetch_figures,
    span_attributes,
    status_of,
)
from bootseer.prefetch.serve.serve_plan import ENVIRONMENT, ServePlan
from bootseer.prefetch.serve.tree_fs import TreeFileSystem
from bootseer.prefetch.serve.upkeep import Upkeep
from bootseer.served import cover_users
from bootseer.served.control import ControlServer
from bootseer.served.ending import end_runc, is_in_use
from bootseer.served.folders import RUN, write_state
from bootseer.served.processes import Process
from bootseer.store import Store, open_own_store
from bootseer.store.objects.uses import note_use
from bootseer.timeline import stage
from bootseer.transfer.ranges import Chunk

_log = logging.getLogger(__name__)

_UNMOUNT_S = 10.0
_SHOWN = (
    *("id", "reference", "index_digest", "workload", "directory"),
    *("pid", "started_ns", "purpose", "scratch"),
)
"""The fields of the mount's state that its status shows."""


class Recording(enum.Enum):
    """State of the record of one start; the values are those of `image status`."""

    OFF = "off"
    OPEN = "recording"
    ENDED = "ended"
    """No access is added any more; nothing was read, or what follows is not decided yet."""
    NOT_NEEDED = "not needed"
    """The bundle met the start well enough."""
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    FAILED = "failed"
    """The publisher failed."""


class ImageServer:
    """One worker's life: `operations` for the kernel, `destroyed` at its end."""

    def __init__(self, plan: ServePlan, tree: Tree, log: AccessLog) -> None:
        """Raises: BootseerError, OSError."""
        self._plan = plan
        self._tree = tree
        self._log = log
        self._store: Store = open_own_store(plan.settings)
        self._publisher: Process | None = None
        self._record = Recording.OPEN if log.is_open else Recording.ENDED
        if plan.settings.record == "never":
            self._record = Recording.OFF
        self._is_mounted = True
        self._reads = SharedReads(plan.settings, self._store.read_verified)
        self._streams = ImageBytes(
            tree.blobs,
            self._reads.read,
            NodeCache(plan.settings.cache_dir),
            deadline_s=plan.settings.deadline_s,
            fill_bytes_per_s=plan.settings.fill_bytes_per_s or None,
            repair=second_source(plan.settings, plan.state.reference, plan.owner),
            on_damage=self._note_damage,
            owner=plan.owner,
            vouched=vouched_streams(
                plan.settings,
                plan.state.index_digest,
                tree.blobs,
                is_local=plan.options.is_local,
            ),
            on_refuted=self._refuted,
        )
        self._bundle = BundleUse(plan, tree, self._store, self._streams, self._reads, log)
        self._upkeep = Upkeep(
            plan.settings,
            plan.state.index_digest,
            self._streams,
            self._start_is_over,
            self._note_use,
        )
        commands = {
            "status": self.status,
            "ready": self._ready_command,
            "detach": self._detach_command,
        }
        self._control = ControlServer(plan.state_dir, commands, plan.ready_name)
        if plan.state.user is not None:
            self._watch(plan.state.user)
        self.operations = TreeFileSystem(
            tree,
            self._streams,
            on_access=self._bundle.accessed
            if plan.settings.prefetch or plan.settings.record != "never"
            else None,
            owner=plan.options.owner,
            on_mounted=self._mounted,
            on_destroyed=self._destroyed,
        )

    # ---- life -----------------------------------------------------------------------------

    def _mounted(self) -> None:
        worker = os.getpid()
        state = replace(self._plan.state, worker_pid=worker, worker_started=start_time(worker))
        write_state(self._plan.state_dir, state)
        elapsed_s = (time.monotonic_ns() - self._log.started_ns) / 1e9
        window_s = max(self._plan.settings.record_window_s - elapsed_s, 0)
        self._control.start(
            lambda: self._end_record("ready"), window_s, lambda: self._end_record("window")
        )
        # Before the mount is announced, so that the bundle is on its way before the first read.
        if self._plan.settings.prefetch:
            self._bundle.begin(self.operations.store_pages)
        self._upkeep.start(self._figures)

    def _end_start(self) -> None:
        try:
            self._end_record("unmount")
        except (BootseerError, OSError) as error:
            _log.warning("the record of this start is lost: %s", error)

    def _destroyed(self) -> None:
        self._end_start()
        self._bundle.stop()
        self._control.close()
        self._upkeep.close()
        self._is_mounted = False
        self._upkeep.write_figures()
        # The process around us makes the cache durable when nobody waits for it any more.
        self._reads.close()
        self._streams.close(durable=False)
        self._store.close()

    def _watch(self, user: ProcessId) -> None:
        """Go when this process ends, unless others use what covers the tree. Raises: OSError."""
        state_dir = self._plan.state_dir
        if cover_users.is_kept(state_dir):
            return
        # A worker made anew after the first user has ended watches another one.
        self._control.watch(cover_users.next_user(state_dir) or user, self._user_ended)

    def _user_ended(self) -> None:
        state_dir = self._plan.state_dir
        is_container = self._plan.state.purpose == RUN
        if is_container:
            end_runc(state_dir)
        next_user = cover_users.last_user if is_container else cover_users.leave
        while (user := next_user(state_dir)) is not None:
            with contextlib.suppress(ProcessLookupError):
                self._control.watch(user, self._user_ended)
                # What another job reads of what lingers is no part of this start.
                self._end_start()
                return
        if not cover_users.is_kept(state_dir):
            self._unmount()

    def _unmount(self) -> None:
        _log.info("all users have ended: unmounting")
        if is_in_use(self._plan.state.scratch):
            # What is left of a container may read on.
            self._detach_command()
            return
        try:
            unmount(Path(self._plan.state.directory), timeout_s=_UNMOUNT_S)
        except InvalidInputError:
            # Taken off already: it lives on in a container's mounts only.
            _log.debug("%s is not mounted any more", self._plan.state.directory)

    def _detach_command(self) -> dict[str, Any]:
        """Take the mount off our own namespace: a namespace that copied it (a container's) keeps
        it, and with the last of those the kernel ends the connection."""
        # Nothing there: it is off already, which is all that was asked for.
        with contextlib.suppress(InvalidInputError):
            detach(Path(self._plan.state.directory), lazy=True)
        return {"detached": True}

    def _note_use(self) -> None:
        """Let garbage collectors know. What only this node has is not in the store."""
        stored = [blob.digest for blob in self._tree.blobs if len(blob.frames)]
        if stored:
            note_use(self._store, self._plan.state.index_digest, stored)

    def _note_damage(self, chunks: Sequence[Chunk]) -> None:
        """Note the damage of an environment for its next start, which can do something about it: a
        job that reads through a mapping gets a signal, and nobody a sentence."""
        keys = ", ".join(dict.fromkeys(chunk.key for chunk in chunks))
        _log.error("%s in %s is damaged", keys, self._store.url)
        if self._plan.state.purpose == ENVIRONMENT:
            note_damage(self._plan.settings.cache_dir, self._plan.state.index_digest, chunks)

    def _refuted(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """The bundle brought wrong bytes, somewhere in these ranges: the kernel may hold them."""
        self._bundle.drop()
        forget_pages = self.operations.forget_pages
        if forget_pages is None:
            return
        contents = StreamContents(self._tree)
        for number in {inode for one in ranges for inode in contents.inodes(*one)}:
            try:
                forget_pages(number + 1, 0, 0)
            except BootseerError as error:
                _log.warning("the kernel may hold wrong bytes of the image: %s", error)
                return

    def _start_is_over(self) -> bool:
        """Nothing is recorded any more, and no bundle is on its way."""
        replay = self._streams.replay
        return not self._log.is_open and (replay is None or replay.is_over)

    # ---- record ---------------------------------------------------------------------------

    def _ready_command(self) -> dict[str, Any]:
        self._end_record("ready")
        return {"record": self._record.value}

    def _end_record(self, ended: str) -> None:
        if not self._log.close():
            return
        self._note_on_timeline()
        plan = self._plan
        if plan.settings.record == "never":
            return
        self._record = Recording.ENDED
        entries = self._log.entries()
        if not entries:
            return
        replay = self._streams.replay
        failed = replay is not None and replay.state in (Replaying.GIVEN_UP, Replaying.REFUTED)
        if (
            plan.settings.record == "auto"
            and replay is not None
            and not failed
            and not is_worthwhile(self._bundle.accuracy(), self._bundle.own_trace_count, ended)
        ):
            self._record = Recording.NOT_NEEDED
            return
        info = RecordInfo(
            plan.state.index_digest,
            plan.state.reference,
            plan.state.workload,
            plan.settings.node,
            plan.state.started_ns,
            ended,
            plan.options.readahead_bytes,
            renew=self._bundle.is_damaged or failed,
        )
        self._publisher = start_publisher(plan.settings, plan.state.id, info, entries)
        self._publisher.go()
        self._record = Recording.PUBLISHING

    def _note_on_timeline(self) -> None:
        """What serving the start took, beside the stages of the start itself."""
        with stage("image served") as span:
            for name, value in span_attributes(self._figures()).items():
                span.set(name, value)

    # ---- status ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Everything that `status DIR` shows, as JSON values."""
        if self._publisher is not None and self._publisher.is_answered():
            publisher, self._publisher = self._publisher, None
            try:
                publisher.wait(0)
                self._record = Recording.PUBLISHED
            except BootseerError:
                self._record = Recording.FAILED
        times = os.times()
        return {
            **{name: getattr(self._plan.state, name) for name in _SHOWN},
            "worker_pid": os.getpid(),
            "uptime_s": (time.monotonic_ns() - self._log.started_ns) / 1e9,
            "cpu_s": times.user + times.system,
            "record": self._record.value,
            "access_count": len(self._log),
            **status_of(self._figures()),
        }

    def _figures(self) -> LaunchFigures:
        state, streams = self._plan.state, self._streams
        return LaunchFigures(
            image=state.reference,
            workload=state.workload,
            started_ns=state.started_ns,
            is_mounted=self._is_mounted,
            image_bytes=streams.image_bytes,
            cached_bytes=streams.cached_bytes,
            cache_is_full=streams.is_full,
            faults=streams.figures(),
            sources=streams.sources(),
            moved=streams.statistics(),
            prefetch=self._prefetch_figures(),
            fill=self._upkeep.fill_figures(),
        )

    def _prefetch_figures(self) -> PrefetchFigures | None:
        replay, pointer = self._streams.replay, self._bundle.pointer
        if replay is None:
            return None
        return prefetch_figures(
            replay,
            self._bundle.accuracy(),
            bundle=pointer.bundle_digest if pointer else None,
            bundle_index=pointer.index_digest if pointer else None,
        )
