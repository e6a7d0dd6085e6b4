"""After a start: the image that it pulled, and its trace, hot set and bundle, published in the
background.

Each runs as a process of its own (`served.processes`), at the lowest priority, so that it neither
disturbs the job whose start it follows nor ends with it. It has a folder under
`run_dir/publishing`, whose lock it holds until all is published. Whatever happens
here costs later launches their bundle, or a pull, and nothing else; nothing is visible that is not
whole. What publishing needs is loaded by its own process only.
"""

import contextlib
import logging
import os
import shutil
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.errors import BootseerError
from bootseer.linux.private_files import private_directory, write_private_file
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.served.folders import (
    PUBLISH,
    MountState,
    is_alive,
    live_mounts,
    lock_new,
    write_state,
)
from bootseer.served.processes import PUBLISHER, Process, Report, serve, start
from bootseer.settings.config import Settings
from bootseer.store import open_own_store

if TYPE_CHECKING:
    from bootseer.prefetch.bundle.hot_store import HotPointer

_log = logging.getLogger(__name__)

_ENTRY = struct.Struct("<QQQQ")
_NICENESS = 15
_BEGUN = "begun"
_BEGINS_S = 60.0
"""So long a publisher that was begun may take until it holds its folder's lock."""
_START_S = 180.0
"""More than a start is recorded for."""
_START_POLL_S = 0.5


class RecordInfo(Struct, frozen=True):
    """What a publisher must know besides the accesses."""

    index_digest: str
    reference: str
    """What the image was started as."""
    workload: str
    node: str
    started_ns: int
    ended: str
    readahead_bytes: int
    renew: bool
    """The bundle was found damaged."""


class _Job(Struct, frozen=True):
    """What is to be published: a record, an image of this node, or one that containerd has."""

    settings: Settings
    info: RecordInfo | None = None
    image: str = ""
    """The digest of its index."""
    content: Path | None = None
    """Containerd's store, which has the layers of `chain`."""
    chain: str = ""


class _Plan(Struct, frozen=True):
    job: _Job
    directory: Path


def publishing_dir(settings: Settings) -> Path:
    """Where records wait for being published."""
    return settings.run_dir / "publishing"


def start_publisher(
    settings: Settings,
    identity: str,
    info: RecordInfo,
    entries: Sequence[tuple[int, int, int, int]],
) -> Process:
    """Hand a record to a new publisher process and return at once: it answers when all is
    published. Raises: BootseerError, OSError."""
    return _start(
        identity, _Job(settings, info), b"".join(_ENTRY.pack(*entry) for entry in entries)
    )


def start_image_publisher(settings: Settings, index_digest: str) -> None:
    """Have an image that this node pulled published by a process that is no child of ours: the
    program that calls this may become another program. Raises: OSError."""
    identity = f"image-{index_digest.partition(':')[2][:16]}"
    if not _is_busy(settings, identity):
        _start(identity, _Job(settings, image=index_digest)).leave()


def start_chain_publisher(settings: Settings, content: Path, chain_id: str) -> bool:
    """Have the image that containerd has in its store `content`, and whose layers make this chain,
    indexed by a process that is no child of ours. False while another such image is. Raises:
    OSError.
    """
    if _is_busy(settings, "chain"):
        return False
    identity = f"chain-{chain_id.partition(':')[2][:16]}"
    _start(identity, _Job(settings, content=content, chain=chain_id)).leave()
    return True


def _is_busy(settings: Settings, prefix: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return any(map(_is_at_work, publishing_dir(settings).glob(f"{prefix}-*")))
    return False


def _start(identity: str, job: _Job, accesses: bytes = b"") -> Process:
    settings = job.settings
    directory = private_directory(publishing_dir(settings) / f"{identity}-{os.urandom(4).hex()}")
    if accesses:
        write_private_file(directory / "accesses", accesses)
    # Of one that begins.
    write_private_file(directory / _BEGUN, b"")
    process = start(PUBLISHER, settings.run_dir, identity=identity, copy=True)
    process.tell(_Plan(job, directory))
    return process


def _is_at_work(directory: Path) -> bool:
    """Return whether a publisher works on what is in this folder, or is about to."""
    if is_alive(directory):
        return True
    with contextlib.suppress(OSError):
        is_new = time.time() - directory.stat().st_mtime < _BEGINS_S
        # The first that goes when it ends.
        return is_new and (directory / _BEGUN).exists()
    return False


def wait_published(settings: Settings, timeout_s: float) -> bool:
    """Wait until nothing of this node is being published; False when that takes too long.

    What dead publishers left is removed.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        busy = False
        with contextlib.suppress(FileNotFoundError):
            for directory in publishing_dir(settings).iterdir():
                if _is_at_work(directory):
                    busy = True
                    continue
                # One that has just ended takes its folder away meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - directory.stat().st_mtime > _BEGINS_S:
                        shutil.rmtree(directory, ignore_errors=True)
        if not busy:
            return True
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)


def publish_record(
    settings: Settings, info: RecordInfo, entries: Sequence[tuple[int, int, int, int]]
) -> "HotPointer | None":
    """Publish the trace, and what `hot_build.add_trace` makes of it. A trace of an image that is
    not published waits until it is.

    Raises: BootseerError.
    """
    from bootseer.prefetch.publish.hot_build import add_trace
    from bootseer.prefetch.publish.publish_image import is_unpublished, publish_node_image
    from bootseer.prefetch.record.trace import Trace, accesses_of, renumbered

    if not settings.auto_index and is_unpublished(settings, info.index_digest):
        _log.info("the record is left out: %s is not to be published", info.reference)
        return None
    index_digest = publish_node_image(settings, info.index_digest)
    # Of the published image, whose files have digests. Its inodes may have other numbers, where
    # another release has packed a layer.
    tree = read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    if index_digest != info.index_digest:
        entries = renumbered(
            read_kept_tree(settings.cache_dir, info.index_digest, run_dir=settings.run_dir),
            tree,
            entries,
        )
    files, accesses = accesses_of(tree, entries)
    trace = Trace(
        index_digest,
        info.workload,
        info.node,
        info.started_ns,
        info.ended,
        info.readahead_bytes,
        files,
        accesses,
    )
    with open_own_store(settings) as store:
        return add_trace(settings, store, tree, trace, info.reference, renew=info.renew)


def _await_start(settings: Settings, index_digest: str) -> None:
    """Return when no start of the image is recorded any more. Until then the start has the CPUs and
    the line to itself: to pack its layers took a third of the CPU time of a whole first start."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and _is_starting(settings, index_digest):
        time.sleep(_START_POLL_S)


def _is_starting(settings: Settings, index_digest: str) -> bool:
    # Imported late: starts load this module, but do not come here.
    from bootseer.served.control import ask

    for state_dir, state in live_mounts(settings.run_dir):
        if state.index_digest == index_digest:
            # One that does not answer has ended, or does nothing.
            with contextlib.suppress(BootseerError, OSError):
                if ask(state_dir, "status").get("record") == "recording":
                    return True
    return False


def _state_of(directory: Path, job: _Job) -> MountState:
    """For `bootseer status`."""
    return MountState(
        id=directory.name.rpartition("-")[0],
        reference=job.info.reference if job.info else job.image or job.chain,
        index_digest="",
        workload="",
        directory="",
        pid=os.getpid(),
        started_ns=time.time_ns(),
        purpose=PUBLISH,
    )


def _publish(line: bytes, report: Report) -> None:
    """Do the job and remove its folder. Raises: BootseerError, OSError."""
    os.nice(_NICENESS)
    job, directory = (plan := from_line(line, _Plan)).job, plan.directory
    lock = lock_new(directory)
    try:
        write_state(directory, _state_of(directory, job))
        if job.image:
            from bootseer.prefetch.publish.publish_image import publish_node_image

            _await_start(job.settings, job.image)
            publish_node_image(job.settings, job.image)
        elif job.content is not None:
            from bootseer.prefetch.publish.publish_image import publish_unpacked_image

            publish_unpacked_image(job.settings, job.content, job.chain)
        elif job.info is not None:
            entries = list(_ENTRY.iter_unpack((directory / "accesses").read_bytes()))
            publish_record(job.settings, job.info, entries)
    except BootseerError as error:
        _log.warning("nothing of this start is published: %s", error)
        raise
    finally:
        (directory / _BEGUN).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
    report.ready()


def main() -> int:
    """The exit code: 0 where all is published."""
    return serve(PUBLISHER, _publish)


if __name__ == "__main__":
    sys.exit(main())
