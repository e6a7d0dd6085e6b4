"""Background publishers: processes that publish an image or a start's record after a start.

A publisher (`served.processes`) has the lowest priority, so that it does not disturb the job, and
it outlives the job. It holds the lock of a folder under `run_dir/services` until everything is
published. If it fails, later launches lack a bundle or pull the image again; objects in the store
are never visible in part. Modules for publishing are loaded only by the publisher itself.
"""

import contextlib
import logging
import os
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.errors import BootseerError
from bootseer.linux.private_files import write_private_file
from bootseer.linux.removal import remove_tree
from bootseer.prefetch.cache.indexes import read_kept_tree
from bootseer.served.processes import PUBLISHER, Process, Report, serve, start
from bootseer.served.service import (
    PUBLISH,
    ServiceState,
    is_alive,
    live_mounts,
    lock_new,
    new_service_dir,
    services_dir,
    write_state,
)
from bootseer.settings.config import Settings
from bootseer.store import open_own_store

if TYPE_CHECKING:
    from bootseer.prefetch.bundle.hot_store import HotPointer

_log = logging.getLogger(__name__)

_ENTRY = struct.Struct("<QQQQ")
_NICENESS = 15
_BEGUN = "begun"
_NAMES = "*-" + "[0-9a-f]" * 8
"""Pattern of the names of publishers' folders."""
_BEGINS_S = 60.0
"""Time that a new publisher may take until it holds its folder's lock."""
_START_S = 180.0
"""The longest wait for the end of a start; starts are recorded for less."""
_START_POLL_S = 0.5


class RecordInfo(Struct, frozen=True):
    """Description of a start's record, besides its accesses."""

    index_digest: str
    reference: str
    """Name that the image was started by."""
    workload: str
    node: str
    started_ns: int
    ended: str
    readahead_bytes: int
    renew: bool
    """Whether the workload's bundle was found damaged."""


class _PublishJob(Struct, frozen=True):
    """Task of one publisher: a start's record, an image of this node, or an image of containerd."""

    settings: Settings
    info: RecordInfo | None = None
    image: str = ""
    """Index digest of the image of this node."""
    content: Path | None = None
    """Containerd's content store, which has the layers of `chain`."""
    chain: str = ""


class _PublisherPlan(Struct, frozen=True):
    job: _PublishJob
    directory: Path


def start_publisher(
    settings: Settings,
    identity: str,
    info: RecordInfo,
    entries: Sequence[tuple[int, int, int, int]],
) -> Process:
    """Start a publisher of a record and return; the process answers when all is published.

    Raises: BootseerError, OSError.
    """
    job = _PublishJob(settings, info)
    return _start(identity, job, b"".join(_ENTRY.pack(*entry) for entry in entries))


def start_image_publisher(settings: Settings, index_digest: str) -> None:
    """Start a publisher of an image that this node pulled, unless one is at work.

    The publisher is not a child of this process, which may become another program. Raises: OSError.
    """
    identity = f"image-{index_digest.partition(':')[2][:16]}"
    if not _is_busy(settings, identity):
        _start(identity, _PublishJob(settings, image=index_digest)).leave()


def start_chain_publisher(settings: Settings, content: Path, chain_id: str) -> bool:
    """Start an indexer of the image in containerd's content store whose layers make this chain.

    Return False while another image of containerd is being indexed. Raises: OSError.
    """
    if _is_busy(settings, "chain"):
        return False
    identity = f"chain-{chain_id.partition(':')[2][:16]}"
    _start(identity, _PublishJob(settings, content=content, chain=chain_id)).leave()
    return True


def _is_busy(settings: Settings, prefix: str) -> bool:
    return any(map(_is_at_work, services_dir(settings.run_dir).glob(f"{prefix}-*")))


def _start(identity: str, job: _PublishJob, accesses: bytes = b"") -> Process:
    settings = job.settings
    directory = new_service_dir(settings.run_dir, f"{identity}-{os.urandom(4).hex()}")
    if accesses:
        write_private_file(directory / "accesses", accesses)
    # Until the publisher holds the lock, this file shows that it is about to.
    write_private_file(directory / _BEGUN, b"")
    process = start(PUBLISHER, settings.run_dir, identity=identity, copy=True)
    process.tell(_PublisherPlan(job, directory))
    return process


def _is_at_work(directory: Path) -> bool:
    """Return whether the publisher of this folder is running or about to run."""
    if is_alive(directory):
        return True
    with contextlib.suppress(OSError):
        is_new = time.time() - directory.stat().st_mtime < _BEGINS_S
        # A publisher that ends removes this file first.
        return is_new and (directory / _BEGUN).exists()
    return False


def wait_published(settings: Settings, timeout_s: float) -> bool:
    """Wait until no publisher is at work on this node. Return False if that takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while any(map(_is_at_work, services_dir(settings.run_dir).glob(_NAMES))):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def publish_record(
    settings: Settings, info: RecordInfo, entries: Sequence[tuple[int, int, int, int]]
) -> "HotPointer | None":
    """Publish a start's trace and a new bundle, as `bundle_build.add_trace` does.

    An image that is not in the store is published first. Raises: BootseerError.
    """
    from bootseer.prefetch.publish.bundle_build import add_trace
    from bootseer.prefetch.publish.publish_image import is_unpublished, publish_node_image
    from bootseer.prefetch.record.trace import Trace, accesses_of

    if not settings.auto_index and is_unpublished(settings, info.index_digest):
        _log.info("the record is left out: %s is not to be published", info.reference)
        return None
    index_digest = publish_node_image(settings, info.index_digest)
    # Files have digests in the published tree only. Its inodes may have other numbers than those of
    # the served tree, if another release has packed a layer.
    tree = read_kept_tree(settings.cache_dir, index_digest, run_dir=settings.run_dir)
    served = None
    if index_digest != info.index_digest:
        served = read_kept_tree(settings.cache_dir, info.index_digest, run_dir=settings.run_dir)
    files, accesses = accesses_of(tree, entries, served=served)
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
    """Wait until no start of the image is recorded any more, so that starts have all CPUs.

    Packing the layers took a third of the CPU time of a whole first start.
    """
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and _is_starting(settings, index_digest):
        time.sleep(_START_POLL_S)


def _is_starting(settings: Settings, index_digest: str) -> bool:
    for service in live_mounts(settings.run_dir):
        if service.state.index_digest == index_digest:
            # A server that does not answer has ended or is idle.
            with contextlib.suppress(BootseerError, OSError):
                if service.ask("status").get("record") == "recording":
                    return True
    return False


def _state_of(directory: Path, job: _PublishJob) -> ServiceState:
    """Return the state that `bootseer status` shows."""
    return ServiceState(
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
    job, directory = (plan := from_line(line, _PublisherPlan)).job, plan.directory
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
        with contextlib.suppress(OSError):
            remove_tree(directory)
        os.close(lock)
    report.ready()


def main() -> int:
    """Run a publisher. Return the exit code: 0 if all was published."""
    return serve(PUBLISHER, _publish)


if __name__ == "__main__":
    sys.exit(main())
