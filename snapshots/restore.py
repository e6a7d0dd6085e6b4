"""Restore of a snapshot: mounted, linked or extracted.

`choose`, which is pure, decides how to restore by facts of the node; `restore_by_choice` finds the
facts and carries the choice out. If a mount or link fails, the snapshot is extracted, with one
warning. The caller holds the locks of the targets and has recovered them. docs/snapshots.md
describes the differences for a job.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.display import quoted
from bootseer.blob.pack.stat_record import Records
from bootseer.blob.tree import Tree
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    from_oserror,
)
from bootseer.fuse.kernel.mount import DEVICE, can_mount_directly
from bootseer.linux import mount_table
from bootseer.linux.processes import is_in_user_namespace
from bootseer.served.processes import TREE, Process, may_mount, start
from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.manifest import Manifest, Target
from bootseer.snapshots.mounted import LINK, MOUNT, recover_mounts
from bootseer.snapshots.mounting import (
    kept_tree,
    link_in_container,
    link_snapshot,
    mount_snapshot,
)
from bootseer.snapshots.node_trees import NodeTrees, copy_tree
from bootseer.snapshots.scan import base_digest, fingerprint_of_restored, names_to_record, scan
from bootseer.snapshots.staging import (
    OnFinished,
    Placed,
    Restoration,
    check_base,
    is_entered,
    one_directory,
    place_targets,
    put_in_place,
    recover_targets,
    why_guarded,
)
from bootseer.snapshots.targets import check_unused, locked, remember
from bootseer.store import Store, open_own_store

logger = logging.getLogger(__name__)
EXTRACT = "extract"
OVERLAY = "overlay"
REFLINK = "reflink"
# Below both limits, an extraction takes less time than starting the server of a mount (0.3 s of one
# processor).
SMALL_BYTES = 16 * 1024 * 1024
_SMALL_COUNT = 1000
# Each mounted target has a server of its own.
TARGETS_MAX = 8


class Facts(Struct, frozen=True):
    """Facts that decide how to restore."""

    may_mount: bool
    """Whether this process has CAP_SYS_ADMIN in the initial user namespace."""
    has_fuse: bool
    """Whether /dev/fuse can be opened."""
    is_container: bool
    """Whether the targets lie in the root of an image that this start has mounted."""
    is_throwaway: bool
    """Whether the targets' file system is an overlay, which is removed with this container."""
    all_whole: bool
    """Whether all targets were empty before their set-up: none is a difference."""
    has_mounts_inside: bool
    """Whether something is mounted below a target; a mount on the target would hide it."""
    is_entered: bool
    """Whether this process's working directory is in a target; it would stay below a mount."""
    has_trees: bool
    """Whether the node's cache has the extracted trees of all targets."""
    can_reflink: bool
    """Whether files of the cache and of the targets can share blocks; tried only for a link that is
    wanted, or where the cache has the trees."""
    target_count: int
    file_count: int
    content_bytes: int
    lingers: bool = False
    """Whether mounts stay for the next start on this node."""


class Choice(Struct, frozen=True):
    """Chosen way of a restore, and the reason."""

    mode: str
    """MOUNT, LINK or EXTRACT."""
    reason: str
    """Reason, as the rest of the sentence "mounted: ..."."""
    method: str = ""
    """Method of LINK: OVERLAY or REFLINK."""
    is_refusal: bool = False
    """Whether the requested way is impossible, for the given reason."""

    def sentence(self) -> str:
        """Return the choice as a sentence for people."""
        done = {MOUNT: "mounted", LINK: "linked", EXTRACT: "extracted"}
        return f"{done[self.mode]}: {self.reason}"


def choose(wanted: str, facts: Facts) -> Choice:
    """Return how to restore: as `wanted`, one of `config.RESTORE_MODES`, if that is possible."""
    if wanted == EXTRACT:
        return Choice(EXTRACT, "it was asked for")
    if wanted == MOUNT:
        problem = _why_not_mounted(facts)
        return _refused(problem, "mounted") if problem else Choice(MOUNT, "it was asked for")
    if wanted == LINK:
        method, problem = _link_method(facts)
        return (
            _refused(problem, "linked") if problem else Choice(LINK, _LINK_REASONS[method], method)
        )
    return _automatic(facts)


def _refused(problem: str, done: str) -> Choice:
    return Choice(EXTRACT, f"it cannot be {done}: {problem}", is_refusal=True)


def _why_not_mounted(facts: Facts) -> str:
    if facts.is_container:
        return "it belongs into an image's root, which is mounted itself"
    if not facts.may_mount:
        return "mounting needs root (CAP_SYS_ADMIN)"
    if not facts.has_fuse:
        return "there is no /dev/fuse"
    return _why_not_covered(facts)


def _why_not_covered(facts: Facts) -> str:
    if facts.has_mounts_inside:
        return "something else is mounted inside a target"
    if facts.is_entered:
        return "the working directory lies in a target, and would not see the mount"
    return ""


def _link_method(facts: Facts) -> tuple[str, str]:
    """Return (method of a link, ""), or ("", reason why a link is impossible)."""
    if facts.can_reflink and not facts.is_container:
        return REFLINK, ""
    if not facts.may_mount:
        return "", (
            "files here cannot share blocks (reflink) with the node's cache, and an overlay over "
            "it needs root"
        )
    if problem := _why_not_covered(facts):
        return "", problem
    return OVERLAY, ""


_LINK_REASONS = {
    REFLINK: "files share their blocks with this node's cache",
    OVERLAY: "an overlay over this node's cache",
}


def _automatic(facts: Facts) -> Choice:
    is_small = facts.content_bytes < SMALL_BYTES and facts.file_count < _SMALL_COUNT
    # The next start of an image has a new root, for which the node keeps the tree.
    is_kept = facts.has_trees or (facts.lingers and facts.is_container)
    if is_small and not is_kept:
        return Choice(EXTRACT, "it is small")
    method, problem = _link_method(facts)
    if facts.is_container:
        # An image's root is removed with the job, so an extraction there would be repeated at
        # every start.
        if method:
            return Choice(LINK, _LINK_REASONS[method], method)
        return Choice(EXTRACT, problem)
    if facts.has_trees and method == REFLINK:
        return Choice(LINK, _LINK_REASONS[method], method)
    # Other files that are written to such a directory would vanish with the mount.
    holds_others = not facts.all_whole and not facts.is_throwaway
    problem = _why_not_mounted(facts)
    if problem and facts.has_trees and method and not holds_others:
        return Choice(LINK, _LINK_REASONS[method], method)
    if problem:
        return Choice(EXTRACT, problem)
    if holds_others:
        return Choice(EXTRACT, "it changes directories that hold other things as well")
    if facts.target_count > TARGETS_MAX:
        return Choice(EXTRACT, f"{facts.target_count} targets are too many mounts")
    return Choice(MOUNT, "root and FUSE are available")


class Wish(Struct, frozen=True):
    """Wishes of the caller of a restore."""

    mode: str
    """Mode, from `config.RESTORE_MODES`."""
    until_exit: bool = False
    """Whether mounts end with this process; else they stay until they are unmounted."""
    is_container: bool = False
    """Whether the targets lie in another root than this host's."""
    scratch: Path | None = None
    """Folder that is removed with that root; None: nothing can be mounted there."""
    process: Process | None = None
    """Server that was started for a mount; its owner ends it if nothing is mounted."""


class Restored(Struct, frozen=True):
    """Result of `restore_by_choice`."""

    choice: Choice
    moved_bytes: int
    """Bytes from the store; for a mount, those until now."""
    ready_names: tuple[str, ...] = ()
    """Sockets for BOOTSEER_READY_SOCKETS, by which the job ends the record of a mount."""
    was_here: bool = False
    """Whether the files are links to a tree that this node had already."""


class _Extraction:
    """Extraction of trees from the store, with a count of the bytes."""

    def __init__(self, work: Restoration) -> None:
        self._work = work
        self.moved_bytes = sum(item.target.index.size_bytes for item in work.placed)
        self.was_here = True

    def extract(
        self, target: Target, tree: Tree, directory: Path, *, recorded: bytes = b""
    ) -> Records:
        """Extract a tree to `directory`, and return the records of the `recorded` names."""
        from bootseer.snapshots.fetch import fetch_tree  # here: a mount needs none of it

        settings = self._work.settings
        done = fetch_tree(
            self._work.store,
            target,
            tree,
            directory,
            settings.deadline_s,
            recorded=recorded,
            start=settings,
        )
        self.moved_bytes += done.moved_bytes
        self.was_here = False
        return done.records


def restore_by_choice(
    work: Restoration,
    wish: Wish,
    *,
    on_finished: OnFinished,
    report: Callable[[str], None],
) -> Restored:
    """Put all targets of a snapshot in place, or change nothing. Raises: as `put_in_place`."""
    try:
        facts = _find_facts(work, wish)
        if wish.is_container and wish.scratch is None:
            facts = replace(facts, may_mount=False)
    except OSError as error:
        raise from_oserror(error, "look at the targets of a restore") from error
    choice = choose(wish.mode, facts)
    warning = ""
    if choice.is_refusal:
        report(f"warning: {choice.sentence()}")
    elif choice.mode != EXTRACT:
        try:
            if choice.mode == MOUNT:
                done = mount_snapshot(work, until_exit=wish.until_exit, process=wish.process)
                return Restored(choice, done.moved_bytes, done.ready_names)
            return _link(work, wish, choice, on_finished)
        except (CorruptError, NotFoundError):
            raise  # the snapshot itself
        except BootseerError as error:
            choice = Choice(EXTRACT, str(error), is_refusal=True)
            warning = f"warning: {choice.sentence()}"
            logger.info("%s", warning)
    extraction = _Extraction(work)

    def fill(target: Target, tree: Tree, directory: Path) -> str:
        recorded = names_to_record(tree) if target.whole and not wish.is_container else b""
        records = extraction.extract(target, tree, directory, recorded=recorded)
        return fingerprint_of_restored(tree, recorded, records)

    put_in_place(work, fill, on_finished)
    if warning:
        # After the extraction: if that fails as well, its error is the only message.
        report(warning)
    return Restored(choice, extraction.moved_bytes)


def _link(work: Restoration, wish: Wish, choice: Choice, on_finished: OnFinished) -> Restored:
    """Restore from the node's extracted trees; missing trees are made."""
    extraction = _Extraction(work)

    def fill(target: Target, tree: Tree, directory: Path) -> str:
        with kept_tree(work, target, extraction.extract) as (source, _):
            copy_tree(source, directory)
        return ""

    if choice.method == REFLINK:
        put_in_place(work, fill, on_finished)
    elif wish.scratch is not None:
        link_in_container(work, extraction.extract, wish.scratch)
    else:
        link_snapshot(work, extraction.extract, until_exit=wish.until_exit)
    return Restored(choice, extraction.moved_bytes, was_here=extraction.was_here)


def _find_facts(work: Restoration, wish: Wish) -> Facts:
    """Return the facts that decide how to restore. Raises: OSError."""
    trees = NodeTrees(work.settings)
    table = mount_table.mount_points()
    placed, manifest = work.placed, work.manifest
    paths = [item.path for item in placed]
    places = [_existing_parent(path) for path in paths]
    is_container = wish.is_container
    has_trees = all(trees.has(item.target.index.digest) for item in placed)
    return Facts(
        may_mount=can_mount_directly() and not is_in_user_namespace(),
        has_fuse=os.access(DEVICE, os.R_OK | os.W_OK),
        is_container=is_container,
        is_throwaway=all(_kind_of(place, table) == b"overlay" for place in places),
        all_whole=all(item.target.whole for item in placed),
        has_mounts_inside=any(
            one.path.startswith(os.fsencode(path) + b"/") for path in paths for one in table
        ),
        is_entered=not is_container and any(map(is_entered, paths)),
        has_trees=has_trees,
        # The trial writes files. Nobody asks for it where a link is neither wanted nor likely.
        can_reflink=(has_trees or wish.mode == LINK)
        and all(trees.can_reflink_to(place) for place in places),
        target_count=len(placed),
        file_count=manifest.file_count,
        content_bytes=manifest.content_bytes,
        lingers=work.settings.linger_s > 0,
    )


def _existing_parent(path: Path) -> Path:
    """Return the nearest existing directory at or above `path`."""
    while not path.is_dir():
        path = path.parent
    return path


def _kind_of(directory: Path, table: Sequence[mount_table.MountPoint]) -> bytes:
    device = os.stat(directory).st_dev
    return next((one.kind for one in table if one.device == device), b"")


_ROOT = Path("/")


@contextlib.contextmanager
def early_server(settings: Settings) -> Iterator[Process | None]:
    """Yield a server for an expected mount; end it after the `with` block if it was not used.

    None if nothing will be mounted, or no server can be begun.
    """
    process = None
    if settings.restore_mode in ("auto", MOUNT) and may_mount():
        # Loaded before the fork, once for both processes.
        from bootseer.store import load_backend

        load_backend(settings.store_url)
        # If the mount needs a server, it is started again, and reports the error.
        with contextlib.suppress(BootseerError):
            process = start(TREE, settings.run_dir, copy=True)
    try:
        yield process
    finally:
        if process is not None:
            process.abandon()


def restore_snapshot(
    settings: Settings,
    key: str,
    directory: Path | None = None,
    *,
    relocates: bool = False,
    allows_system: bool = False,
    report: Callable[[str], None] = lambda sentence: None,
    process: Process | None = None,
) -> Manifest:
    """Put a snapshot in place, or a plain one into `directory`, and return its manifest.

    Mounts stay when the process ends.

    Args:
        relocates: Whether an environment may be changed so that it works in `directory`.
        allows_system: Whether targets may belong to the system (`staging.why_guarded`).
        report: Called with the targets, and with the way that was chosen and why.
        process: Server that was begun for a mount, see `early_server`.

    Raises: InvalidInputError for a target of the system; NotFoundError, CorruptError;
    AlreadyExistsError if something else is there already. Nothing has changed then.
    """
    with open_own_store(settings) as store:
        manifest = catalogue.find(store, key)
        if directory is not None and relocates:
            _restore_relocated(settings, store, manifest, directory, report)
            catalogue.note_used(store, manifest)
            return manifest
        if directory is not None:
            _restore_to(settings, store, manifest, directory)
            catalogue.note_used(store, manifest)
            return manifest
        placed = place_targets(manifest, _ROOT)
        report(f"restoring to {', '.join(quoted(item.target.path) for item in placed)}")
        if not allows_system:
            _check_targets(key, placed)
        hosts = [item.path for item in placed]
        with locked(settings.run_dir, hosts, deadline_s=settings.deadline_s):
            note = remember(settings, _ROOT)
            check_unused(settings.run_dir, hosts)
            recover_mounts(settings, hosts)
            recover_targets(hosts, note)
            bases = {}
            for item in placed:
                before = scan(item.path)
                check_base(manifest, item.target, before)
                bases[item.target.path] = base_digest(before)
            catalogue.note_used(store, manifest)
            work = Restoration(settings, store, manifest, placed, bases)
            wish = Wish(settings.restore_mode, process=process)
            done = restore_by_choice(work, wish, on_finished=note, report=report)
            report(done.choice.sentence())
        if sentence := manifest.outside.restored_sentence(manifest.node):
            report(f"warning: {sentence}")
    return manifest


def _check_targets(key: str, placed: Sequence[Placed]) -> None:
    """Raise InvalidInputError if a target, or its resolved path, belongs to the system."""
    for item in placed:
        for path in (Path(os.fsdecode(item.target.path)), item.path):
            if reason := why_guarded(path, Path.home()):
                raise InvalidInputError(
                    f"the snapshot {key} goes to {path}, which {reason}; see what it holds with "
                    f"`bootseer snapshot show {key} --files`, and add --system to restore it there"
                )


def _restore_relocated(
    settings: Settings,
    store: Store,
    manifest: Manifest,
    directory: Path,
    report: Callable[[str], None],
) -> None:
    from bootseer.snapshots.relocation import restore_relocated

    # Not resolved: the files contain the path that was asked for.
    path = Path(os.path.abspath(directory))
    with locked(settings.run_dir, [path], deadline_s=settings.deadline_s):
        recover_targets([path], remember(settings, _ROOT))
        restore_relocated(settings, store, manifest, path, report)


# Names in directories that contain their own path and work nowhere else.
_BOUND_NAMES = (b"pyvenv.cfg", b"conda-meta", b"site-packages", b"dist-packages")


def _restore_to(settings: Settings, store: Store, manifest: Manifest, directory: Path) -> None:
    """Restore a snapshot of one plain directory at another path.

    Raises: InvalidInputError for several targets, a difference, or a tree that knows its path;
    AlreadyExistsError.
    """
    work = Restoration(settings, store, manifest, (), {})
    target = one_directory(manifest)
    tree, _ = work.load(target)
    names = tree.columns.names
    for bound in _BOUND_NAMES:
        if bound in names:
            raise InvalidInputError(
                f"this snapshot holds {bound.decode()}: it works only at the path where it was "
                "made; restore it without --to, or with --relocate"
            )
    _Extraction(work).extract(target, tree, Path(os.path.abspath(directory)))
