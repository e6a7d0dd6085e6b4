"""What of a bundle is on the node's disk already is read into memory, in the order of use.

After a reboot, or when the page cache has been needed for something else, a complete image starts
from a cold disk, and its first reads come in small pieces all over the cache. The bundle knows
which will be wanted. Planning is pure; `StreamCache.read_ahead` only gives the kernel a hint.
"""

from collections.abc import Iterator, Sequence

from bootseer.prefetch.bundle.format import BundleExtent, BundleFrame

_WINDOW_FRAMES = 16
"""8 MiB: sorted by place within so much, by use beyond."""
_GAP_BYTES = 32 * 1024
"""Less than this between two pieces is read along: a disk moves it in less than a seek takes."""


def disk_runs(frames: Sequence[BundleFrame]) -> Iterator[BundleExtent]:
    """The bytes of `frames` as few long pieces, roughly in the frames' order. Pure."""
    for first in range(0, len(frames), _WINDOW_FRAMES):
        window = frames[first : first + _WINDOW_FRAMES]
        run: BundleExtent | None = None
        for extent in sorted(extent for frame in window for extent in frame.extents):
            end = extent.offset + extent.length
            if (
                run is not None
                and run.blob == extent.blob
                and extent.offset <= run.offset + run.length + _GAP_BYTES
            ):
                run = run._replace(length=max(run.length, end - run.offset))
                continue
            if run is not None:
                yield run
            run = extent
        if run is not None:
            yield run
