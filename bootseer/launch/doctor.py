"""Checks of this machine, each with advice about a bad result.

A check changes nothing, except that a few small probe objects are written to the store, the cache
and the run directory, and removed again. No check raises, and each ends within the deadline.
"""

import contextlib
import os
import platform
import re
import resource
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from bootseer.base.redact import public_url
from bootseer.errors import BootseerError, PermissionDeniedError
from bootseer.linux.ownership import parse_owners
from bootseer.linux.private_files import make_private_directory
from bootseer.linux.processes import has_capability
from bootseer.settings.config import Settings
from bootseer.settings.file import TRUSTED, fault_of_setting
from bootseer.store.paths import BUCKETS, local_root, split_scheme

# FUSE_PASSTHROUGH and FUSE_NOTIFY_RESEND arrived in Linux 6.9; FUSE 7.31 is Linux 5.4.
_KERNEL_MINIMUM = (5, 4)
_KERNEL_FULL = (6, 9)
_CAP_SYS_ADMIN = 21
_OPEN_FILES_WANTED = 4096
_FREE_BYTES_WANTED = 10 * 10**9
# Leases compare wall clocks of different nodes; see docs/format/store.md.
_CLOCK_SKEW_S = 5.0
# Types of file systems that only one node can have mounted.
_LOCAL = frozenset(
    (
        *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs"),
        *("reiserfs", "tmpfs", "vfat", "xfs", "zfs"),
    )
)


class CheckStatus(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARN = "warn"
    """Works, but slower or with less."""
    FAIL = "fail"


class Finding(Struct, frozen=True):
    """Result of one check: the observation and, unless all is well, advice."""

    name: str
    status: CheckStatus
    seen: str
    advice: str = ""


def _kernel(settings: Settings) -> Iterator[Finding]:
    release = platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if platform.system() != "Linux" or version < _KERNEL_MINIMUM:
        advice = "use Linux 5.4 or newer"
        yield Finding("kernel", CheckStatus.FAIL, f"{platform.system()} {release}", advice)
    elif version < _KERNEL_FULL:
        advice = "Linux 6.9 or newer adds passthrough reads and restarts that readers do not see"
        yield Finding("kernel", CheckStatus.WARN, release, advice)
    else:
        yield Finding("kernel", CheckStatus.OK, release)


def _fuse(settings: Settings) -> Iterator[Finding]:
    device = Path("/dev/fuse")
    if not device.exists():
        advice = "run `modprobe fuse`; in a container add `--device /dev/fuse`"
        yield Finding("/dev/fuse", CheckStatus.FAIL, "missing", advice)
        return
    if not os.access(device, os.R_OK | os.W_OK):
        advice = "make it readable and writable for this user (mode 0666 is usual)"
        yield Finding("/dev/fuse", CheckStatus.FAIL, "no permission", advice)
        return
    yield Finding("/dev/fuse", CheckStatus.OK, "usable")
    if has_capability(_CAP_SYS_ADMIN):
        yield Finding("mount", CheckStatus.OK, "CAP_SYS_ADMIN: mounts directly")
    elif shutil.which("fusermount3") or shutil.which("fusermount"):
        seen = "through fusermount3: no passthrough; containers need user namespaces"
        advice = "run as root, or with CAP_SYS_ADMIN, for `bootseer run --image` at full speed"
        yield Finding("mount", CheckStatus.WARN, seen, advice)
    else:
        advice = "install the package fuse3, or run with CAP_SYS_ADMIN"
        yield Finding("mount", CheckStatus.FAIL, "neither CAP_SYS_ADMIN nor fusermount3", advice)


def _containers(settings: Settings) -> Iterator[Finding]:
    if "overlay" in Path("/proc/filesystems").read_text().split():
        yield Finding("overlayfs", CheckStatus.OK, "in the kernel")
    else:
        advice = "run `modprobe overlay`; `bootseer run --image` needs it"
        yield Finding("overlayfs", CheckStatus.FAIL, "not in the kernel", advice)
    runtime = shutil.which("runc")
    if runtime:
        yield Finding("runtime", CheckStatus.OK, f"runc at {runtime}")
    else:
        advice = "install runc for full isolation; without it namespaces and chroot are used"
        yield Finding("runtime", CheckStatus.WARN, "no runc", advice)


def _limits(settings: Settings) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES_WANTED:
        advice = f"raise the limit to {_OPEN_FILES_WANTED} or more (`ulimit -n`, LimitNOFILE=)"
        yield Finding("open files", CheckStatus.WARN, f"{soft} (hard limit {hard})", advice)
    else:
        yield Finding("open files", CheckStatus.OK, f"{soft}")


def _folder(name: str, path: Path, advice: str) -> Finding:
    probe = path / f".doctor-{uuid.uuid4().hex}"
    try:
        make_private_directory(path)
        with probe.open("xb") as file:
            # The image cache makes sparse files; a file system without them would fill the disk.
            file.truncate(1 << 20)
            sparse = os.fstat(file.fileno()).st_blocks * 512 < 1 << 20
    except OSError as error:
        return Finding(name, CheckStatus.FAIL, f"{path}: {error.strerror}", advice)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    free_bytes = shutil.disk_usage(path).free
    seen = f"{path}: {free_bytes / 1e9:.1f} GB free"
    if not sparse:
        hint = "put it on ext4, xfs, btrfs or tmpfs: this file system has no sparse files"
        return Finding(name, CheckStatus.WARN, f"{seen}, no sparse files", hint)
    return Finding(name, CheckStatus.OK, seen)


def _trust(settings: Settings) -> Iterator[Finding]:
    owners = parse_owners(settings.trusted_owners)
    faults = {
        name: fault
        for name in TRUSTED
        if (fault := fault_of_setting(name, getattr(settings, name), owners))
    }
    advice = "make it this user's own (chown, chmod go-w), or name its owner in trusted_owners"
    for name, fault in faults.items():
        yield Finding("trust", CheckStatus.WARN, f"{name} is not used: {fault}", advice)
    if not faults:
        yield Finding("trust", CheckStatus.OK, "nobody else can write to the folders that are set")


def _folders(settings: Settings) -> Iterator[Finding]:
    cache = _folder("cache", settings.cache_dir, "set --cache-dir to a writable local folder")
    if cache.status is CheckStatus.OK and shutil.disk_usage(settings.cache_dir).free < (
        _FREE_BYTES_WANTED
    ):
        advice = "free some space, or set --cache-dir to a larger disk"
        cache = Finding("cache", CheckStatus.WARN, cache.seen, advice)
    yield cache
    yield _folder("run", settings.run_dir, "set --run-dir to a writable local folder")


_RACERS = (b"one", b"two")
_RIGHTS = {
    "s3": ("s3:ListBucket", "s3:PutObject", "s3:GetObject", "s3:DeleteObject"),
    "gcs": (
        "storage.objects.list",
        "storage.objects.create",
        "storage.objects.get",
        "storage.objects.delete",
    ),
    "azure": ("list", "write", "read", "delete"),
}
"""Rights that the credentials for a bucket need, in the words of the bucket's policies."""
_STORE_ADVICE = "check the URL (--store), the network and the permissions"


def _unwritable_store(settings: Settings, error: Exception) -> Finding:
    from bootseer.store import open_backend

    try:
        with contextlib.closing(
            open_backend(settings.store_url, deadline_s=settings.deadline_s / 2)
        ) as backend:
            is_there = any(True for _ in backend.list("")) or backend.stat("").is_dir
    except (BootseerError, OSError):
        is_there = False
    kind = BUCKETS.get(split_scheme(settings.store_url))
    if kind and (missing := _missing_rights(settings, kind)):
        seen = f"{public_url(settings.store_url)}: the credentials may not {', '.join(missing)}"
        return Finding("store", CheckStatus.FAIL, seen, "docs/stores/s3.md has the least policy")
    if not is_there:
        return Finding("store", CheckStatus.FAIL, str(error), _STORE_ADVICE)
    seen = f"{public_url(settings.store_url)}: readable, not writable ({error})"
    advice = "starts replay what is there; allow writing where they are to record, too"
    return Finding("store", CheckStatus.WARN, seen, advice)


def _missing_rights(settings: Settings, kind: str) -> list[str]:
    """Return the rights in a bucket that the credentials lack, found by trying each one."""
    from bootseer.store import open_backend

    path = f"doctor/{uuid.uuid4().hex}"
    missing = []
    with contextlib.closing(
        open_backend(settings.store_url, deadline_s=settings.deadline_s / 8)
    ) as backend:

        def write() -> None:
            with backend.create(path, overwrite=True) as writer:
                writer.write(b"x")

        calls: tuple[Callable[[], object], ...] = (
            lambda: list(backend.list("")),
            write,
            lambda: backend.read(path),
            lambda: backend.delete_files([path]),
        )
        for right, call in zip(_RIGHTS[kind], calls, strict=True):
            try:
                call()
            except (PermissionDeniedError, PermissionError):
                missing.append(right)
            except (BootseerError, OSError):
                continue  # any other failure means that the right is there
    return missing


def _is_of_one_node(store_url: str) -> bool:
    """Return whether a store is a folder that no other node can see; False if that is not known."""
    try:
        if split_scheme(store_url) not in ("", "file"):
            return False
        return _file_system_of(local_root(store_url)) in _LOCAL
    except (BootseerError, OSError):
        return False


def _file_system_of(path: Path) -> str:
    while not path.exists() and path != path.parent:
        path = path.parent
    from bootseer.linux.mount_table import mount_points

    device = os.stat(path).st_dev
    kinds = {point.device: os.fsdecode(point.kind) for point in mount_points()}
    if device in kinds:
        return kinds[device]
    # On btrfs and overlays a file's device number may differ from that of the mount.
    place = os.fsencode(os.path.realpath(path))
    found = [
        point
        for point in mount_points()
        if place == point.path or place.startswith(point.path.rstrip(b"/") + b"/")
    ]
    return os.fsdecode(max(found, key=lambda point: len(point.path)).kind) if found else ""


def _store(settings: Settings) -> Iterator[Finding]:
    from bootseer.store import open_own_store

    key = f"doctor/{uuid.uuid4().hex}"
    try:
        store = open_own_store(settings, deadline_s=settings.deadline_s / 2)
        try:
            before_s = time.time()
            # Two writers at once, as two nodes would be: exactly one may win.
            with ThreadPoolExecutor(2) as pool:
                won = list(pool.map(lambda data: store.publish(key, data), _RACERS))
            after_s = time.time()
            kept = store.read(key)
            is_exclusive = sum(won) == 1 and kept == _RACERS[won.index(True)]
            again = store.publish(key, b"third")
            replaced = store.publish(key, b"fourth", replace=True) and store.read(key) == b"fourth"
            modified_s = max(
                (info.modified_ns / 1e9 for info in store.list("doctor/") if info.path == key),
                default=before_s,
            )
            lease = store.lease(f"{key}.lease", ttl_s=30, owner="doctor")
            second = store.lease(f"{key}.lease", ttl_s=30, owner="doctor")
            if lease is not None:
                lease.release()
        finally:
            store.delete(key)
            store.close()
    except (PermissionDeniedError, PermissionError) as error:
        yield _unwritable_store(settings, error)
        return
    except (BootseerError, OSError) as error:
        yield Finding("store", CheckStatus.FAIL, str(error), _STORE_ADVICE)
        return
    yield Finding("store", CheckStatus.OK, f"{store.url}: readable and writable")
    if _is_of_one_node(settings.store_url):
        advice = "set store to a shared folder, or to a URL that every node reaches"
        seen = "on a disk of this node: no other node sees what is recorded here"
        yield Finding("store shared", CheckStatus.WARN, seen, advice)
    if split_scheme(settings.store_url) in BUCKETS:
        # obstore can list neither unfinished uploads nor the bucket's rules.
        seen = "only a rule of the bucket removes uploads of killed writers (docs/stores/s3.md)"
        yield Finding("store uploads", CheckStatus.OK, seen)
    atomic = is_exclusive and not again and replaced and lease and not second
    if atomic:
        yield Finding("store atomic", CheckStatus.OK, "creates, replaces and leases are atomic")
    else:
        advice = (
            "use a store with atomic create (a folder, HDFS, S3 that heeds If-None-Match); else "
            "nodes may repeat work"
        )
        yield Finding("store atomic", CheckStatus.WARN, "two writers could both win", advice)
    skew_s = max(before_s - modified_s, modified_s - after_s, 0.0)
    # File systems round times down to a second, or to HDFS's millisecond.
    if skew_s > _CLOCK_SKEW_S:
        advice = "synchronise the clocks (chrony, ntpd): leases compare wall clocks"
        yield Finding("clock", CheckStatus.WARN, f"{skew_s:.1f} s from the store's", advice)
    else:
        yield Finding("clock", CheckStatus.OK, f"within {max(skew_s, 1):.0f} s of the store's")


CHECKS: tuple[tuple[str, Callable[[Settings], Iterator[Finding]]], ...] = (
    ("kernel", _kernel),
    ("/dev/fuse", _fuse),
    ("containers", _containers),
    ("limits", _limits),
    ("trust", _trust),
    ("folders", _folders),
    ("store", _store),
)


def _run(
    name: str, check: Callable[[Settings], Iterator[Finding]], settings: Settings
) -> list[Finding]:
    findings: list[Finding] = []

    def work() -> None:
        try:
            findings.extend(check(settings))
        except Exception as error:
            # A broken check must not hide the results of the others.
            seen = f"the check itself failed: {error}"
            findings.append(Finding(name, CheckStatus.FAIL, seen, "please report this"))

    # In a thread, since a dead network file system hangs every thread that touches it.
    thread = threading.Thread(target=work, daemon=True, name=f"doctor-{name}")
    thread.start()
    thread.join(settings.deadline_s)
    if thread.is_alive():
        seen = f"no answer within {settings.deadline_s:.0f} s"
        return [*findings, Finding(name, CheckStatus.FAIL, seen, "is a server or mount dead?")]
    return findings


def examine(settings: Settings) -> list[Finding]:
    """Run every check in order and return the findings. Never raises."""
    return [finding for name, check in CHECKS for finding in _run(name, check, settings)]
