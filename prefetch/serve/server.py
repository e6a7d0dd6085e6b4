"""The process behind a mounted tree, an image's or an environment's: `python -m` this module.

The process itself holds the mount and restarts its worker (`fuse.kernel`'s supervisor). A worker is
an `ImageServer`: streams, one start, upkeep and control, around a tree and an access log that
outlive it.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.base.documents import from_line
from bootseer.base.requests import counted
from bootseer.blob.tree import Tree
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.fanout.local import SharedReads
from bootseer.fuse.kernel.options import KERNEL_DEADLINE_MAX_S, MountOptions
from bootseer.fuse.kernel.server import Attached
from bootseer.fuse.kernel.unmount import detach, unmount
from bootseer.linux.processes import ProcessId, start_time
from bootseer.prefetch.cache.damage import note_damage
from bootseer.prefetch.cache.kept_indexes import read_kept_tree, remove_spare_indexes
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.index.stream_contents import StreamContents
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.reading.registry_layers import LayerReader
from bootseer.prefetch.reading.repairs import second_source
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.figures import LaunchFigures, span_attributes, status_of
from bootseer.prefetch.serve.plan import ENVIRONMENT, READAHEAD_BYTES, SUBTYPE, ServePlan
from bootseer.prefetch.serve.start import Start
from bootseer.prefetch.serve.tree_fs import TreeFileSystem
from bootseer.prefetch.serve.upkeep import Upkeep
from bootseer.served import cover_users
from bootseer.served.control import ControlServer
from bootseer.served.ending import end_runc, is_in_use
from bootseer.served.folders import RUN, write_state
from bootseer.served.life import living
from bootseer.served.processes import TREE, Report, serve
from bootseer.served.supervision.heartbeat import silence_for
from bootseer.served.supervision.supervisor import supervise
from bootseer.served.supervision.worker import RestartPolicy
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
"""The fields of the mount's state that its status shows."""

_SWITCH_S = 0.0005
"""A thread that computes, as for a bundle's start, keeps the interpreter this long from one that
answers the kernel, which asks for few things at a time: in 5 ms each, Python's default, an overlay
over the tree took 80 ms to mount."""

_KERNEL_DEADLINES = 10
_KERNEL_DEADLINE_MIN_S = 600
"""What no read takes that we live to answer, however many others wait for a silent store: of the
store's deadlines, and at least."""

_RESTART_COUNT = 12
"""Restarts of a worker in ten seconds; pauses grow to a second, so one that can never start ends
readers' waits then."""


def serve_image(plan: ServePlan, report: Report, await_index: Callable[[], object]) -> None:
    """Mount and serve until unmounted. The index is in the node's cache when `await_index` returns.

    Raises: BootseerError.
    """
    with living(plan.state_dir, plan.state) as life:
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
            allow_other=plan.allow_other,
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
    # Nobody waits for this: a slow disk takes its time for what a start brought.
    vouched = vouched_streams(
        plan.settings, plan.state.index_digest, tree.blobs, is_local=plan.options.is_local
    )
    NodeCache(plan.settings.cache_dir).make_durable(tree.blobs, vouched=vouched)


def _kernel_deadline_s(plan: ServePlan) -> int:
    wanted_s = int(_KERNEL_DEADLINES * plan.settings.deadline_s)
    return min(max(wanted_s, _KERNEL_DEADLINE_MIN_S), KERNEL_DEADLINE_MAX_S)


class ImageServer:
    """One worker's life: `operations` for the kernel, `destroyed` at its end."""

    def __init__(self, plan: ServePlan, tree: Tree, log: AccessLog) -> None:
        """Raises: BootseerError, OSError."""
        self._plan = plan
        self._tree = tree
        self._log = log
        self._store: Store = open_own_store(plan.settings)
        self._is_mounted = True
        self._layers = LayerReader(plan.settings, self._store, plan.state.reference, tree.blobs)
        self._reads = SharedReads(plan.settings, self._layers.read_into)
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
            decode=self._layers.decode,
        )
        self._start = Start(plan, tree, self._store, self._streams, self._reads, log)
        self._upkeep = Upkeep(
            plan.settings,
            plan.state.index_digest,
            self._streams,
            lambda: self._start.is_over,
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
            on_access=self._start.accessed
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
            self._start.begin(self.operations.store_pages)
        self._upkeep.start(self._figures)

    def _end_start(self) -> None:
        try:
            self._end_record("unmount")
        except (BootseerError, OSError) as error:
            _log.warning("the record of this start is lost: %s", error)

    def _destroyed(self) -> None:
        self._end_start()
        self._start.stop()
        self._control.close()
        self._upkeep.close()
        self._is_mounted = False
        self._upkeep.write_figures()
        # The process around us makes the cache durable when nobody waits for it any more.
        self._reads.close()
        self._streams.close(durable=False)
        self._layers.close()
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
        self._start.drop()
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

    # ---- record ---------------------------------------------------------------------------

    def _ready_command(self) -> dict[str, Any]:
        self._end_record("ready")
        return {"record": self._start.recording.value}

    def _end_record(self, ended: str) -> None:
        if self._log.close():
            self._note_on_timeline()
            self._start.publish_record(ended)

    def _note_on_timeline(self) -> None:
        """What serving the start took, beside the stages of the start itself."""
        with stage("image served") as span:
            for name, value in {**span_attributes(self._figures()), **counted()}.items():
                span.set(name, value)

    # ---- status ---------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Everything that `status DIR` shows, as JSON values."""
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
            faults=streams.figures(),
            sources=streams.sources(),
            moved=streams.statistics(),
            prefetch=self._start.figures(),
            fill=self._upkeep.fill_figures(),
        )


def main() -> int:
    """The exit code: 0 after an unmount."""
    return serve(TREE, _serve, _load)


def _load() -> None:
    # No plan has named a store yet, and mostly this is it.
    load_backend(os.environ.get("BOOTSEER_STORE", ""))


def _serve(line: bytes, report: Report) -> None:
    # Nothing follows in the input, but it ends only when the tree's index is there.
    serve_image(from_line(line, ServePlan), report, sys.stdin.buffer.read)


if __name__ == "__main__":
    sys.exit(main())
