"""Makes a directory whose files are those of a node's extracted tree, under new names.

Alone owns that: each name is linked and looked at in one pass, in this thread, since two that share
an interpreter and the journal of one file system are no faster. What is made is what the tree says;
one whose files are not as they were is not used. Relative to open directories; follows no symbolic
links.
"""

import os
import shutil
import stat
from pathlib import Path

from bootseer.blob.stat_record import RECORD, put_directory, put_record
from bootseer.blob.tree import Tree
from bootseer.snapshots.exact import made_digest, names_to_record
from bootseer.snapshots.restoring.linked import copy_attributes
from bootseer.snapshots.restoring.node_trees import DIRECTORY, Build, NodeTrees, is_same_file


def link_tree(trees: NodeTrees, index_digest: str, tree: Tree, build: Build, target: Path) -> str:
    """Make `target`, which must not exist, equal to the node's extracted tree, file by file the
    same ones: what is written to one of them in place is written to all. Its `exact.made_digest`.
    See `NodeTrees.using`.

    What makes sure that a file is whole looks at its new name: once for both, and what it saw is
    what is there now, since linking to a file changes it.
    """
    recorded = names_to_record(tree)
    made = _Links(tree, target)

    def link(source: Path) -> bool:
        if not source.is_dir():
            return False
        if made.link_to(source):
            return True
        shutil.rmtree(target)
        return False

    with trees.using(index_digest, tree, build, link):
        return made_digest(tree, recorded, made.records)


class _Links:
    def __init__(self, tree: Tree, target: Path) -> None:
        self._tree = tree
        self._target = os.fsencode(target)
        self.records = bytearray((tree.name_count + 1) * RECORD.size)

    def link_to(self, source: Path) -> bool:
        """Whether `source` has all that the tree has; else what was made is for the caller to
        remove. Raises: OSError."""
        top = os.fsencode(source)
        several: list[tuple[int, bytes]] = []
        try:
            made = self._make_directories()
            for inode, _, path in made:
                numbers = self._files_in(inode)
                if numbers and not self._link_files(top, path, numbers, several):
                    return False
            for _, number, path in reversed(made):
                original, name = os.path.join(top, path), os.path.join(self._target, path)
                copy_attributes(original, name, os.lstat(original))
                put_directory(os.lstat(name), self.records, number)
        except (FileNotFoundError, NotADirectoryError):
            return False
        for number, path in several:
            # Each further link to a file has changed it.
            put_record(os.lstat(os.path.join(self._target, path)), self.records, number)
        return True

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

    def _link_files(
        self, top: bytes, path: bytes, numbers: list[int], several: list[tuple[int, bytes]]
    ) -> bool:
        """Whether each is what it should be. Adds to `several` those that have other names, too."""
        tree, records = self._tree, self.records
        names, inodes = tree.columns.names, tree.columns.name_inode
        source = os.open(os.path.join(top, path), DIRECTORY)
        try:
            target = os.open(os.path.join(self._target, path), DIRECTORY)
            try:
                for number in numbers:
                    name, inode = names[number], inodes[number]
                    os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
                    found = os.stat(name, dir_fd=target, follow_symlinks=False)
                    if not is_same_file(found, tree, inode):
                        return False
                    put_record(found, records, number)
                    if tree.link_count(inode) > 1:
                        several.append((number, os.path.join(path, name)))
            finally:
                os.close(target)
        finally:
            os.close(source)
        return True
