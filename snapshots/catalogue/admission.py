"""What a restore takes of a snapshot's tree: a user who may write to a store must not thereby
become root on the nodes that restore from it.

Alone decides that. Changes trees in memory only. Stateless.
"""

import logging
import stat
from array import array

from bootseer.blob.tree import Tree
from bootseer.errors import CorruptError, PermissionDeniedError
from bootseer.snapshots.catalogue.manifest import Target
from bootseer.snapshots.targets.paths import text_of
from bootseer.snapshots.targets.scan import STAGING_PREFIX

_log = logging.getLogger(__name__)

_CAPABILITY = b"security.capability"
_SET_ID = stat.S_ISUID | stat.S_ISGID


def admit_tree(target: Target, tree: Tree, *, privileges: bool) -> None:
    """Check a target's tree, and unless `privileges` take from its files set-user-ID and
    set-group-ID bits and capabilities, which is said. The set-group-ID bit of a directory is no
    privilege: it decides the group of what is made there.

    Raises: CorruptError for the names of restores; PermissionDeniedError for a device node.
    """
    where = text_of(target.path)
    if any(name.name.startswith(STAGING_PREFIX) for name in tree.children(0)):
        raise CorruptError(f"the snapshot of {where} holds a reserved name")
    # Of many thousands of inodes there are few modes; to find these takes the time.
    modes = set(tree.columns.mode)
    kinds = {stat.S_IFMT(mode) for mode in modes}
    if kinds & {stat.S_IFCHR, stat.S_IFBLK}:
        raise PermissionDeniedError(f"the snapshot of {where} holds a device node: not restored")
    if not privileges and (inodes := _privileged(tree, modes)):
        _log.warning(
            "%d files of the snapshot of %s lose set-user-ID and set-group-ID bits or "
            "capabilities; BOOTSEER_RESTORE_PRIVILEGES=on restores them, too",
            len(inodes),
            where,
        )
        _withhold(tree)


def privileged(tree: Tree) -> set[int]:
    """The inodes of the tree's files that have such a bit or capability."""
    return _privileged(tree, set(tree.columns.mode))


def _privileged(tree: Tree, modes: set[int]) -> set[int]:
    columns = tree.columns
    inodes: set[int] = set()
    if marked := {mode for mode in modes if stat.S_ISREG(mode) and mode & _SET_ID}:
        inodes.update(i for i, mode in enumerate(columns.mode) if mode in marked)
    sets = enumerate(columns.xattr_sets, 1)
    if capable := {i for i, pairs in sets if any(name == _CAPABILITY for name, _ in pairs)}:
        inodes.update(i for i, number in enumerate(columns.xattr) if number in capable)
    return inodes


def _withhold(tree: Tree) -> None:
    columns = tree.columns
    columns.mode = array(
        "I", [mode & ~_SET_ID if stat.S_ISREG(mode) else mode for mode in columns.mode]
    )
    columns.xattr_sets = [
        tuple(pair for pair in pairs if pair[0] != _CAPABILITY) for pairs in columns.xattr_sets
    ]
