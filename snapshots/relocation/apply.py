"""Changes a staged environment so that it works at another prefix.

Alone writes into files of a staged tree. No other process sees that tree yet, and a failure throws
it away as a whole. Files are changed in place: owner, mode, time, links and attributes stay.
"""

import contextlib
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from bootseer.blob.tree import Tree
from bootseer.errors import AlreadyExistsError, from_oserror
from bootseer.snapshots.catalogue.manifest import Manifest, Target
from bootseer.snapshots.relocation.contents import Prefix, prefix_of
from bootseer.snapshots.relocation.plan import Brought, is_bytecode, relocate_file, stale_bytecode
from bootseer.snapshots.relocation.records import (
    Written,
    files_of_record,
    is_conda_record,
    is_record,
    placeholders_of,
    relocated_conda_record,
    relocated_record,
    written,
)
from bootseer.snapshots.restoring.restore import Placed, fetch_tree, one_directory, restore
from bootseer.snapshots.targets.paths import text_of
from bootseer.snapshots.targets.scan import base_digest, scan
from bootseer.store import Store

_CAPABILITY = "security.capability"
_SHOWN_COUNT = 10
# No text that an installer writes is larger, and no binary with a prefix; what is, is not read into
# memory.
_TEXT_BYTES_MAX = 64 * 1024 * 1024
_BINARY_BYTES_MAX = 4 * 1024 * 1024 * 1024


class Relocation(Struct, frozen=True):
    """What has been done."""

    changed: tuple[bytes, ...]
    """Files and links, relative to the environment."""
    removed: tuple[bytes, ...]
    """Bytecode of changed sources."""
    left: tuple[bytes, ...]
    """Files that hold the old prefix still."""

    def sentences(self, prefix: Prefix) -> Iterator[str]:
        """Yields sentences for people about what was relocated."""
        old = text_of(prefix.old)
        yield f"relocated from {old}: {len(self.changed)} files and links changed"
        if self.left:
            shown = ", ".join(text_of(path) for path in self.left[:_SHOWN_COUNT])
            more = len(self.left) - _SHOWN_COUNT
            yield (
                f"warning: {old} is named in files that were left as they are, since a package "
                f"brought them so or they are binary: {shown}"
                + (f" and {more} more" if more > 0 else "")
            )


def restore_relocated(
    store: Store,
    manifest: Manifest,
    path: Path,
    *,
    deadline_s: float,
    privileges: bool,
    report: Callable[[str], None],
) -> None:
    """An environment at another path, changed so that it works there; the caller holds its lock.

    Raises: as `restore`; AlreadyExistsError; InvalidInputError for one that cannot be moved there.
    """
    target = one_directory(manifest)
    prefix = prefix_of(target.path, os.fsdecode(path))
    _check_free(path)

    def fill(target: Target, tree: Tree, directory: Path) -> str:
        fetch_tree(store, target, tree, directory, deadline_s)
        for sentence in relocate(tree, directory, prefix).sentences(prefix):
            report(sentence)
        return ""

    restore(
        manifest,
        [Placed(target, path)],
        {target.path: base_digest({})},
        store,
        fill=fill,
        # What is there is no longer what the snapshot holds.
        on_finished=lambda target, fingerprint, base, tree_fingerprint: None,
        privileges=privileges,
    )


def _check_free(path: Path) -> None:
    if os.path.islink(path):
        raise AlreadyExistsError(f"{path} is a symbolic link; name the directory itself")
    for folder in (path, *path.parents):
        # Follows links, and says no where it is not allowed to look.
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise AlreadyExistsError(f"{folder} exists and is not a directory")
    if base_digest(scan(path)) != base_digest({}):
        raise AlreadyExistsError(f"{path} is not empty; choose another directory")


def relocate(tree: Tree, directory: Path, prefix: Prefix) -> Relocation:
    """Make what was extracted from `tree` to `directory` an environment at the new prefix.

    Raises: InvalidInputError for a file that has no room for it; BootseerError.
    """
    try:
        return _relocate(tree, os.fsencode(directory), prefix)
    except OSError as error:
        raise from_oserror(error, f"relocate the environment staged in {directory}") from error


def _relocate(tree: Tree, top: bytes, prefix: Prefix) -> Relocation:
    files: dict[int, list[bytes]] = {}
    links: list[tuple[bytes, bytes]] = []
    for path, number in tree.walk():
        mode = tree.mode(number)
        if stat.S_ISREG(mode):
            files.setdefault(number, []).append(path)
        elif stat.S_ISLNK(mode):
            links.append((path, tree.link_target(number)))
    paths = {path for names in files.values() for path in names}
    sizes = tree.columns.size_bytes
    readable = sorted(
        path
        for number, names in files.items()
        if sizes[number] <= _TEXT_BYTES_MAX
        for path in names
    )
    records = [path for path in readable if is_record(path)]
    conda_records = [path for path in readable if is_conda_record(path)]
    last = {*records, *conda_records}

    def read(path: bytes) -> bytes:
        return Path(os.fsdecode(top + b"/" + path)).read_bytes()

    brought = Brought(
        {file for path in records for file in files_of_record(path, read(path))},
        {
            file: placeholder
            for path in conda_records
            for file, placeholder in placeholders_of(read(path)).items()
        },
    )
    changed: dict[bytes, Written] = {}
    left: list[bytes] = []
    needles = list(prefix.forms)
    for names in files.values():
        if is_bytecode(names[0]) or not last.isdisjoint(names):
            continue
        size_bytes = _size_with(top + b"/" + names[0], needles)
        if not size_bytes:
            continue
        # Packages list one of the names of a hard link.
        known = next((name for name in names if brought.by_conda.get(name)), names[0])
        limit_bytes = _BINARY_BYTES_MAX if brought.by_conda.get(known) else _TEXT_BYTES_MAX
        if size_bytes > limit_bytes:
            left.append(known)
            continue
        data = read(known)
        new = relocate_file(known, data, prefix, brought)
        if new is None and prefix.is_in(data):
            left.append(known)
        elif new is not None and new != data:
            _rewrite(top + b"/" + known, new)
            changed.update(dict.fromkeys(names, written(new)))
    removed = stale_bytecode(changed, paths)
    # Wheels' records list the files above, conda's list wheels' records as well.
    revise: list[tuple[Iterable[bytes], Callable[[bytes, bytes], bytes]]] = [
        (records, lambda path, data: relocated_record(path, prefix.text(data), changed, removed)),
        (
            conda_records,
            lambda _, data: relocated_conda_record(prefix.text(data), changed, removed),
        ),
    ]
    for group, revised in revise:
        for path in group:
            data = read(path)
            new = revised(path, data)
            if new != data:
                _rewrite(top + b"/" + path, new)
                changed[path] = written(new)
    with _directory_times(top) as touch:
        for path in removed:
            touch(path)
            os.unlink(top + b"/" + path)
        moved = []
        for path, target in links:
            new_target = prefix.link(path, target)
            if new_target != target:
                touch(path)
                _relink(top + b"/" + path, new_target)
                moved.append(path)
    return Relocation(
        tuple(sorted([*changed, *moved])), tuple(sorted(removed)), tuple(sorted(left))
    )


def _size_with(path: bytes, needles: list[bytes]) -> int:
    """The size of a file that holds one of `needles`; 0 where it holds none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return 0  # nobody but root can read it, there as here
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes < min(map(len, needles)):
            return 0
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as data:
            return size_bytes if any(data.find(needle) >= 0 for needle in needles) else 0
    finally:
        os.close(fd)


def _rewrite(path: bytes, content: bytes) -> None:
    """New content for a file that keeps all else."""
    before = os.lstat(path)
    capability = None
    with contextlib.suppress(OSError):
        capability = os.getxattr(path, _CAPABILITY, follow_symlinks=False)
    if not before.st_mode & stat.S_IWUSR:
        os.chmod(path, stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(fd, rest) :]
        # Writing takes set-user-ID bits and capabilities away.
        os.fchmod(fd, stat.S_IMODE(before.st_mode))
        if capability is not None:
            os.setxattr(fd, _CAPABILITY, capability)
        os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
    finally:
        os.close(fd)


def _relink(path: bytes, target: bytes) -> None:
    """Another target for a symbolic link that keeps its owner and time."""
    before = os.lstat(path)
    os.unlink(path)
    os.symlink(target, path)
    if os.geteuid() == 0:
        os.lchown(path, before.st_uid, before.st_gid)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns), follow_symlinks=False)


@contextlib.contextmanager
def _directory_times(top: bytes) -> Iterator[Callable[[bytes], None]]:
    """Gives a function that is called with each path before its name is changed; directories have
    their modes and times back in the end."""
    before: dict[bytes, os.stat_result] = {}

    def touch(path: bytes) -> None:
        folder = os.path.dirname(top + b"/" + path)
        if folder not in before:
            before[folder] = os.lstat(folder)
            os.chmod(folder, stat.S_IMODE(before[folder].st_mode) | stat.S_IRWXU)

    try:
        yield touch
    finally:
        _put_back(before)


def _put_back(before: Mapping[bytes, os.stat_result]) -> None:
    for folder, status in before.items():
        os.chmod(folder, stat.S_IMODE(status.st_mode))
        os.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))
