"""A start from a mounted tree: its record, its bundle, and the accuracy of the bundle.

The bundle is looked up, its frames are fetched (`bundle.replay`), and its names and pages are given
to the kernel ahead of the start (`bundle.preload`), while every access is recorded. When the start
has ended, the record is published, unless the bundle was accurate enough. The states are
`RecordState`, and `bundle.replay.ReplayState`.

Threading: a thread of its own looks the bundle up; `accessed` is thread-safe.
"""

import enum
import logging
import os
import threading
from functools import partial

from bootseer.blob.tree import Extent, Tree
from bootseer.errors import BootseerError, CorruptError
from bootseer.fanout.local import SharedReads
from bootseer.fanout.whole_reads import StartDocuments
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.accuracy import (
    BundleAccuracy,
    accuracy_of,
    is_worthwhile,
    scattered_inodes,
)
from bootseer.prefetch.bundle.file import BundleFile
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import (
    HotPointer,
    is_refused,
    keep_bundle,
    read_kept_bundle,
    refuse_bundle,
)
from bootseer.prefetch.bundle.preload import KernelPreload, StorePages, plan_preload
from bootseer.prefetch.bundle.replay import BundleReplay, ReplayState
from bootseer.prefetch.bundle.similar import reuse_bundle
from bootseer.prefetch.cache.node_cache import NodeCache, image_key_of
from bootseer.prefetch.publish.publishing import RecordInfo, start_publisher
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.figures import PrefetchFigures, prefetch_figures
from bootseer.prefetch.serve.plan import READAHEAD_BYTES, ServePlan
from bootseer.served.processes import Process
from bootseer.store import Store

_log = logging.getLogger(__name__)

_ROOT_S = 5.0
"""Time for which the tree's root is kept open while the bundle is looked up: an unmount has to wait
for that."""
_LOOKED_UP_S = 10.0
"""Longest wait of a note of use for the lookup of the bundle."""


class RecordState(enum.Enum):
    """State of the record of one start. `bootseer status` shows the values."""

    OFF = "off"
    OPEN = "recording"
    ENDED = "ended"
    """The record is complete. It stays in this state if it has no access."""
    NOT_NEEDED = "not needed"
    """The bundle was accurate enough."""
    PUBLISHING = "publishing"
    PUBLISHED = "published"
    FAILED = "failed"
    """The publisher failed."""


_WRONG = frozenset((ReplayState.REFUSED, ReplayState.REFUTED, ReplayState.GIVEN_UP))
"""States after which the bundle in the store must be made anew."""
_UNDER_WAY = frozenset((ReplayState.LOOKING, ReplayState.FOLLOWING, ReplayState.FETCHING))


class Start:
    """Start that one worker serves.

    `begin` it once the tree is mounted; `stop` it before the streams are closed.
    """

    def __init__(
        self,
        plan: ServePlan,
        tree: Tree,
        store: Store,
        streams: ImageBytes,
        reads: SharedReads,
        log: AccessLog,
    ) -> None:
        self._plan = plan
        self._cache = NodeCache(plan.settings.cache_dir)
        self._tree = tree
        self._store = store
        self._streams = streams
        self._reads = reads
        self._log = log
        self._recording = RecordState.OPEN if log.is_open else RecordState.ENDED
        if plan.settings.record == "never":
            self._recording = RecordState.OFF
        self._publisher: Process | None = None
        self._without_replay = ReplayState.NONE
        self._pointer: HotPointer | None = None
        self._scattered: frozenset[int] = frozenset()
        """Inodes of files that are left out, because each start reads different bytes of them."""
        self._accuracy_at_end: BundleAccuracy | None = None
        self._preload: KernelPreload | None = None
        self._root = -1
        self._lock = threading.Lock()
        self._reads_store = True
        self._has_looked = threading.Event()

    @property
    def replay_state(self) -> ReplayState:
        """State of the bundle."""
        replay = self._streams.replay
        return self._without_replay if replay is None else replay.state

    @property
    def has_ended(self) -> bool:
        """Whether the record is complete and the replay has ended."""
        return not self._log.is_open and self.replay_state not in _UNDER_WAY

    def reads_store(self) -> bool:
        """Return `StartDocuments.reads_store`, after the lookup of the bundle or a time-out."""
        if self._plan.settings.fanout and self._plan.settings.prefetch:
            self._has_looked.wait(_LOOKED_UP_S)
        return self._reads_store

    # ---- beginning and end ----------------------------------------------------------------

    def begin(self, store_pages: StorePages | None) -> None:
        """Look up and replay the bundle in the background. `store_pages`: see `Operations`."""
        self._without_replay = ReplayState.LOOKING
        self._open_root()
        self._streams.expect_bundle(has_fanout=self._plan.settings.fanout)
        args = (store_pages,)
        threading.Thread(target=self._begin, args=args, name="bundle", daemon=True).start()

    def accessed(self, inode: int, offset: int, length: int) -> None:
        """Record that the kernel reads bytes of a file."""
        self._log.append(inode, offset, length)
        if self._preload is not None:
            self._preload.touched(inode, offset)

    def drop_bundle(self) -> None:
        """Stop the preload, since a server has found wrong bytes in the bundle."""
        self._without_replay = ReplayState.REFUSED
        if self._preload is not None:
            self._preload.stop()

    def stop(self) -> None:
        """Stop the preload, since the caches are about to be closed. Idempotent."""
        self._close_root()
        with self._lock:
            if self._preload is not None:
                self._preload.stop()

    def _begin(self, store_pages: StorePages | None) -> None:
        index, workload = self._plan.state.index_digest, self._plan.state.workload
        ended = ReplayState.NONE
        try:
            found = self._find()
            if found is None:
                _log.info("no bundle for %s yet", workload)
                return
            self._pointer, bundle, file = found
            self._scattered = scattered_inodes(self._tree, self._pointer.scattered)
            digest = self._pointer.bundle_digest
            replay = BundleReplay(
                file,
                digest,
                self._streams.streams,
                self._streams.fetcher,
                # A similar image's bundle is kept in a file of this image, which only servers of
                # this image fill.
                lock=self._cache.replay_lock(
                    digest if self._pointer.index_digest == index else index,
                    self._plan.settings.store_url,
                ),
                reads=self._reads,
                url=self._plan.settings.store_url,
            )
            # Before faults know of the replay, since it first finds the frames that are present.
            replay.start()
            refuse = partial(refuse_bundle, self._plan.settings, workload, self._pointer)
            self._streams.use(file, refuse, replay)
            if self._root >= 0:
                self._begin_preload(bundle, replay, store_pages)
        except CorruptError as error:
            ended = ReplayState.REFUSED
            _log.warning("no bundle is used: %s", error)
        except BootseerError as error:
            _log.warning("no bundle is used: %s", error)
        finally:
            if self._without_replay is ReplayState.LOOKING:
                self._without_replay = ended
            self._streams.use(None)
            self._close_root()
            self._has_looked.set()

    # ---- lookup of the bundle -------------------------------------------------------------

    def _find(self) -> tuple[HotPointer, Bundle, BundleFile] | None:
        """Return a bundle for this image and workload, with its pointer and file; None if none.

        The bundle that this node kept is taken if all of its bytes are on this node, without asking
        the store for a newer one: the store may be down. Else it is the image's bundle in the
        store, or else that of a similar image. Raises: CorruptError if this node refuses the
        bundle; BootseerError.
        """
        settings, state, streams = self._plan.settings, self._plan.state, self._streams
        lengths = [blob.stream_length for blob in self._tree.blobs]
        file: BundleFile | None = None
        kept = read_kept_bundle(settings, state.index_digest, state.workload, lengths)
        if kept is not None and not is_refused(settings, state.workload, kept[0]):
            file = self._open(kept[1])
            # Before the store is asked, so that faults can read the file at once.
            streams.use(file, partial(refuse_bundle, settings, state.workload, kept[0]))
            if file.is_whole(streams.streams):
                hot_store.decline_header(settings, kept[0])
                return *kept, file
        if not settings.fanout:
            # A fault goes to the store while the bundle is looked up there. With a fan-out all
            # nodes would send the same fault.
            streams.use(None)
        documents = StartDocuments(settings, self._store)
        pointer = hot_store.read_pointer(documents, state.index_digest, state.workload)
        self._reads_store = documents.reads_store
        if pointer is None:
            borrowed = reuse_bundle(
                settings,
                self._store,
                state.index_digest,
                state.reference,
                state.workload,
                self._tree,
            )
            if borrowed is None:
                return None
            pointer, bundle = borrowed
            self._check_refused(pointer)
        else:
            self._check_refused(pointer)
            if kept is not None and file is not None and kept[0] == pointer:
                hot_store.decline_header(settings, pointer)
                return *kept, file
            header = hot_store.read_header(self._store, pointer, settings)
            bundle = hot_store.decode_bundle(header, pointer, lengths, self._store.url)
            keep_bundle(settings, state.workload, pointer, header)
        return pointer, bundle, self._open(bundle)

    def _open(self, bundle: Bundle) -> BundleFile:
        image_key = image_key_of(self._plan.state.index_digest, self._plan.settings.store_url)
        return BundleFile(self._cache, bundle, image_key, len(self._tree.blobs))

    def _check_refused(self, pointer: HotPointer) -> None:
        if is_refused(self._plan.settings, self._plan.state.workload, pointer):
            raise CorruptError(
                f"the bundle {pointer.bundle_digest} brought bytes that are not those of the "
                "image, and is not used again"
            )

    # ---- preload --------------------------------------------------------------------------

    def _open_root(self) -> None:
        # A record that the user asked for must not contain pages that the preload stored.
        if self._plan.settings.record == "always":
            return
        try:
            # Before the mount is reported, since its caller may move or unmount it. O_PATH sends
            # no request to the file system, which this process serves.
            self._root = os.open(self._plan.state.directory, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            _log.debug("names and pages are not preloaded: %s", error)
            return
        timer = threading.Timer(_ROOT_S, self._close_root)
        timer.daemon = True
        timer.start()

    def _close_root(self) -> None:
        with self._lock:
            root, self._root = self._root, -1
        if root >= 0:
            os.close(root)

    def _begin_preload(
        self, bundle: Bundle, replay: BundleReplay, store_pages: StorePages | None
    ) -> None:
        preload = KernelPreload(
            plan_preload(self._tree, bundle.frames),
            self._streams.get,
            store_pages,
            self._log.append_preloaded,
            lambda: replay.has_ended,
        )
        with self._lock:
            if self._root < 0:
                return
            root, self._root = self._root, -1
            preload.start(root)
            self._preload = preload

    # ---- the record -----------------------------------------------------------------------

    @property
    def recording(self) -> RecordState:
        """State of the record. One thread at a time."""
        if self._publisher is not None and self._publisher.is_answered():
            publisher, self._publisher = self._publisher, None
            try:
                publisher.wait(0)
                self._recording = RecordState.PUBLISHED
            except BootseerError:
                self._recording = RecordState.FAILED
        return self._recording

    def publish_record(self, ended: str) -> None:
        """Publish the record, in the background, unless the bundle was accurate enough.

        The log must be closed. `ended`: event that ended the start, "ready", "window" or "unmount".
        Raises: BootseerError, OSError.
        """
        plan = self._plan
        if self._recording is RecordState.OFF:
            return
        self._recording = RecordState.ENDED
        entries = self._log.entries()
        if not entries:
            return
        is_wrong = self.replay_state in _WRONG
        if (
            plan.settings.record == "auto"
            and self._streams.replay is not None
            and not is_wrong
            and not is_worthwhile(self.accuracy(), self._own_trace_count, ended)
        ):
            self._recording = RecordState.NOT_NEEDED
            return
        info = RecordInfo(
            plan.state.index_digest,
            plan.state.reference,
            plan.state.workload,
            plan.settings.node,
            plan.state.started_ns,
            ended,
            READAHEAD_BYTES,
            renew=is_wrong,
        )
        self._publisher = start_publisher(plan.settings, plan.state.id, info, entries)
        self._publisher.go()
        self._recording = RecordState.PUBLISHING

    # ---- accuracy of the bundle -----------------------------------------------------------

    @property
    def _own_trace_count(self) -> int:
        """Number of traces of this image that the bundle was made from."""
        pointer = self._pointer
        if pointer is None or pointer.index_digest != self._plan.state.index_digest:
            return 0
        return pointer.trace_count

    def accuracy(self) -> BundleAccuracy:
        """Return the accuracy of the bundle so far. Final once the log is closed."""
        if self._accuracy_at_end is not None:
            return self._accuracy_at_end
        has_ended = not self._log.is_open
        replay = self._streams.replay
        lengths = [blob.stream_length for blob in self._tree.blobs]
        bundle = replay.bundle if replay else None
        accuracy = accuracy_of(bundle, lengths, self._log.entries(), self._extents)
        if has_ended and replay is not None:
            self._accuracy_at_end = accuracy
        return accuracy

    def _extents(self, inode: int) -> tuple[Extent, ...]:
        return () if inode in self._scattered else self._tree.inode(inode).extents

    def figures(self) -> PrefetchFigures | None:
        """Return the figures of the bundle; None if no bundle is used."""
        replay, pointer = self._streams.replay, self._pointer
        if replay is None:
            return None
        return prefetch_figures(
            replay,
            self.accuracy(),
            bundle=pointer.bundle_digest if pointer else None,
            bundle_index=pointer.index_digest if pointer else None,
        )
