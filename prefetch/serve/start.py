"""One start from a mounted tree: its record, its bundle, and how well the two met.

A bundle is found, its frames come into the cache (`bundle.replay`), and its names and pages are
given to the kernel ahead (`bundle.kernel_preload`), while every access is noted. When the start is
over, the record is published, unless the bundle met it well. Two enums say how far that is:
`Recording` here, `Replaying` in `bundle.replay`.

Threading: one thread of its own finds the bundle; `accessed` from any thread.
"""

import enum
import logging
import os
import threading
from functools import partial

from bootseer.blob.tree import Extent, Tree
from bootseer.errors import BootseerError, CorruptError
from bootseer.fanout.local import SharedReads
from bootseer.prefetch.bundle import hot_store
from bootseer.prefetch.bundle.bundle_accuracy import (
    BundleAccuracy,
    accuracy_of,
    is_worthwhile,
    scattered_inodes,
)
from bootseer.prefetch.bundle.bundle_reuse import reuse_bundle
from bootseer.prefetch.bundle.file import BundleFile
from bootseer.prefetch.bundle.format import Bundle
from bootseer.prefetch.bundle.hot_store import HotPointer
from bootseer.prefetch.bundle.kept_bundle import is_refused, keep_bundle, kept_bundle, refuse_bundle
from bootseer.prefetch.bundle.kernel_preload import KernelPreload, StorePages
from bootseer.prefetch.bundle.preload_plan import plan_preload
from bootseer.prefetch.bundle.replay import Replay, Replaying
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.publish.publishing import RecordInfo, start_publisher
from bootseer.prefetch.reading.image_bytes import ImageBytes
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.figures import PrefetchFigures, prefetch_figures
from bootseer.prefetch.serve.plan import READAHEAD_BYTES, ServePlan
from bootseer.served.processes import Process
from bootseer.store import Store

_log = logging.getLogger(__name__)

_ROOT_S = 5.0
"""How long the tree's root is kept open for a bundle that is still looked for: the mount is in use
meanwhile, and an unmount waits."""


class Recording(enum.Enum):
    """State of the record of one start; the values are those of `bootseer status`."""

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


_WRONG = frozenset((Replaying.REFUSED, Replaying.REFUTED, Replaying.GIVEN_UP))
"""States in which the bundle in the store is to be made anew."""
_UNDER_WAY = frozenset((Replaying.LOOKING, Replaying.FOLLOWING, Replaying.FETCHING))


class Start:
    """The start that one worker serves. `begin` it once the tree is mounted; `stop` it before the
    streams close."""

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
        self._tree = tree
        self._store = store
        self._streams = streams
        self._reads = reads
        self._log = log
        self._recording = Recording.OPEN if log.is_open else Recording.ENDED
        if plan.settings.record == "never":
            self._recording = Recording.OFF
        self._publisher: Process | None = None
        self._without_replay = Replaying.NONE
        self._pointer: HotPointer | None = None
        self._scattered: frozenset[int] = frozenset()
        """Files of which each start reads other bytes: no bundle could meet them."""
        self._accuracy_at_end: BundleAccuracy | None = None
        self._preload: KernelPreload | None = None
        self._root = -1
        self._lock = threading.Lock()

    @property
    def replaying(self) -> Replaying:
        """How far the bundle is."""
        replay = self._streams.replay
        return self._without_replay if replay is None else replay.state

    @property
    def is_over(self) -> bool:
        """Whether nothing is recorded any more, and no bundle is on its way."""
        return not self._log.is_open and self.replaying not in _UNDER_WAY

    # ---- life -----------------------------------------------------------------------------

    def begin(self, store_pages: StorePages | None) -> None:
        """Look for a bundle and use it; returns at once."""
        self._without_replay = Replaying.LOOKING
        self._open_root()
        self._streams.expect_bundle()
        args = (store_pages,)
        threading.Thread(target=self._begin, args=args, name="bundle", daemon=True).start()

    def accessed(self, inode: int, offset: int, length: int) -> None:
        """Note that the kernel asks for bytes of a file."""
        self._log.append(inode, offset, length)
        if self._preload is not None:
            self._preload.touched(inode, offset)

    def drop(self) -> None:
        """Hand nothing more over to the kernel: a server found the bundle's bytes to be wrong."""
        self._without_replay = Replaying.REFUSED
        if self._preload is not None:
            self._preload.stop()

    def stop(self) -> None:
        """Hand nothing more over to the kernel: the caches are about to be closed. Idempotent."""
        self._close_root()
        with self._lock:
            if self._preload is not None:
                self._preload.stop()

    def _begin(self, store_pages: StorePages | None) -> None:
        index, workload = self._plan.state.index_digest, self._plan.state.workload
        ended = Replaying.NONE
        try:
            found = self._find()
            if found is None:
                _log.info("no bundle for %s yet", workload)
                return
            self._pointer, bundle, file = found
            self._scattered = scattered_inodes(self._tree, self._pointer.scattered)
            digest = self._pointer.bundle_digest
            replay = Replay(
                file,
                digest,
                self._streams.streams,
                self._streams.fetcher,
                # What is borrowed goes into a file of this image: no other server brings it.
                lock=NodeCache(self._plan.settings.cache_dir).replay_lock(
                    digest if self._pointer.index_digest == index else index,
                    self._plan.settings.store_url,
                ),
                reads=self._reads,
                url=self._plan.settings.store_url,
            )
            # Known to faults only once it knows itself what is here already.
            replay.start()
            refuse = partial(refuse_bundle, self._plan.settings, workload, self._pointer)
            self._streams.use(file, refuse, replay)
            if self._root >= 0:
                self._begin_preload(bundle, replay, store_pages)
        except CorruptError as error:
            ended = Replaying.REFUSED
            _log.warning("no bundle is used: %s", error)
        except BootseerError as error:
            _log.warning("no bundle is used: %s", error)
        finally:
            if self._without_replay is Replaying.LOOKING:
                self._without_replay = ended
            self._streams.use(None)
            self._close_root()

    # ---- which bundle: the one that the node has all of, the image's own, or a relative's ---

    def _find(self) -> tuple[HotPointer, Bundle, BundleFile] | None:
        """The bundle for this image and workload, its pointer and its file; None if there is none.

        A bundle of which every byte is on this node is taken without asking the store, which may be
        down, for a newer one: nothing is left to fetch. Raises: BootseerError; CorruptError for a
        bundle that was refused before.
        """
        settings, state, streams = self._plan.settings, self._plan.state, self._streams
        lengths = [blob.stream_length for blob in self._tree.blobs]
        file: BundleFile | None = None
        kept = kept_bundle(settings, state.index_digest, state.workload, lengths)
        if kept is not None and not is_refused(settings, state.workload, kept[0]):
            file = self._open(kept[1])
            # Faults need not wait for the store's word.
            streams.use(file, partial(refuse_bundle, settings, state.workload, kept[0]))
            if file.is_whole(streams.streams):
                return *kept, file
        streams.use(None)
        pointer = hot_store.read_pointer(self._store, state.index_digest, state.workload)
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
                return *kept, file
            header = hot_store.read_header(self._store, pointer)
            bundle = hot_store.decode_bundle(header, pointer, lengths, self._store.url)
            keep_bundle(settings, state.workload, pointer, header)
        return pointer, bundle, self._open(bundle)

    def _open(self, bundle: Bundle) -> BundleFile:
        cache = NodeCache(self._plan.settings.cache_dir)
        return BundleFile(cache, bundle, self._plan.owner, len(self._tree.blobs))

    def _check_refused(self, pointer: HotPointer) -> None:
        if is_refused(self._plan.settings, self._plan.state.workload, pointer):
            raise CorruptError(
                f"the bundle {pointer.bundle_digest} brought bytes that are not those of the "
                "image, and is not used again"
            )

    # ---- preload --------------------------------------------------------------------------

    def _open_root(self) -> None:
        # A record that was asked for says what was read, not what was read by others before.
        if self._plan.settings.record == "always":
            return
        try:
            # Before the mount is announced: it may be taken off its place at once. O_PATH asks the
            # file system, which is ours, nothing.
            self._root = os.open(self._plan.state.directory, os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            _log.debug("the kernel is given nothing before the start asks: %s", error)
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
        self, bundle: Bundle, replay: Replay, store_pages: StorePages | None
    ) -> None:
        preload = KernelPreload(
            plan_preload(self._tree, bundle.frames),
            self._streams.get,
            store_pages,
            self._log.append_preloaded,
            lambda: replay.is_over,
        )
        with self._lock:
            if self._root < 0:
                return
            root, self._root = self._root, -1
            preload.start(root)
            self._preload = preload

    # ---- the record -----------------------------------------------------------------------

    @property
    def recording(self) -> Recording:
        """How far the record is. One thread at a time."""
        if self._publisher is not None and self._publisher.is_answered():
            publisher, self._publisher = self._publisher, None
            try:
                publisher.wait(0)
                self._recording = Recording.PUBLISHED
            except BootseerError:
                self._recording = Recording.FAILED
        return self._recording

    def publish_record(self, ended: str) -> None:
        """Have the record, which takes no more, published, unless nobody needs it. `ended` says by
        what the start was over. Raises: BootseerError, OSError."""
        plan = self._plan
        if self._recording is Recording.OFF:
            return
        self._recording = Recording.ENDED
        entries = self._log.entries()
        if not entries:
            return
        is_wrong = self.replaying in _WRONG
        if (
            plan.settings.record == "auto"
            and self._streams.replay is not None
            and not is_wrong
            and not is_worthwhile(self.accuracy(), self._own_trace_count, ended)
        ):
            self._recording = Recording.NOT_NEEDED
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
        self._recording = Recording.PUBLISHING

    # ---- how well the bundle met what was read --------------------------------------------

    @property
    def _own_trace_count(self) -> int:
        """How many starts of this very image the bundle was made from."""
        pointer = self._pointer
        if pointer is None or pointer.index_digest != self._plan.state.index_digest:
            return 0
        return pointer.trace_count

    def accuracy(self) -> BundleAccuracy:
        """Return how well the bundle met the log so far; final once the log is closed."""
        if self._accuracy_at_end is not None:
            return self._accuracy_at_end
        is_over = not self._log.is_open
        replay = self._streams.replay
        lengths = [blob.stream_length for blob in self._tree.blobs]
        bundle = replay.bundle if replay else None
        accuracy = accuracy_of(bundle, lengths, self._log.entries(), self._extents)
        if is_over and replay is not None:
            self._accuracy_at_end = accuracy
        return accuracy

    def _extents(self, inode: int) -> tuple[Extent, ...]:
        return () if inode in self._scattered else self._tree.inode(inode).extents

    def figures(self) -> PrefetchFigures | None:
        """Return the figures of the bundle; None where none is used."""
        replay, pointer = self._streams.replay, self._pointer
        if replay is None:
            return None
        return prefetch_figures(
            replay,
            self.accuracy(),
            bundle=pointer.bundle_digest if pointer else None,
            bundle_index=pointer.index_digest if pointer else None,
        )
