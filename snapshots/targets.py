"""Targets of a set-up on this node: locks, users, and the snapshots that they hold.

`locked` holds the lock of a target exclusively, and the locks of the directories above it shared.
The locks are flock(2), and a set-up's command inherits them, so that it keeps them if the process
that started it is killed. `note_user` records that a job runs on a target. `remember` and
`load_state` record which snapshot a target holds; such a state is used only if a fresh scan gives
the recorded fingerprint.
"""

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import DocumentFormat
from bootseer.base.short_digest import short_digest
from bootseer.errors import BootseerError, BusyError, from_oserror
from bootseer.linux.locks import try_lock, unlock
from bootseer.linux.private_files import (
    make_private_directory,
    private_directory,
    read_private_file,
    write_private_file,
)
from bootseer.linux.processes import boot_id, living_pids, note_names, note_process, own_ancestry
from bootseer.settings.config import Settings
from bootseer.snapshots.scan import NOTHING, Scan, fingerprint_of_scan, scan, text_of

logger = logging.getLogger(__name__)


def shown_paths(paths: Sequence[bytes]) -> str:
    """Return paths as one text for messages."""
    return ", ".join(os.fsdecode(path) if path.isascii() else text_of(path) for path in paths)


_FOLDER = "snapshots"
_POLL_FIRST_S = 0.01
_POLL_MAX_S = 0.5
_TELL_S = 2.0
# Scripts use low numbers for descriptors of their own. Above 63 the kernel makes a larger table,
# for which a process with threads waits for all processors (RCU): some 10 ms.
_FD_MIN = 40


def _record_path(run_dir: Path, target: Path) -> Path:
    """Return the path, without suffix, of this node's records of a target (a host path)."""
    return run_dir / _FOLDER / short_digest(os.fsencode(target))[:32]


@contextmanager
def locked(
    run_dir: Path,
    targets: Sequence[Path],
    *,
    deadline_s: float,
    report: Callable[[str], None] = lambda sentence: None,
) -> Iterator[tuple[int, ...]]:
    """Hold the locks of all `targets` (host paths) of this node; yield their descriptors.

    A command that changes the targets must inherit the descriptors. During a long wait, `report`
    gets a sentence that names the holder of the lock.

    Raises: BusyError if another process holds a lock for longer than `deadline_s`, or a process
    that this one descends from holds it.
    """
    folder = run_dir / _FOLDER
    try:
        make_private_directory(folder)
    except OSError as error:
        raise from_oserror(error, f"make the folder {folder}, by the setting run_dir") from error
    end = time.monotonic() + deadline_s
    fds: list[int] = []
    with ExitStack() as stack:
        above = {parent for target in targets for parent in target.parents}
        # Always in the same order, so that two set-ups with overlapping targets cannot deadlock.
        for target in sorted(above.union(targets)):
            is_shared = target not in targets
            path = _record_path(run_dir, target).with_suffix(".lock")
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise from_oserror(error, f"open the lock {path}") from error
            stack.callback(os.close, fd)
            _take_lock(fd, path, target, end, report, is_shared=is_shared)
            # flock(2): this unlocks all copies of the descriptor, in all processes.
            stack.callback(unlock, fd)
            fds.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FD_MIN))
            stack.callback(os.close, fds[-1])
        yield tuple(fds)


def _take_lock(
    fd: int,
    path: Path,
    target: Path,
    end: float,
    report: Callable[[str], None],
    *,
    is_shared: bool,
) -> None:
    pause = _POLL_FIRST_S
    tell_at = time.monotonic() + _TELL_S
    what = str(target) if is_shared else f"{target}, or what lies in it"
    while not try_lock(fd, is_shared=is_shared):
        if time.monotonic() >= end:
            raise BusyError(
                f"{_holders_text(_holders(path))} on this node is still setting up {what}; "
                "wait for it, or end it"
            )
        if time.monotonic() >= tell_at:
            tell_at = end
            holders = _holders(path)
            if own_ancestry().intersection(holders):
                raise BusyError(f"this set-up runs within the set-up of {what}")
            report(f"{_holders_text(holders)} on this node is setting up {what}; waiting")
        time.sleep(pause)
        pause = min(2 * pause, _POLL_MAX_S)


def _holders(path: Path) -> list[int]:
    """Return the other processes that have the lock file open, among those visible to this user."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and any(
                os.readlink(fd) == str(path) for fd in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return sorted(found)


def _holders_text(holders: Sequence[int]) -> str:
    if not holders:
        return "another process"
    return f"process{'es' if holders[1:] else ''} {', '.join(map(str, holders[:5]))}"


class State(Struct, frozen=True):
    """Record of a target's contents after a set-up or a restore."""

    fingerprint: str
    """Key of the snapshot that the target holds."""
    base: str
    """Digest of the former contents (`scan.base_digest`)."""
    exact: str
    """Fingerprint of the present contents (`scan.fingerprint_of_scan`)."""
    boot_id: str
    """Boot in which the record was made. A record of an earlier boot is not used: after a crash,
    files may lack data that their sizes announce."""


_FORM: DocumentFormat[State] = DocumentFormat(type=State, version=1, size_max=64 * 1024)


def _state_file(cache_dir: Path, target: Path) -> Path:
    name = short_digest(os.fsencode(target))[:32]
    return cache_dir / "snapshots" / "state" / f"{name}.json"


def load_state(cache_dir: Path, target: Path, scanned: Scan) -> State | None:
    """Return the state of `target` (a host path), or None if it is unknown or was touched."""
    state = read_private_file(_state_file(cache_dir, target), _FORM)
    if state is None or state.boot_id != boot_id() or state.exact != fingerprint_of_scan(scanned):
        return None
    return state


def was_empty(cache_dir: Path, target: Path) -> bool:
    """Return whether `target` (a host path) is recorded as empty before its set-up."""
    state = read_private_file(_state_file(cache_dir, target), _FORM)
    return state is not None and state.base == NOTHING


def remember(settings: Settings, root: Path) -> Callable[[Path, str, str, str], None]:
    """Return a function that saves a target's state.

    Its arguments: target, fingerprint, base, tree fingerprint.

    For an empty tree fingerprint, the function scans the target. It does nothing if `root` is not
    this host's root, since another root is gone after the job.
    """

    def save(target: Path, fingerprint: str, base: str, tree_fingerprint: str) -> None:
        if root == Path("/"):
            present = tree_fingerprint or fingerprint_of_scan(scan(target))
            _save_state(settings.cache_dir, target, State(fingerprint, base, present, boot_id()))

    return save


def _save_state(cache_dir: Path, target: Path, state: State) -> None:
    """Write the record of a target's contents. Never raises: without a record, a scan decides."""
    path = _state_file(cache_dir, target)
    with contextlib.suppress(OSError, BootseerError):
        write_private_file(path, _FORM.encode(state))


_USERS_SUFFIX = ".users"
# Name of a link in the folder of a target's users; it leads to the target.
_TARGET_LINK = "target"


def note_user(run_dir: Path, targets: Iterable[Path]) -> None:
    """Record this process as a user of the targets (host paths). Never raises."""
    for target in targets:
        folder = _users_folder(run_dir, target)
        try:
            with contextlib.suppress(FileExistsError):
                os.symlink(target, private_directory(folder) / _TARGET_LINK)
            note_process(folder, os.getpid())
        except (BootseerError, OSError) as error:
            logger.warning("cannot note that this job uses %s: %s", target, error)
            continue
        _forget_ended(folder)


def other_users(run_dir: Path, targets: Iterable[Path]) -> dict[Path, int]:
    """Return target -> a process of another job that uses it, or a directory inside or above it.

    Processes that this one descends from are of the same job.
    """
    users = {}
    ours = own_ancestry()
    used = {}
    for name in note_names(run_dir / _FOLDER):
        folder = run_dir / _FOLDER / name
        if folder.suffix == _USERS_SUFFIX:
            with contextlib.suppress(OSError):
                used[Path(os.readlink(folder / _TARGET_LINK))] = folder
    for target in targets:
        for path, folder in used.items():
            if path.is_relative_to(target) or target.is_relative_to(path):
                for pid in living_pids(folder):
                    if pid not in ours:
                        users[target] = pid
    return users


def check_unused(run_dir: Path, targets: Iterable[Path]) -> None:
    """Raise BusyError if another job uses one of the targets."""
    for target, pid in other_users(run_dir, targets).items():
        raise BusyError(
            f"{target} is in use by process {pid}, a job on this node; wait for its end, or choose "
            "another directory"
        )


def _users_folder(run_dir: Path, target: Path) -> Path:
    return _record_path(run_dir, target).with_suffix(_USERS_SUFFIX)


def _forget_ended(folder: Path) -> None:
    living = set(map(str, living_pids(folder)))
    for name in note_names(folder):
        if name != _TARGET_LINK and name.partition("-")[0] not in living:
            with contextlib.suppress(OSError):
                (folder / name).unlink()
