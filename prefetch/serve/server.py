"""Server of a mounted tree, an image or an environment: `python -m` this module.

The process holds the mount and restarts its worker (`served.supervision`). The worker runs an
`ImageServer`: it answers the kernel, handles the start and control commands, and does the `Upkeep`.
Tree and access log outlive the worker, since they are made before it is forked.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.base.documents import from_line
from bootseer.base.requests import request_counts
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.fanout.local import SharedReads
from bootseer.fuse.kernel.options import KERNEL_DEADLINE_MAX_S, MountOptions
from bootseer.fuse.kernel.server import Attached
from bootseer.fuse.kernel.unmount import detach, unmount
from bootseer.linux.processes import ProcessId, start_time
from bootseer.prefetch.cache.damage import note_damage
from bootseer.prefetch.cache.indexes import read_kept_tree, remove_spare_indexes
from bootseer.prefetch.cache.limit import CacheRoom
from bootseer.prefetch.cache.node_cache import NodeCache, image_key_of
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.index.stream_contents import StreamContents
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.prefetch.reading.fill import Fill
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.reading.registry import LayerReader, second_source
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.figures import (
    FillFigures,
    LaunchFigures,
    render,
    span_attributes,
    status_of,
)
from bootseer.prefetch.serve.plan import ENVIRONMENT, READAHEAD_BYTES, SUBTYPE, ServePlan
from bootseer.prefetch.serve.start import Start
from bootseer.prefetch.serve.tree_fs import TreeFileSystem
from bootseer.served import users
from bootseer.served.control import ControlServer
from bootseer.served.ending import end_runc, is_in_use
from bootseer.served.figures_file import FiguresFile, file_name
from bootseer.served.processes import TREE, Report, serve
from bootseer.served.service import RUN, hold_folder, write_state
from bootseer.served.supervision.heartbeat import silence_for
from bootseer.served.supervision.supervisor import RestartPolicy, supervise
from bootseer.settings.config import Settings
from bootseer.store import Store, load_backend, open_own_store
from bootseer.store.objects.uses import note_use
from bootseer.timeline import stage
from bootseer.transfer.ranges import Chunk

_log = logging.getLogger(__name__)

_UNMOUNT_S = 10.0
_SHOWN = (
    *("id", "reference", "index_digest", "workload", "directory"),
    *("pid", "started_ns", "purpose", "scratch"),
)
"""Fields of the mount's state that `status` shows."""

_SWITCH_S = 0.0005
"""Interval after which a computing thread yields the interpreter to one that answers the kernel.
With Python's default of 5 ms, mounting an overlay over the tree took 80 ms."""

_KERNEL_DEADLINES = 10
_KERNEL_DEADLINE_MIN_S = 600
"""Time after which the kernel gives a server up: so many deadlines of the store, and at least this
many seconds. No read of a working server takes that long, even if many others wait for a silent
store."""

_RESTART_COUNT = 12
"""Restarts of a worker in ten seconds after which the mount ends, so that readers do not wait for a
worker that can never start."""

_ROUND_S = 15.0
"""Pause between two rounds of the upkeep: the default interval of Prometheus."""
_GROWN_BYTES = 256 * 2**20
"""Growth of the cache after which its limit is checked again."""
_REFUTED_CHECK_S = 1.0
"""Pause between two checks whether another server has refuted a bundle of the image. Until then,
the kernel may serve pages with wrong bytes."""
_CLOSE_S = 5.0
_NOTE_USE_S = 6 * 3600.0
"""Pause between two notes that the image is in use: short enough that one may fail before a garbage
collector takes the image for unused."""


def serve_image(plan: ServePlan, report: Report, await_index: Callable[[], object]) -> None:
    """Mount the tree and serve it until it is unmounted.

    `await_index` returns once the index is in the node's cache. Raises: BootseerError.
    """
    with hold_folder(plan.state_dir, plan.state) as life:
        plan = replace(plan, state=life.state)
        state = plan.state
        remove_spare_indexes(plan.settings.run_dir)
        await_index()
        tree = read_kept_tree(
            plan.settings.cache_dir,
            state.index_digest,
            checks=plan.options.checks_index,
            run_dir=plan.settings.run_dir,
        )
        log = AccessLog()

        def worker(attached: Attached) -> TreeFileSystem:
            sys.setswitchinterval(_SWITCH_S)
            named = replace(plan, state=replace(state, device_minor=attached.device_minor))
            return ImageServer(named, tree, log).operations

        options = MountOptions(
            name=state.reference.replace(",", "_"),
            subtype=SUBTYPE,
            read_only=True,
            # For processes of other users in a container. The kernel refuses it without root.
            allow_other=os.geteuid() == 0,
            max_readahead_bytes=READAHEAD_BYTES,
            invalidate_on_change=False,
            kernel_deadline_s=_kernel_deadline_s(plan),
            worker_silence_s=silence_for(plan.settings.deadline_s),
        )

        supervise(
            worker,
            Path(state.directory),
            options,
            report=report,
            restart=RestartPolicy(_RESTART_COUNT),
        )
    # At the end, because this may take long on a slow disk, and no process waits for it now.
    vouched = vouched_streams(
        plan.settings, plan.state.index_digest, tree.blobs, is_local=plan.options.is_local
    )
    NodeCache(plan.settings.cache_dir).make_durable(tree.blobs, vouched=vouched)


def _kernel_deadline_s(plan: ServePlan) -> int:
    wanted_s = int(_KERNEL_DEADLINES * plan.settings.deadline_s)
    return min(max(wanted_s, _KERNEL_DEADLINE_MIN_S), KERNEL_DEADLINE_MAX_S)


class ImageServer:
    """Worker of a mounted tree. `operations` answers the kernel."""

    def __init__(self, plan: ServePlan, tree: Tree, log: AccessLog) -> None:
        """Open store and cache. Raises: BootseerError, OSError."""
        image_key = image_key_of(plan.state.index_digest, plan.settings.store_url)
        self._plan = plan
        self._tree = tree
        self._log = log
        self._store: Store = open_own_store(plan.settings)
        self._is_mounted = True
        self._layers = LayerReader(plan.settings, self._store, plan.state.reference, tree.blobs)
        # Faults of most images need no detour through the reader of layers.
        has_layers = self._layers.is_needed
        read = self._layers.read_into if has_layers else self._store.read_verified
        self._reads = SharedReads(plan.settings, read)
        self._streams = ImageBytes(
            tree.blobs,
            self._reads.read,
            NodeCache(plan.settings.cache_dir),
            deadline_s=plan.settings.deadline_s,
            fill_bytes_per_s=plan.settings.fill_bytes_per_s or None,
            repair=second_source(plan.settings, plan.state.reference, image_key),
            on_damage=self._note_damage,
            image_key=image_key,
            vouched=vouched_streams(
                plan.settings,
                plan.state.index_digest,
                tree.blobs,
                is_local=plan.options.is_local,
            ),
            on_refuted=self._refuted,
            decode=self._layers.decode if has_layers else None,
        )
        self._start = Start(plan, tree, self._store, self._streams, self._reads, log)
        self._upkeep = Upkeep(
            plan.settings,
            plan.state.index_digest,
            self._streams,
            lambda: self._start.has_ended,
            self._note_use,
            self._figures,
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
            on_access=self._start.accessed
            if plan.settings.prefetch or plan.settings.record != "never"
            else None,
            owner=plan.options.owner,
            on_mounted=self._mounted,
            on_destroyed=self._destroyed,
        )

    # ---- beginning and end ----------------------------------------------------------------

    def _mounted(self) -> None:
        worker = os.getpid()
        state = replace(self._plan.state, worker_pid=worker, worker_started=start_time(worker))
        write_state(self._plan.state_dir, state)
        elapsed_s = (time.monotonic_ns() - self._log.started_ns) / 1e9
        window_s = max(self._plan.settings.record_window_s - elapsed_s, 0)
        self._control.start(
            lambda: self._end_record("ready"), window_s, lambda: self._end_record("window")
        )
        # Before the mount is reported, so that the replay begins before the first read.
        if self._plan.settings.prefetch:
            self._start.begin(self.operations.store_pages)
        self._upkeep.start()

    def _end_start(self) -> None:
        try:
            self._end_record("unmount")
        except (BootseerError, OSError) as error:
            _log.warning("cannot publish the record of this start: %s", error)

    def _destroyed(self) -> None:
        self._end_start()
        self._start.stop()
        self._control.close()
        self._upkeep.close()
        self._is_mounted = False
        self._upkeep.write_figures()
        # Without a flush to the disk: `serve_image` does that when no process waits any more.
        self._reads.close()
        self._streams.close(durable=False)
        self._layers.close()
        self._store.close()

    def _watch(self, user: ProcessId) -> None:
        """Unmount when this process ends and no other uses the tree. Raises: OSError."""
        state_dir = self._plan.state_dir
        if users.is_kept(state_dir):
            return
        # A worker that is restarted after the end of the first user watches the next one.
        self._control.watch(users.next_user(state_dir) or user, self._on_user_exit)

    def _on_user_exit(self) -> None:
        state_dir = self._plan.state_dir
        is_container = self._plan.state.purpose == RUN
        if is_container:
            end_runc(state_dir)
        next_user = users.last_user if is_container else users.unmount_if_unused
        while (user := next_user(state_dir)) is not None:
            with contextlib.suppress(ProcessLookupError):
                self._control.watch(user, self._on_user_exit)
                # The next user is another job: its reads are no part of this start.
                self._end_start()
                return
        if not users.is_kept(state_dir):
            self._unmount()

    def _unmount(self) -> None:
        _log.info("all users have ended: unmounting")
        if is_in_use(self._plan.state.scratch):
            # Processes that are left of the container may still read.
            self._detach_command()
            return
        try:
            unmount(Path(self._plan.state.directory), timeout_s=_UNMOUNT_S)
        except InvalidInputError:
            # Unmounted already, except in the mount namespace of a container.
            _log.debug("%s is not mounted any more", self._plan.state.directory)

    def _detach_command(self) -> dict[str, Any]:
        """Unmount in this process's mount namespace.

        A container's namespace, which has a copy of the mount, keeps it. The kernel ends the
        connection with the last copy.
        """
        # Raised if it is unmounted already.
        with contextlib.suppress(InvalidInputError):
            detach(Path(self._plan.state.directory), lazy=True)
        return {"detached": True}

    def _note_use(self) -> None:
        """Tell garbage collectors that the image is in use, if the store has any of it."""
        if not self._start.reads_store():
            return
        stored = [blob.digest for blob in self._tree.blobs if len(blob.frames)]
        if stored:
            note_use(self._store, self._plan.state.index_digest, stored)

    def _note_damage(self, chunks: Sequence[Chunk]) -> None:
        """Log damage of the store, and note that of an environment for its next start.

        The next start reports it. In this one, a job that reads through a mapping only gets a
        signal.
        """
        keys = ", ".join(dict.fromkeys(chunk.key for chunk in chunks))
        _log.error("%s in %s is damaged", keys, self._store.url)
        if self._plan.state.purpose == ENVIRONMENT:
            note_damage(self._plan.settings.cache_dir, self._plan.state.index_digest, chunks)

    def _refuted(self, ranges: Sequence[tuple[int, int, int]]) -> None:
        """Drop the pages of a bundle with wrong bytes from the kernel's page cache."""
        self._start.drop_bundle()
        forget_pages = self.operations.forget_pages
        if forget_pages is None:
            return
        contents = StreamContents(self._tree)
        for number in {inode for one in ranges for inode in contents.inodes(*one)}:
            try:
                forget_pages(number + 1, 0, 0)
            except BootseerError as error:
                _log.warning("cannot drop wrong bytes from the kernel's page cache: %s", error)
                return

    # ---- record ---------------------------------------------------------------------------

    def _ready_command(self) -> dict[str, Any]:
        self._end_record("ready")
        return {"record": self._start.recording.value}

    def _end_record(self, ended: str) -> None:
        if self._log.close():
            self._note_on_timeline()
            self._start.publish_record(ended)

    def _note_on_timeline(self) -> None:
        """Add the figures of serving to the timeline of the start."""
        with stage("image served") as span:
            for name, value in {**span_attributes(self._figures()), **request_counts()}.items():
                span.set(name, value)

    # ---- status ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return the values that `bootseer status DIR` shows, for JSON."""
        times = os.times()
        return {
            **{name: getattr(self._plan.state, name) for name in _SHOWN},
            "worker_pid": os.getpid(),
            "uptime_s": (time.monotonic_ns() - self._log.started_ns) / 1e9,
            "cpu_s": times.user + times.system,
            "record": self._start.recording.value,
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
            faults=streams.faults.snapshot(),
            sources=streams.sources(),
            moved=streams.fetcher.statistics(),
            prefetch=self._start.figures(),
            fill=self._upkeep.fill_figures(),
        )


class Upkeep:
    """Side work of one worker: a thread for checks, figures and notes of use, and the fill.

    After a crash of the machine, the streams are verified. The cache is kept below its limit, and
    bundles that another server has refuted are dropped. A failure never fails the start.
    """

    def __init__(
        self,
        settings: Settings,
        index_digest: str,
        streams: ImageBytes,
        start_has_ended: Callable[[], bool],
        note_use: Callable[[], None],
        figures: Callable[[], LaunchFigures],
    ) -> None:
        """Prepare the upkeep; `start` it once, and `close` it before the streams.

        `start_has_ended` returns whether the background fill may begin. `note_use` is called a few
        times a day.
        """
        self._settings = settings
        self._note_use = note_use
        self._figures = figures
        self._streams = streams
        self._rate = settings.fill_bytes_per_s
        self._room = CacheRoom(settings.cache_dir, settings.cache_limit_bytes)
        self._file = None
        if settings.metrics_dir is not None:
            self._file = FiguresFile(settings.metrics_dir)
        self._fill = None
        if self._rate:
            lock = NodeCache(settings.cache_dir).fill_lock(index_digest)
            self._fill = Fill(streams, start_has_ended, self._room.make_room, lock=lock)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if self._fill is not None:
            self._fill.start()

    def write_figures(self) -> None:
        """Write the figures for Prometheus, if the settings say so."""
        if self._file is not None:
            figures = self._figures()
            name = file_name("image", figures.image, figures.workload)
            self._file.write(name, lambda slot: render(figures, slot))

    def fill_figures(self) -> FillFigures:
        state = "off" if self._fill is None else self._fill.state
        missing_bytes = self._streams.image_bytes - self._streams.proven_bytes
        return FillFigures(state, self._rate, missing_bytes)

    def _run(self) -> None:
        # Removes the folders of publishers that were killed, as it checks which ones still run.
        wait_published(self._settings, 0)
        self._streams.verify(lambda: not self._stopping.is_set())
        trimmed_at_bytes = -_GROWN_BYTES
        note_at_s = time.monotonic()
        while not self._stopping.is_set():
            if time.monotonic() >= note_at_s:
                note_at_s += _NOTE_USE_S
                self._note_use()
            received = self._streams.fetcher.statistics().delivered_bytes
            if received - trimmed_at_bytes >= _GROWN_BYTES:
                trimmed_at_bytes = received
                self._room.make_room()
            self.write_figures()
            self._pause()

    def _pause(self) -> None:
        ends_s = time.monotonic() + _ROUND_S
        while (left_s := ends_s - time.monotonic()) > 0:
            self._streams.drop_refuted()
            if self._stopping.wait(min(_REFUTED_CHECK_S, left_s)):
                return

    def close(self) -> None:
        """End the threads and all transfers of the image. Idempotent."""
        self._stopping.set()
        if self._fill is not None:
            self._fill.stop()
        self._streams.fetcher.close()
        if self._fill is not None:
            self._fill.join(_CLOSE_S)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)


def main() -> int:
    """Run the server, and return its exit code."""
    return serve(TREE, _serve, _load)


def _load() -> None:
    # Loaded before the plan comes: mostly, the environment names the store of the plan.
    load_backend(os.environ.get("BOOTSEER_STORE", ""))


def _serve(line: bytes, report: Report) -> None:
    # The end of the input says that the index is in the node's cache; nothing is read from it.
    serve_image(from_line(line, ServePlan), report, sys.stdin.buffer.read)


if __name__ == "__main__":
    sys.exit(main())
