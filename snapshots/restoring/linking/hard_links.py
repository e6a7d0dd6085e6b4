"""Makes a directory whose files are the files of a node's extracted tree, under new names.

Alone owns that: each name is linked and looked at in one pass, of a large tree in two processes;
threads, which share an interpreter, are no faster. What is made is what the tree says; one whose
files are not as they were is not used. Relative to open directories; follows no symbolic links.
"""

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from bootseer.blob.pack.frame_writer import usable_cpus
from bootseer.blob.pack.stat_record import RECORD, put_directory, put_record
from bootseer.blob.tree import Tree
from bootseer.linux.processes import kill_child, reap
from bootseer.linux.removal import remove_tree
from bootseer.served.forked import may_fork
from bootseer.snapshots.restoring.linking.linked import copy_attributes
from bootseer.snapshots.restoring.linking.node_trees import (
    DIRECTORY,
    Build,
    FileTimes,
    NodeTrees,
    is_same_file,
)
from bootseer.snapshots.targets.tree_fingerprint import fingerprint_of_restored, names_to_record

SHARED_NAMES = 5000
"""The number of names from which on a second process pays, which costs as much as a hundred
names."""

# What the other half may take after this one is done, which takes as long.
_OTHER_S = 300.0

_Files = tuple[bytes, list[int]]
"""A directory's path, and the numbers of the names in it that are no directories."""


def link_tree(trees: NodeTrees, index_digest: str, tree: Tree, build: Build, target: Path) -> str:
    """Make `target`, which must not exist, equal to the node's extracted tree. Every file is a
    hard link, so a write to one of them in place is a write to all. Returns the tree fingerprint.
    See `NodeTrees.using`.

    What makes sure that a file is whole looks at its new name: once for both, and what it saw is
    what is there now, since linking to a file changes it.
    """
    recorded = names_to_record(tree)
    made = _Links(tree, target, trees.times)

    def link(source: Path) -> bool:
        if not source.is_dir():
            return False
        if made.link_to(source):
            return True
        remove_tree(target)
        return False

    with trees.using(index_digest, tree, build, link):
        return fingerprint_of_restored(tree, recorded, made.records)


class _Links:
    def __init__(self, tree: Tree, target: Path, times: FileTimes) -> None:
        self._tree = tree
        self._times = times
        self._target = os.fsencode(target)
        # Of both processes.
        self.records = memoryview(mmap.mmap(-1, (tree.name_count + 1) * RECORD.size))

    def link_to(self, source: Path) -> bool:
        """Whether `source` has all that the tree has; else what was made is for the caller to
        remove. Raises: OSError."""
        top = os.fsencode(source)
        tree = self._tree
        try:
            made = self._make_directories()
            files = [(path, self._files_in(inode)) for inode, _, path in made]
            own, others = halves(files)
            with self._another(top, others):
                self._link_all(top, own)
            for _, number, path in reversed(made):
                original, name = os.path.join(top, path), os.path.join(self._target, path)
                copy_attributes(original, name, os.lstat(original))
                put_directory(os.lstat(name), self.records, number)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if tree.name_count != tree.inode_count - 1:
            for path, numbers in files:
                for number in numbers:
                    if tree.link_count(tree.columns.name_inode[number]) > 1:
                        # Each further link to a file has changed it.
                        name = os.path.join(self._target, path, tree.columns.names[number])
                        put_record(os.lstat(name), self.records, number)
        return True

    @contextlib.contextmanager
    def _another(self, top: bytes, files: Sequence[_Files]) -> Iterator[None]:
        """Another process links to these meanwhile, if there are any. Raises: OSError."""
        if not files:
            yield
            return
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = errno.EIO
            try:
                for each in files:
                    if os.getppid() != own:
                        break
                    self._link_all(top, [each])
                else:
                    code = 0
            except OSError as error:
                code = error.errno or code
            finally:
                # All above this frame belongs to the process that was copied.
                os._exit(code)
        try:
            yield
        except BaseException:
            kill_child(pid)
            raise
        ended = reap(pid, _OTHER_S)
        if ended is None:
            kill_child(pid)
        code = errno.ETIMEDOUT if ended is None else ended
        if code:
            code = max(code, 0) or errno.EINTR
            raise OSError(code, os.strerror(code))

    def _make_directories(self) -> list[tuple[int, int, bytes]]:
        """Their inode numbers in the tree, the numbers of their names (the root's: how many there
        are), and their paths; parents first."""
        c = self._tree.columns
        made = [(0, self._tree.name_count, b"")]
        for inode, _, path in made:
            os.mkdir(os.path.join(self._target, path), 0o700)
            for below in range(*self._tree.span(inode)):
                if stat.S_ISDIR(c.mode[c.name_inode[below]]):
                    made.append((c.name_inode[below], below, os.path.join(path, c.names[below])))
        return made

    def _files_in(self, directory: int) -> list[int]:
        c = self._tree.columns
        inodes, modes = c.name_inode, c.mode
        return [i for i in range(*self._tree.span(directory)) if not stat.S_ISDIR(modes[inodes[i]])]

    def _link_all(self, top: bytes, files: Sequence[_Files]) -> None:
        """Raises: FileNotFoundError, also for a file that is not what it should be; OSError."""
        tree, records = self._tree, self.records
        names, inodes = tree.columns.names, tree.columns.name_inode
        for path, numbers in files:
            if not numbers:
                continue
            source = os.open(os.path.join(top, path), DIRECTORY)
            try:
                target = os.open(os.path.join(self._target, path), DIRECTORY)
                try:
                    for number in numbers:
                        name = names[number]
                        os.link(
                            name, name,
                            src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False,
                        )  # fmt: skip
                        found = os.stat(name, dir_fd=target, follow_symlinks=False)
                        if not is_same_file(found, tree, inodes[number], self._times):
                            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                        put_record(found, records, number)
                finally:
                    os.close(target)
            finally:
                os.close(source)


def halves(files: list[_Files]) -> tuple[list[_Files], list[_Files]]:
    """What this process links to, and what another one does: nothing where that would not pay, or
    this one may not be copied."""
    counts = list(accumulate(len(numbers) for _, numbers in files))
    if counts[-1] < SHARED_NAMES or usable_cpus() == 1 or not may_fork():
        return files, []
    cut = next(i for i, count in enumerate(counts, 1) if 2 * count >= counts[-1])
    return files[:cut], files[cut:]
