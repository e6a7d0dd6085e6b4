"""The working directory of a restore: staged tree, plan, and the step that makes it final.

Alone owns `.bootseer-<hash>` beside (or in) a target, and what a crash at any moment leaves:

    tree/     what was extracted; names leave it as they move into the target
    plan      what to do with it (JSON), and where the commit file lies
    index     the tree's encoded form, for the attributes of directories
    commit    in the first target's working directory only, and lists all of them: from now on
              the restore is finished, never undone, by this process or by the next that locks a
              target

A working directory without a commit is thrown away. Callers hold the locks of all targets.
"""

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.documents import Form, PathBytes, to_line
from bootseer.blob.index import codec as index
from bootseer.blob.tree import Tree
from bootseer.errors import (
    BusyError,
    CorruptError,
    PermissionDeniedError,
    UnknownFormatError,
    from_oserror,
)
from bootseer.linux.private_files import read_private_file
from bootseer.linux.removal import remove_tree
from bootseer.snapshots.restoring.host_paths import is_entered, is_mount_point
from bootseer.snapshots.restoring.merge import delete, move_into, set_directories
from bootseer.snapshots.targets.paths import is_plain
from bootseer.snapshots.targets.scan import STAGING_PREFIX

logger = logging.getLogger(__name__)


OnFinished = Callable[[Path, str, str, str], None]
"""Called with target, fingerprint, base and tree fingerprint, if it is known, once a target is in
place, and again if a crash lets a restore be finished twice."""


class _Plan(Struct, frozen=True):
    fingerprint: str
    base: str
    commit: Path
    """The file that says that this and other plans are carried out."""
    deletions: tuple[PathBytes, ...]


class _Committed(Struct, frozen=True):
    commit: Path


_PLAN: Form[_Plan] = Form(type=_Plan, versions=(1,), size_max=1 << 30, value_count_max=1 << 30)
# Of a plan of any release: one that is carried out must not be taken for none.
_POINTER: Form[_Committed] = Form(type=_Committed, size_max=1 << 30, value_count_max=1 << 30)
_COMMIT: Form[list[Path]] = Form(type=list[Path], size_max=1 << 24)


class Staging(Struct, frozen=True):
    """The working directory for one target (a host path without symbolic links)."""

    target: Path
    directory: Path

    @property
    def tree(self) -> Path:
        """Returns the folder to extract to."""
        return self.directory / "tree"

    @property
    def is_inside(self) -> bool:
        """Whether it lies in the target, which is a mount point, and not beside it."""
        return self.directory.parent == self.target


def _name(target: Path) -> str:
    return STAGING_PREFIX.decode() + hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]


def _places(target: Path) -> tuple[Path, Path]:
    return target.parent / _name(target), target / _name(target)


def make_staging(target: Path) -> Staging:
    """A new, empty working directory on the target's file system. Raises: BootseerError."""
    beside, inside = _places(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Staging(target, inside if is_mount_point(target) else beside)
        staging.directory.mkdir(mode=0o700)
    except FileExistsError as error:
        raise BusyError(f"{staging.directory} is in the way; remove it") from error
    except OSError as error:
        raise from_oserror(error, f"prepare the restore of {target}") from error
    return staging


def write_plan(
    staging: Staging,
    first: Staging,
    *,
    fingerprint: str,
    base: str,
    encoded_tree: bytes,
    deletions: Sequence[bytes],
) -> None:
    """Record what is to be done; nothing is done before `commit`."""
    plan = _Plan(fingerprint, base, first.directory / "commit", tuple(deletions))
    try:
        (staging.directory / "index").write_bytes(encoded_tree)
        (staging.directory / "plan").write_bytes(_PLAN.encode(plan))
    except OSError as error:
        raise from_oserror(error, f"write the plan in {staging.directory}") from error


def commit(stagings: Sequence[Staging]) -> None:
    """Commit: from here on the restore of all planned targets is finished, whatever happens."""
    file = stagings[0].directory / "commit"
    try:
        draft = file.with_suffix(".draft")
        draft.write_text(to_line([staging.directory for staging in stagings]), encoding="ascii")
        draft.rename(file)
    except OSError as error:
        raise from_oserror(error, f"write the commit {file}") from error


def is_committed(stagings: Sequence[Staging]) -> bool:
    """Whether `commit` took place, and the rest was not removed yet."""
    return bool(stagings) and (stagings[0].directory / "commit").exists()


def abandon(targets: Sequence[Path]) -> None:
    """Forget what an interrupted restore left at `targets`, finished or not."""
    for target in targets:
        for directory in _places(target):
            with contextlib.suppress(OSError):
                if os.lstat(directory).st_uid == os.geteuid():
                    remove([Staging(target, directory)])


def complete(
    stagings: Sequence[Staging], fingerprints: Sequence[str], on_finished: OnFinished
) -> None:
    """Carry out committed plans. `fingerprints`: the tree fingerprint of each staged
    tree, or an empty string.
    Raises: BootseerError; the next `recover` goes on."""
    for staging, tree_fingerprint in zip(stagings, fingerprints, strict=True):
        _finish(staging, tree_fingerprint, on_finished)
    remove(stagings)


def _finish(staging: Staging, tree_fingerprint: str, on_finished: OnFinished) -> None:
    """Carry out a plan: first or again."""
    plan = _read_plan(staging)
    is_all = _carry_out(staging, plan)
    on_finished(staging.target, plan.fingerprint, plan.base, tree_fingerprint if is_all else "")


def _carry_out(staging: Staging, plan: _Plan) -> bool:
    """Whether the target is now the staged tree, and nothing else."""
    try:
        # A process whose working directory is the target, such as the shell that started us,
        # would stay in the directory that is replaced.
        is_kept = staging.is_inside or is_entered(staging.target)
        if staging.tree.is_dir() and not is_kept and _rename_whole(staging):
            return True
        tree = _read_tree(staging)
        target = os.open(staging.target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if staging.tree.is_dir():
                staged = os.open(staging.tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    move_into(staged, target)
                finally:
                    os.close(staged)
            delete(target, plan.deletions)
            set_directories(target, tree)
        finally:
            os.close(target)
    except OSError as error:
        raise from_oserror(error, f"finish the restore of {staging.target}") from error
    return False


def _rename_whole(staging: Staging) -> bool:
    """Put the staged tree in the place of a missing or empty target, in one step."""
    try:
        # rename(2) replaces an empty directory and nothing else.
        staging.tree.rename(staging.target)
    except OSError as error:
        if not staging.target.is_dir():
            raise
        logger.debug("merging into %s: %s", staging.target, error)
        return False
    return True


def _read_plan(staging: Staging) -> _Plan:
    try:
        plan = _PLAN.decode((staging.directory / "plan").read_bytes(), "its plan")
    except OSError as error:
        raise from_oserror(error, f"read the plan in {staging.directory}") from error
    except (CorruptError, UnknownFormatError) as error:
        raise CorruptError(f"{staging.directory} cannot be finished, remove it: {error}") from None
    if not all(is_plain(path.split(b"/")) for path in plan.deletions):
        raise CorruptError(f"{staging.directory} is damaged; remove it")
    return plan


def _read_tree(staging: Staging) -> Tree:
    """Only where directories are merged: to decode a large one takes a tenth of a second."""
    return index.decode((staging.directory / "index").read_bytes())


def remove(stagings: Sequence[Staging]) -> None:
    """Throw working directories away: they are finished, or were never committed."""
    for staging in stagings:
        # Without these nothing of it is ever carried out again.
        for name in ("commit", "plan"):
            (staging.directory / name).unlink(missing_ok=True)
    for staging in stagings:
        _throw_away(staging)


def _throw_away(staging: Staging) -> None:
    """Remove the directory; a target that it lies in keeps its time."""
    with contextlib.suppress(OSError):
        kept = os.stat(staging.directory.parent)
        with contextlib.suppress(OSError):
            remove_tree(staging.directory)
        if staging.is_inside:
            os.utime(staging.target, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def recover(targets: Sequence[Path], on_finished: OnFinished) -> None:
    """Finish or throw away what an interrupted restore left at `targets` (host paths).

    Raises: PermissionDeniedError for a working directory that is not ours; BootseerError where it
    cannot be finished.
    """
    committed: list[Staging] = []
    for target in targets:
        for directory in _places(target):
            try:
                status = os.lstat(directory)
            except OSError:
                continue
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionDeniedError(
                    f"{directory} belongs to somebody else; remove it, it is in the way"
                )
            staging = Staging(target, directory)
            if _is_committed(staging):
                committed.append(staging)
            elif not _others(staging):
                logger.info("removing %s, left by an interrupted restore", directory)
                with contextlib.suppress(OSError):
                    remove_tree(directory)
    for staging in committed:
        logger.warning("finishing the interrupted restore of %s", staging.target)
        _finish(staging, "", on_finished)
        (staging.directory / "plan").unlink()
    for staging in committed:
        if not _others(staging):
            _throw_away(staging)


def _others(staging: Staging) -> bool:
    """Whether targets that are not ours to lock now still need this working directory's commit."""
    try:
        data = (staging.directory / "commit").read_bytes()
        paths = _COMMIT.decode(data, "a commit")
        return any((path / "plan").is_file() for path in paths if path != staging.directory)
    except (OSError, CorruptError):
        return False


def _is_committed(staging: Staging) -> bool:
    plan = read_private_file(staging.directory / "plan", _POINTER)
    return plan is not None and plan.commit.is_file()
