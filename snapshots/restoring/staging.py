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
import json
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.blob.index import codec as index
from bootseer.blob.tree import Tree
from bootseer.errors import BusyError, CorruptError, PermissionDeniedError, from_oserror
from bootseer.linux.removal import remove_tree
from bootseer.snapshots.catalogue.manifest import is_plain, text_of
from bootseer.snapshots.restoring.host_paths import is_entered, is_mount_point
from bootseer.snapshots.restoring.merge import delete, move_into, set_directories
from bootseer.snapshots.targets.scan import WORK_PREFIX

logger = logging.getLogger(__name__)

_VERSION = 1
_PLAN_BYTES_MAX = 1 << 30


OnFinished = Callable[[Path, str, str, str], None]
"""Called with target, fingerprint, base and exact digest, if it is known, once a target is in
place, and again if a crash lets a restore be finished twice."""


class _Plan(Struct, frozen=True):
    fingerprint: str
    base: str
    deletions: list[bytes]


class Work(Struct, frozen=True):
    """The working directory for one target (a host path without symbolic links)."""

    target: Path
    directory: Path

    @property
    def tree(self) -> Path:
        """Where to extract to."""
        return self.directory / "tree"

    @property
    def is_inside(self) -> bool:
        """Whether it lies in the target, which is a mount point, and not beside it."""
        return self.directory.parent == self.target


def _name(target: Path) -> str:
    return WORK_PREFIX.decode() + hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]


def _places(target: Path) -> tuple[Path, Path]:
    return target.parent / _name(target), target / _name(target)


def make_work(target: Path) -> Work:
    """A new, empty working directory on the target's file system. Raises: BootseerError."""
    beside, inside = _places(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Work(target, inside if is_mount_point(target) else beside)
        work.directory.mkdir(mode=0o700)
    except FileExistsError as error:
        raise BusyError(f"{work.directory} is in the way; remove it") from error
    except OSError as error:
        raise from_oserror(error, f"prepare the restore of {target}") from error
    return work


def write_plan(
    work: Work,
    first: Work,
    *,
    fingerprint: str,
    base: str,
    encoded_tree: bytes,
    deletions: Sequence[bytes],
) -> None:
    """Record what is to be done; nothing is done before `commit`."""
    plan = {
        "version": _VERSION,
        "fingerprint": fingerprint,
        "base": base,
        "commit": text_of(os.fsencode(first.directory / "commit")),
        "deletions": [text_of(path) for path in deletions],
    }
    try:
        (work.directory / "index").write_bytes(encoded_tree)
        (work.directory / "plan").write_text(json.dumps(plan), encoding="ascii")
    except OSError as error:
        raise from_oserror(error, f"write the plan in {work.directory}") from error


def commit(works: Sequence[Work]) -> None:
    """From here on the restore of all planned targets is finished, whatever happens."""
    file = works[0].directory / "commit"
    try:
        draft = file.with_suffix(".draft")
        draft.write_text(
            json.dumps([text_of(os.fsencode(work.directory)) for work in works]), encoding="ascii"
        )
        draft.rename(file)
    except OSError as error:
        raise from_oserror(error, f"write the commit {file}") from error


def is_committed(works: Sequence[Work]) -> bool:
    """Whether `commit` took place, and the rest was not removed yet."""
    return bool(works) and (works[0].directory / "commit").exists()


def abandon(targets: Sequence[Path]) -> None:
    """Forget what an interrupted restore left at `targets`, finished or not."""
    for target in targets:
        for directory in _places(target):
            with contextlib.suppress(OSError):
                if os.lstat(directory).st_uid == os.geteuid():
                    remove([Work(target, directory)])


def complete(works: Sequence[Work], exact: Sequence[str], on_finished: OnFinished) -> None:
    """Carry out committed plans. `exact`: of each staged tree its exact digest, or nothing.
    Raises: BootseerError; the next `recover` goes on."""
    for work, digest in zip(works, exact, strict=True):
        _finish(work, digest, on_finished)
    remove(works)


def _finish(work: Work, exact: str, on_finished: OnFinished) -> None:
    """Carry out a plan: first or again."""
    plan = _read_plan(work)
    is_all = _carry_out(work, plan)
    on_finished(work.target, plan.fingerprint, plan.base, exact if is_all else "")


def _carry_out(work: Work, plan: _Plan) -> bool:
    """Whether the target is now the staged tree, and nothing else."""
    try:
        # Who works in the target, as the shell that started us may, would stay in what is replaced.
        is_kept = work.is_inside or is_entered(work.target)
        if work.tree.is_dir() and not is_kept and _rename_whole(work):
            return True
        tree = _read_tree(work)
        target = os.open(work.target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if work.tree.is_dir():
                staged = os.open(work.tree, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    move_into(staged, target)
                finally:
                    os.close(staged)
            delete(target, plan.deletions)
            set_directories(target, tree)
        finally:
            os.close(target)
    except OSError as error:
        raise from_oserror(error, f"finish the restore of {work.target}") from error
    return False


def _rename_whole(work: Work) -> bool:
    """Put the staged tree in the place of a missing or empty target, in one step."""
    try:
        # rename(2) replaces an empty directory and nothing else.
        work.tree.rename(work.target)
    except OSError as error:
        if not work.target.is_dir():
            raise
        logger.debug("merging into %s: %s", work.target, error)
        return False
    return True


def _read_plan(work: Work) -> _Plan:
    try:
        with (work.directory / "plan").open("rb") as file:
            document = json.loads(file.read(_PLAN_BYTES_MAX))
        if document["version"] != _VERSION:
            raise CorruptError(f"{work.directory} was left by another release; remove it")
        plan = _Plan(
            fingerprint=str(document["fingerprint"]),
            base=str(document["base"]),
            deletions=[text.encode("utf-8", "surrogateescape") for text in document["deletions"]],
        )
    except OSError as error:
        raise from_oserror(error, f"read the plan in {work.directory}") from error
    except CorruptError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{work.directory} is damaged: {error}; remove it") from None
    if not all(is_plain(path.split(b"/")) for path in plan.deletions):
        raise CorruptError(f"{work.directory} is damaged; remove it")
    return plan


def _read_tree(work: Work) -> Tree:
    """Only where directories are merged: to decode a large one takes a tenth of a second."""
    return index.decode((work.directory / "index").read_bytes())


def remove(works: Sequence[Work]) -> None:
    """Throw working directories away: they are finished, or were never committed."""
    for work in works:
        # Without these nothing of it is ever carried out again.
        for name in ("commit", "plan"):
            (work.directory / name).unlink(missing_ok=True)
    for work in works:
        _throw_away(work)


def _throw_away(work: Work) -> None:
    """Remove the directory; a target that it lies in keeps its time."""
    with contextlib.suppress(OSError):
        kept = os.stat(work.directory.parent)
        with contextlib.suppress(OSError):
            remove_tree(work.directory)
        if work.is_inside:
            os.utime(work.target, ns=(kept.st_atime_ns, kept.st_mtime_ns))


def recover(targets: Sequence[Path], on_finished: OnFinished) -> None:
    """Finish or throw away what an interrupted restore left at `targets` (host paths).

    Raises: PermissionDeniedError for a working directory that is not ours; BootseerError where it
    cannot be finished.
    """
    committed: list[Work] = []
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
            work = Work(target, directory)
            if _is_committed(work):
                committed.append(work)
            elif not _others(work):
                logger.info("removing %s, left by an interrupted restore", directory)
                with contextlib.suppress(OSError):
                    remove_tree(directory)
    for work in committed:
        logger.warning("finishing the interrupted restore of %s", work.target)
        _finish(work, "", on_finished)
        (work.directory / "plan").unlink()
    for work in committed:
        if not _others(work):
            _throw_away(work)


def _others(work: Work) -> bool:
    """Whether targets that are not ours to lock now still need this working directory's commit."""
    try:
        paths = json.loads((work.directory / "commit").read_text(encoding="ascii"))
        return any(Path(path, "plan").is_file() for path in paths if Path(path) != work.directory)
    except (OSError, ValueError, TypeError):
        return False


def _is_committed(work: Work) -> bool:
    try:
        with (work.directory / "plan").open("rb") as file:
            return Path(json.loads(file.read(_PLAN_BYTES_MAX))["commit"]).is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False
