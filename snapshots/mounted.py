"""Snapshots that are mounted on their targets: files are fetched as they are read.

Alone owns the order of these steps. Each target has a server of its own (`prefetch.mount`), which
serves the snapshot's tree in the mount's own folder; an overlay over it goes onto the target in one
step and makes it writable; then the tree's own mount point goes, so that the overlay alone holds
it. A process that is killed before the last step leaves covers without users: their servers, which
watch that process, take them off, and so does the next run. The caller holds the targets' locks.
"""

import contextlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bootseer.blob import index
from bootseer.blob.keys import blob_key
from bootseer.config import Settings
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    from_oserror,
)
from bootseer.fuse.kernel import mounts
from bootseer.prefetch.catalogue import keep_index
from bootseer.prefetch.cover_users import add_user, join, sweep_covers
from bootseer.prefetch.covers import Cover, cover_at, source_of, uncover
from bootseer.prefetch.mount_state import mounts_dir, new_mount_dir, wait_released
from bootseer.prefetch.publish import index_path
from bootseer.prefetch.start_server import serve_tree
from bootseer.private import make_private_directory, private_opener
from bootseer.snapshots.catalogue import decode_tree, read_encoded_tree
from bootseer.snapshots.layers import cover_target
from bootseer.snapshots.manifest import Manifest, text_of
from bootseer.snapshots.restore import Placed, check_tree
from bootseer.snapshots.scan import scan
from bootseer.store import Store

logger = logging.getLogger(__name__)

PURPOSE = "snapshot"

_RECORD = "snapshot.json"
_RECORD_BYTES_MAX = 64 * 1024
_VERSION = 1
_END_S = 10.0
_SERVERS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class MountOutcome:
    """What `mount_snapshot` did."""

    moved_bytes: int
    """From the store: what had to be here before the first read."""
    ready_names: tuple[str, ...]
    """For BOOTSEER_READY_SOCKETS."""


@dataclass(frozen=True, slots=True)
class Mounted:
    """A target on which a snapshot is mounted, as its mount's folder has it."""

    target: str
    fingerprint: str
    base: str
    """What was there before (`scan.base_digest`)."""
    scratch: str
    """Where what is written goes."""
    file_count: int
    ready_name: str


def name_of(target: bytes) -> str:
    """What a target's tree is called where images have references: bundles of environments at the
    same path may serve each other."""
    return f"{PURPOSE}/{text_of(target).strip('/')}"


def mount_snapshot(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    placed: Sequence[Placed],
    bases: Mapping[bytes, str],
    *,
    until_exit: bool,
) -> MountOutcome:
    """Mount all targets of a snapshot; they work when this returns.

    What is there (`bases`) has been found to fit. They go when this process ends, if `until_exit`;
    else they stay until `unmount_snapshot`. On an error nothing is mounted.
    Raises: UnsupportedError and other BootseerErrors.
    """
    encoded = [_have_index(settings, store, item) for item in placed]
    with ExitStack() as undo:
        with ThreadPoolExecutor(min(_SERVERS_AT_ONCE, len(placed))) as pool:
            serving = [pool.submit(_serve, settings, item) for item in placed]
            # Meanwhile: its server checks all but whose tree it is.
            problem = _check_trees(placed, encoded)
            served = [one.result() for one in serving]
        for state_dir, outcome in served:
            if isinstance(outcome, str):
                undo.callback(_give_up, state_dir)
        for error in (problem, *(outcome for _, outcome in served)):
            if isinstance(error, BootseerError):
                raise error
        for item, (state_dir, outcome) in zip(placed, served, strict=True):
            target = item.target
            record = Mounted(
                target=str(item.path),
                fingerprint=manifest.fingerprint,
                base=bases[target.path],
                scratch=str(_scratch_of(settings, state_dir)),
                file_count=target.file_count,
                ready_name=str(outcome),
            )
            _cover(item, state_dir, record)
            undo.callback(_uncover, item.path, state_dir.name)
        for state_dir, _ in served:
            # From here on it is finished, and stays.
            add_user(state_dir, os.getpid() if until_exit else None)
        undo.pop_all()
    for state_dir, _ in served:
        # The overlay has a mount of its own by now.
        with contextlib.suppress(BootseerError):
            mounts.detach(state_dir / "tree", lazy=True)
    moved = sum(len(data) for data in encoded if data is not None)
    return MountOutcome(moved, tuple(str(outcome) for _, outcome in served))


def _have_index(settings: Settings, store: Store, item: Placed) -> bytes | None:
    """Have the target's index where its server looks for it. What was fetched; None: nothing."""
    blob = item.target.blob
    if store.size(blob_key(blob.digest)) != blob.size_bytes:
        # Better known now than at a read of the job.
        raise CorruptError(f"the blob {blob.digest} in {store.url} does not have its size")
    digest = item.target.index.digest
    with contextlib.suppress(OSError):
        # A damaged copy is no fault of the snapshot's.
        if index.digest(index_path(settings, digest).read_bytes()) == digest:
            return None
    data = read_encoded_tree(store, item.target)
    keep_index(settings.cache_dir, digest, data)
    return data


def _check_trees(placed: Sequence[Placed], encoded: Sequence[bytes | None]) -> BootseerError | None:
    """What is wrong with trees that were fetched."""
    try:
        for item, data in zip(placed, encoded, strict=True):
            if data is not None:
                check_tree(item.target, decode_tree(item.target, data))
    except BootseerError as error:
        return error
    return None


def _scratch_of(settings: Settings, state_dir: Path) -> Path:
    return settings.cache_dir / "containers" / state_dir.name


def _serve(settings: Settings, item: Placed) -> tuple[Path, str | BootseerError]:
    """Serve the target's tree in a new mount folder: the name of its ready socket, or why not."""
    state_dir = new_mount_dir(settings)
    scratch = _scratch_of(settings, state_dir)
    try:
        for path in (state_dir / "tree", scratch):
            make_private_directory(path)
        plan = serve_tree(
            settings,
            name_of(item.target.path),
            item.target.index.digest,
            state_dir / "tree",
            purpose=PURPOSE,
            state_dir=state_dir,
            scratch=str(scratch),
            watch_pid=os.getpid(),
        )
    except BootseerError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        return state_dir, error
    except OSError as error:
        shutil.rmtree(scratch, ignore_errors=True)
        return state_dir, from_oserror(error, f"prepare the mount of {item.path}")
    return state_dir, plan.ready_name


def _cover(item: Placed, state_dir: Path, record: Mounted) -> None:
    file = state_dir / _RECORD
    try:
        item.path.mkdir(parents=True, exist_ok=True)
        with open(file, "w", encoding="ascii", opener=private_opener) as out:
            json.dump({"version": _VERSION, **asdict(record)}, out)
    except OSError as error:
        raise from_oserror(error, f"prepare the mount on {item.path}") from error
    cover_target(
        state_dir / "tree",
        item.path,
        Path(record.scratch),
        is_difference=not item.target.whole,
        deletions=item.target.deletions,
        source=source_of(state_dir.name),
    )


def _give_up(state_dir: Path) -> None:
    """End a server whose tree nobody needs. Never raises."""
    with contextlib.suppress(BootseerError):
        mounts.unmount(state_dir / "tree", timeout_s=1.0)
    if not wait_released(state_dir, _END_S):
        logger.warning("the server of the mount %s does not end", state_dir.name)


def _uncover(path: Path, identity: str) -> None:
    cover = cover_at(path)
    if cover is not None and cover.id == identity:
        with contextlib.suppress(BootseerError):
            uncover(cover)


# ---- what is mounted already ------------------------------------------------------------------


def recover(settings: Settings, hosts: Iterable[Path]) -> None:
    """Take off what dead servers, and runs that were killed, have left on `hosts`.

    Raises: BusyError where something has been mounted on top of it.
    """
    sweep_covers(settings)
    for host in hosts:
        while (cover := cover_at(host)) is not None:
            state_dir = mounts_dir(settings) / cover.id
            if not state_dir.is_dir() or os.path.isdir(state_dir / "users"):
                break
            logger.warning("taking off %s, left by a run that was killed", host)
            uncover(cover)


@dataclass(frozen=True, slots=True)
class Found:
    """A cover, and what is known of it."""

    cover: Cover
    record: Mounted


def find_mounted(settings: Settings, host: Path) -> Found | None:
    """The snapshot that is mounted on `host`, if nothing was written there since but bytecode."""
    cover = cover_at(host)
    if cover is None:
        return None
    record = _read(settings, cover)
    if record is None or record.target != str(host) or _is_touched(record):
        return None
    return Found(cover, record)


def keep_mounted(settings: Settings, found: Iterable[Found], *, until_exit: bool) -> bool:
    """Keep what `find_mounted` found for this process, too, or for all times. False where it is
    going just now."""
    user = os.getpid() if until_exit else None
    return all(join(mounts_dir(settings) / one.cover.id, one.cover, user) for one in found)


def _read(settings: Settings, cover: Cover) -> Mounted | None:
    try:
        with (mounts_dir(settings) / cover.id / _RECORD).open("rb") as file:
            document = json.loads(file.read(_RECORD_BYTES_MAX))
        if document.pop("version") != _VERSION:
            return None
        return Mounted(**document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_touched(record: Mounted) -> bool:
    """Whether anything but bytecode and the directories above it was written."""
    try:
        written = scan(Path(record.scratch) / "upper")
    except BootseerError:
        return True
    return any(
        not stat.S_ISDIR(entry.mode) and not path.endswith(b".pyc")
        for path, entry in written.items()
    ) or any(_is_opaque(record, path) for path, entry in written.items() if path)


def _is_opaque(record: Mounted, path: bytes) -> bool:
    """Whether a directory stands in for a deleted one."""
    try:
        name = os.path.join(os.fsencode(record.scratch), b"upper", path)
        return os.getxattr(name, "trusted.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def unmount_snapshot(settings: Settings, directory: Path, *, lazy: bool = False) -> None:
    """Take the snapshot off `directory`; what was written there is gone.

    `lazy`: also while files in it are open; they live on until they are closed.
    Raises: InvalidInputError where none is mounted; BusyError where files in it are open.
    """
    path = mounts.absolute(directory)
    cover = cover_at(path)
    if cover is None:
        raise InvalidInputError(f"no snapshot is mounted on {path}")
    try:
        uncover(cover, lazy=lazy)
    except BusyError as error:
        raise BusyError(
            f"{error}; end the processes that use it, or unmount it with --lazy"
        ) from error
    if not lazy and not wait_released(mounts_dir(settings) / cover.id, _END_S):
        # It may take a while to make a large cache durable; nobody needs to wait for that.
        logger.info("the server of %s still tidies up", path)
