"""Make the directories of a set-up command, from its snapshot if there is one.

`run_setup` computes the key of the set-up, looks for its snapshot on this node and in the store,
and restores it. If there is none, one node of the cluster runs the command under a lease, captures
what it changed and publishes the snapshot; the other nodes wait for it. The states:

    look      -> in place | stored | too old | damaged | missing     (`decide`)
    stored    -> restore, and damaged if that finds damage
    too old, damaged, missing -> lease
    lease     -> mine: look again, run the command, capture, publish; another node's: wait, look

An error of the store, of a snapshot or of a capture never fails a start: the command then runs as
it does without Bootseer, after one warning. A command that has run is never run again.

A start waits for each module that it loads, so that modules of the store, of restores and captures
are imported by the states that need them: most starts find their environment in place.

Call it from the main thread: it may enter a mount namespace and fork a server.
"""

import enum
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from bootseer.base.display import format_age
from bootseer.base.documents import ReadableStore
from bootseer.base.wait_budget import WAIT_BUDGET
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SetupFailedError,
    exit_code_of,
)
from bootseer.linux.mount_table import mount_points
from bootseer.linux.removal import empty_directory
from bootseer.linux.root_paths import resolve_in_root
from bootseer.served.users import sweep_overlays
from bootseer.settings.config import Settings
from bootseer.settings.values import AUTOMATIC_AGE_S
from bootseer.snapshots.command_parts import shown_program
from bootseer.snapshots.key import Report, Resolved, SetupRequest, resolve, working_directory
from bootseer.snapshots.key_parts import Part
from bootseer.snapshots.layers import hard_links, scan_after, scan_before
from bootseer.snapshots.mounted import (
    MountedSnapshot,
    find_mounted,
    for_shared_targets,
    keep_mounted,
    recover_mounts,
    recover_mounts_from,
    shared_targets,
    unmount_damaged,
    unmount_lingering,
)
from bootseer.snapshots.scan import Scan, base_digest, scan, text_of
from bootseer.snapshots.staging import Restoration, abandon_targets, place_targets, recover_targets
from bootseer.snapshots.targets import (
    check_unused,
    load_state,
    locked,
    note_user,
    other_users,
    remember,
    shown_paths,
)

if TYPE_CHECKING:
    from bootseer.fanout.whole_reads import StartDocuments
    from bootseer.served.processes import Process
    from bootseer.snapshots.manifest import Manifest, Outside
    from bootseer.store import LeaseWatch, Store

logger = logging.getLogger(__name__)

OPEN_AGE_S = 7 * 86_400.0
"""Maximum age of a stored snapshot, unless a setting says otherwise, if its set-up gets something
else once an index has something else. Young enough that a security fix arrives within a week; old
enough that one start a week, and no other, pays for the set-up."""

_ROOT = Path("/")
_POLL_FIRST_S = 0.1
_POLL_MAX_S = 2.0
# The set-up's output is not ours to put on stdout, which carries data.
_STDERR = 2


# ---- the decision -----------------------------------------------------------------------------


class Situation(enum.Enum):
    """State of a set-up's snapshot, before anything is changed."""

    IN_PLACE = "the targets hold the snapshot"
    STORED = "the store has the snapshot"
    TOO_OLD = "the snapshot is older than its maximum age"
    DAMAGED = "the snapshot, or a part of it, cannot be read"
    MISSING = "the store has no snapshot of this set-up"


MOUNTED = "it is mounted on the targets"
HELD = "the targets hold it, untouched since it was put there"


class Known(Struct, frozen=True):
    """Facts about the snapshot of one key, on this node and in the store."""

    manifest: "Manifest | None"
    """The stored snapshot; None if there is none, or if it was not read."""
    max_age_s: float
    """Maximum age of the snapshot; 0: any age."""
    damage: str = ""
    """Reason why the manifest cannot be read."""
    in_place: str = ""
    """MOUNTED or HELD; empty if the targets do not hold the snapshot."""
    is_used: bool = False
    """Whether another job uses the files in place, so that they cannot be replaced."""


class Decision(Struct, frozen=True):
    """Situation of a set-up, and the reason for what happens."""

    situation: Situation
    reason: str


def decide(known: Known, now_ns: int) -> Decision:
    """Return the situation of a set-up. `snapshot explain` uses this, too. Pure."""
    if known.damage and not known.in_place:
        return Decision(Situation.DAMAGED, known.damage)
    manifest = known.manifest
    if manifest is None:
        if known.in_place:
            return Decision(Situation.IN_PLACE, known.in_place)
        return Decision(Situation.MISSING, "there is no snapshot of it")
    age_ns = now_ns - manifest.created_ns
    age = format_age(age_ns)
    is_old = known.max_age_s > 0 and age_ns > known.max_age_s * 1e9
    if known.in_place and not is_old:
        return Decision(Situation.IN_PLACE, known.in_place)
    if known.in_place and known.is_used:
        reason = f"{known.in_place}; it is {age} old, and used as it is: another job runs on it"
        return Decision(Situation.IN_PLACE, reason)
    if is_old:
        what = "what is in place" if known.in_place else "its snapshot"
        reason = f"{what} was made {age} ago, which is beyond the maximum age"
        return Decision(Situation.TOO_OLD, reason)
    return Decision(Situation.STORED, f"its snapshot was made {age} ago by {manifest.node}")


def settled_max_age(setting_s: float, *, is_open: bool) -> float:
    """Return the maximum age of a stored snapshot, 0 for any age.

    `is_open`: the result of the set-up may change without notice. What is in place on a node has
    only the limit that the user set: to run pip again on top of what satisfies it changes nothing.
    """
    if setting_s != AUTOMATIC_AGE_S:
        return setting_s
    return OPEN_AGE_S if is_open else 0.0


def look_up(store: ReadableStore, key: str, max_age_s: float) -> Known:
    """Return the facts about a stored snapshot. Raises: UnavailableError, DeadlineError."""
    from bootseer.snapshots import catalogue

    try:
        return Known(catalogue.load(store, key), max_age_s)
    except (CorruptError, NotFoundError) as error:
        return Known(None, max_age_s, damage=str(error))


def may_replace(
    settings: Settings, request: SetupRequest, paths: Mapping[bytes, Path], *, until_exit: bool
) -> bool:
    """Return whether targets can be made anew without changing them for another job."""
    from bootseer.fuse.kernel.mount import can_mount_directly

    if request.root != _ROOT or (until_exit and can_mount_directly()):
        return True
    return not other_users(settings.run_dir, paths.values())


def held_in_place(
    settings: Settings,
    resolved: Resolved,
    paths: Mapping[bytes, Path],
    scans: Mapping[bytes, Scan],
) -> tuple[str, dict[bytes, str]] | None:
    """Return the set-up's key and its targets' base digests, if all targets hold that snapshot.

    None if any target has changed since. `scans` are fresh scans of `paths`.
    """
    bases = {}
    fingerprints = set()
    for target in resolved.targets:
        state = load_state(settings.cache_dir, paths[target], scans[target])
        if state is None:
            return None
        bases[target] = state.base
        fingerprints.add(state.fingerprint)
    key = resolved.key(bases)
    return (key, bases) if fingerprints == {key} else None


def mounted_in_place(
    settings: Settings, resolved: Resolved, paths: Mapping[bytes, Path]
) -> tuple[str, dict[bytes, str], list[MountedSnapshot]] | None:
    """Return the set-up's key, the base digests of its targets, and the mounts, if it is mounted.

    Contents of mounts are not scanned. Raises: BootseerError.
    """
    found = {target: find_mounted(settings, paths[target]) for target in resolved.targets}
    mounts = [one for one in found.values() if one is not None]
    if not mounts:
        return None
    bases = {}
    fingerprints = set()
    for target, one in found.items():
        # The set-up has made nothing in targets without a mount.
        state = (
            one.record
            if one
            else load_state(settings.cache_dir, paths[target], scan(paths[target]))
        )
        if state is None:
            return None
        bases[target] = state.base
        fingerprints.add(state.fingerprint)
    key = resolved.key(bases)
    return (key, bases, mounts) if fingerprints == {key} else None


# ---- one set-up -------------------------------------------------------------------------------


class JobStart(Protocol):
    """Start that goes on in this process: mounts of the set-up end when the process ends."""

    def before_own_view(self) -> None:
        """Finish the mounts that the process needs, before it enters a mount namespace."""

    def waiting_for(self, node: str, created_ns: int) -> Callable[[], object]:
        """Begin the stage of waiting for `node`, and return the function that ends the stage.

        `created_ns` is the time at which the node made the snapshot, 0 if it has not yet.
        """


class SetupResult(Struct, frozen=True):
    """Result of one set-up on one node."""

    how: str
    """"in place" (was there already, untouched), "restored", "captured" (ran, and the snapshot is
    in the store) or "ran" (ran, nothing stored)."""
    fingerprint: str
    """The key of the set-up; empty if it could not be computed."""
    targets: tuple[str, ...]
    file_count: int
    content_bytes: int
    moved_bytes: int
    """Bytes read from the store or written to it."""
    seconds: float
    setup_seconds: float
    """Seconds of the command itself, now or when the snapshot was made."""
    mode: str = ""
    """Way of the restoration: "mount", "link" or "extract"; empty without one."""
    mode_reason: str = ""
    ready_names: tuple[str, ...] = ()
    """Names for BOOTSEER_READY_SOCKETS: "ready" sent there ends the records of mounts."""
    changed_outside: tuple[str, ...] = ()
    """Names that changed outside the targets while a set-up that was "captured" ran, as far as a
    short look told; of "restored" the names in the snapshot."""
    is_changed: bool = False
    """Whether something else had lingered on the targets since the last start."""
    was_here: bool = False
    """Whether it was restored as a link to files that this node had already."""

    @property
    def hit(self) -> bool:
        """Whether the command was not needed."""
        return self.how in ("in place", "restored")


class _NotStoredError(Exception):
    """The command has run, and its snapshot could not be stored: the command must not run again."""

    def __init__(self, setup_s: float) -> None:
        super().__init__()
        self.setup_s = setup_s


def run_setup(
    settings: Settings,
    request: SetupRequest,
    *,
    report: Report = lambda sentence: None,
    wait_s: float = 1800.0,
    lease_s: float = 30.0,
    forks: bool = False,
    job_start: JobStart | None = None,
) -> SetupResult:
    """Make the targets as the set-up command would, by restoring its snapshot if there is one.

    Args:
        report: Called with one sentence at a time; a warning begins with "warning: ".
        wait_s: Longest wait for another process or node that runs the same set-up.
        lease_s: Time for which a node that died holds the others up.
        forks: Whether a server may begin as a copy of this process (see `early_server`).
        job_start: Start that goes on in this process; None: mounts stay when the process ends.

    Raises:
        SetupFailedError: The command failed; the error has its exit code.
        InvalidInputError, NotFoundError: A declared target or input cannot be used.
        BusyError: Another job runs on a target that this set-up would change.
    """
    one = _SetUp(settings, request, report, wait_s, lease_s, forks, job_start)
    sweep_overlays(settings.run_dir)
    try:
        one.resolved = resolve(request, report, settings.cache_dir / "interpreters")
    except (InvalidInputError, NotFoundError):
        raise
    except Exception as error:
        reason = _reason_of(error)
    else:
        return one.make()
    return one.ordinary(reason)


def _reason_of(error: Exception) -> str:
    """Return the reason for the ordinary way. An unexpected error is logged with its traceback."""
    if isinstance(error, BootseerError | OSError):
        return str(error)
    logger.error("unexpected error in a set-up", exc_info=error)
    return f"unexpected {type(error).__name__}: {error}"


class _SetUp:
    """State of one call of `run_setup`. One thread."""

    resolved: Resolved

    def __init__(
        self,
        settings: Settings,
        request: SetupRequest,
        report: Report,
        wait_s: float,
        lease_s: float,
        forks: bool,
        job_start: JobStart | None,
    ) -> None:
        self.settings = settings
        self.request = request
        self.report = report
        self.wait_s = wait_s
        self.lease_s = lease_s
        self.forks = forks
        self.job_start = job_start
        self.started = time.monotonic()
        self.note = for_shared_targets(remember(settings, request.root))
        self.paths: dict[bytes, Path] = {}
        """The path of each target on this host."""
        self.locks: tuple[int, ...] = ()
        """Descriptors of the targets' locks, while they are held."""
        self.process: Process | None = None
        """A server that was begun for a mount."""
        self.key = ""
        self.before: dict[bytes, Scan] = {}
        """The contents of the targets."""
        self.bases: dict[bytes, str] = {}
        """Digests of these contents, as parts of the key."""
        self.is_changed = False
        self.waited_s = 0.0
        self._has_waited = False
        self._end_stage: Callable[[], object] | None = None
        self._stack = ExitStack()

    @cached_property
    def store(self) -> "Store":
        """The own store, open until `make` returns."""
        from bootseer.store import open_own_store

        return self._stack.enter_context(open_own_store(self.settings, self.report))

    @cached_property
    def documents(self) -> "StartDocuments":
        """Reader of documents that all nodes of the start read."""
        from bootseer.fanout.whole_reads import StartDocuments

        return StartDocuments(self.settings, self.store)

    @property
    def hosts(self) -> list[Path]:
        """The paths of the targets on this host."""
        return list(self.paths.values())

    def make(self) -> SetupResult:
        """Go through the states; any error but the command's own ends in `ordinary`."""
        with self._stack:
            try:
                self.paths = {
                    target: resolve_in_root(self.request.root, target)
                    for target in self.resolved.targets
                }
                self.locks = self._stack.enter_context(
                    locked(
                        self.settings.run_dir,
                        self.hosts,
                        deadline_s=self.wait_s,
                        report=self.report,
                    )
                )
                recover_mounts(self.settings, self.hosts)
                recover_targets(self.hosts, self.note)
                return self._note_users(self._with_live_servers())
            except SetupFailedError:
                raise
            except _NotStoredError as error:
                self.report(f"warning: the set-up ran but was not stored: {error.__cause__}")
                return self._note_users(self._result("ran", setup_s=error.setup_s))
            except Exception as error:
                reason, warning = _reason_of(error), WAIT_BUDGET.warning(error)
            return self._note_users(self.ordinary(reason, warning))

    def ordinary(self, reason: str, warning: str = "warning: ") -> SetupResult:
        """Run the command as without Bootseer. `warning`: see `WaitBudget.warning`."""
        self._end_waiting()
        self._leave_to_others()
        self.report(f"{warning}running the set-up without a snapshot: {reason}")
        self._settle()
        self._end_server()
        return self._result("ran", setup_s=_run_command(self.request, self.locks))

    def _note_users(self, result: SetupResult) -> SetupResult:
        """Note that the job runs on the targets now, unless they are its own."""
        if self.job_start is not None and self.request.root == _ROOT:
            note_user(self.settings.run_dir, shared_targets(self.hosts))
        return result

    def _with_live_servers(self) -> SetupResult:
        """Look and make; once more if the server of a mount died meanwhile."""
        try:
            return self._look()
        except (SetupFailedError, _NotStoredError):
            raise
        except (BootseerError, OSError) as error:
            if not recover_mounts_from(self.settings, self.hosts, error):
                raise
        self._end_server()
        return self._look()

    # ---- look ---------------------------------------------------------------------------------

    def _look(self) -> SetupResult:
        """Keep the targets if they hold the snapshot, or go on with the store."""
        kept = self._keep_mount()
        if kept is not None:
            return kept
        self.is_changed = unmount_lingering(self.settings, self.hosts)
        self._scan()
        kept = self._keep_directory()
        if kept is not None:
            return kept
        if self._leave_to_others():
            self._scan()
        self.bases = {target: base_digest(scanned) for target, scanned in self.before.items()}
        # In a container this interpreter's files are not there.
        if self.forks and self.request.root == _ROOT:
            from bootseer.snapshots.restore import early_server

            self.process = self._stack.enter_context(early_server(self.settings))
        self.key = self.resolved.key(self.bases)
        return self._from_store()

    def _keep_mount(self) -> SetupResult | None:
        """Keep the mounts on the targets, if they show the wanted snapshot. Nothing is scanned."""
        found = mounted_in_place(self.settings, self.resolved, self.paths)
        if found is None:
            return None
        self.key, _, mounts = found
        if unmount_damaged(self.settings, mounts):
            self.report(
                f"warning: snapshot {self.key[:12]}, which is mounted, is damaged in the store; "
                "it is restored anew"
            )
            return None
        if not self._is_kept(MOUNTED) or not keep_mounted(
            self.settings, mounts, until_exit=self.job_start is not None
        ):
            return None
        self.report(f"snapshot {self.key[:12]} is mounted already")
        result = self._result("in place", file_count=sum(one.record.file_count for one in mounts))
        return replace(
            result,
            mode=mounts[0].record.mode,
            mode_reason="it was mounted",
            ready_names=tuple(filter(None, (one.record.ready_name for one in mounts))),
        )

    def _keep_directory(self) -> SetupResult | None:
        """Keep the targets, if they hold the wanted snapshot untouched."""
        found = held_in_place(self.settings, self.resolved, self.paths, self.before)
        if found is None:
            return None
        self.key = found[0]
        if not self._is_kept(HELD):
            return None
        self.report(f"snapshot {self.key[:12]} is in place already")
        # Targets themselves do not count, as in manifests.
        count = sum(len(scanned) - 1 for scanned in self.before.values() if scanned)
        return self._result("in place", file_count=count)

    def _is_kept(self, in_place: str) -> bool:
        """Return whether the snapshot in place is not too old, or cannot be replaced."""
        max_age_s = self.settings.snapshot_max_age_s
        if max_age_s <= 0:
            return True
        from bootseer.snapshots import catalogue

        try:
            manifest = catalogue.load(self.store, self.key)
        except BootseerError as error:
            # The right snapshot is in place; an unknown age is no reason to fail.
            self.report(f"warning: cannot tell how old the snapshot in place is: {error}")
            return True
        is_used = not may_replace(
            self.settings, self.request, self.paths, until_exit=self.job_start is not None
        )
        known = Known(manifest, max_age_s, in_place=in_place, is_used=is_used)
        decision = decide(known, time.time_ns())
        if decision.reason != in_place:
            self.report(f"snapshot {self.key[:12]}: {decision.reason}")
        return decision.situation is Situation.IN_PLACE

    def _scan(self) -> None:
        layers = self.request.layers
        self.before = {
            target: scan_before(layers, path) if layers else scan(path)
            for target, path in self.paths.items()
        }

    def _leave_to_others(self) -> bool:
        """Enter an own view of targets on which other jobs run, before anything changes there.

        Returns whether there were such targets. Raises: BusyError if that is not possible.
        """
        # Another root is this job's alone.
        if self.request.root != _ROOT:
            return False
        hosts = shared_targets(self.hosts)
        used = other_users(self.settings.run_dir, hosts)
        if not used:
            return False
        if self.job_start is None:
            check_unused(self.settings.run_dir, hosts)
            return False
        from bootseer.snapshots.mounting import enter_own_view

        enter_own_view(self.settings, used, self.job_start.before_own_view)
        for target, pid in used.items():
            self.report(
                f"process {pid}, another job on this node, runs on something else in {target}: "
                "this job has its own directory there, in a mount namespace of its own"
            )
        return True

    # ---- the store ----------------------------------------------------------------------------

    def _from_store(self) -> SetupResult:
        """Restore the snapshot, or make it under a lease, or wait for the node that makes it."""
        from bootseer.snapshots import catalogue
        from bootseer.store import LeaseWatch
        from bootseer.store.objects.lease import LeaseRenewal

        max_age_s = settled_max_age(self.settings.snapshot_max_age_s, is_open=self.resolved.is_open)
        pause_s = _POLL_FIRST_S
        watch = LeaseWatch()
        # All nodes look at first. What another node has made since is in the store.
        source: ReadableStore = self.documents
        while True:
            known = look_up(source, self.key, max_age_s)
            source = self.store
            decision = decide(known, time.time_ns())
            if decision.situation is Situation.STORED and known.manifest is not None:
                self._end_waiting(known.manifest)
                try:
                    return self._restore(known.manifest)
                except (CorruptError, NotFoundError) as error:
                    decision = Decision(Situation.DAMAGED, str(error))
            if decision.situation is Situation.DAMAGED:
                self.report(
                    f"warning: {decision.reason}; running the set-up to replace the snapshot"
                )
                self._settle()
                self._scan()
            lease = self.store.lease(
                catalogue.lease_key(self.key),
                ttl_s=self.lease_s,
                owner=self.settings.node,
                watch=watch,
            )
            if lease is not None:
                with LeaseRenewal(lease, self.lease_s):
                    # Another node may have published the snapshot before we got the lease.
                    if decision.situation is not Situation.DAMAGED and self._is_published(
                        known.manifest
                    ):
                        continue
                    return self._with_lease(decision.situation, known.manifest, max_age_s)
            if time.monotonic() >= self.started + self.wait_s:
                return self.ordinary(
                    f"another node was still busy with it after {self.wait_s:.0f} s"
                )
            if decision.situation is Situation.DAMAGED:
                return self.ordinary("another node is replacing the snapshot")
            self._wait(watch, pause_s)
            pause_s = min(1.5 * pause_s, _POLL_MAX_S)

    def _is_published(self, known: "Manifest | None") -> bool:
        """Return whether the store has a snapshot, and another one than `known`."""
        from bootseer.snapshots import catalogue

        if known is None:
            return catalogue.exists(self.store, self.key)
        manifest = catalogue.load(self.store, self.key)
        return manifest is not None and manifest.created_ns != known.created_ns

    def _wait(self, watch: "LeaseWatch", pause_s: float) -> None:
        """Wait a moment for the node that holds the lease."""
        import random  # here: a node that waits has time

        if not self._has_waited:
            self._has_waited = True
            if watch.owner != self.settings.node and self.job_start is not None:
                self._end_stage = self.job_start.waiting_for(watch.owner, 0)
            self.report(f"another node is running the set-up of {self.key[:12]}; waiting")
        began = time.monotonic()
        # Spread, so that a thousand nodes do not ask in step.
        left_s = self.started + self.wait_s - began
        time.sleep(min(pause_s * random.uniform(0.5, 1.0), max(0, left_s)))
        self.waited_s += time.monotonic() - began

    def _end_waiting(self, manifest: "Manifest | None" = None) -> None:
        """End the stage of waiting for another node.

        A `manifest` that another node made during this start would have been waited for, had this
        start come earlier: it gets a stage, too.
        """
        is_made_elsewhere = manifest is not None and manifest.node != self.settings.node
        if self.job_start and manifest and is_made_elsewhere and self._end_stage is None:
            self._end_stage = self.job_start.waiting_for(manifest.node, manifest.created_ns)
        if self._end_stage is not None:
            self._end_stage()
            self._end_stage = None

    def _restore(self, manifest: "Manifest") -> SetupResult:
        """Put the stored snapshot on the targets. Raises: as `restore_by_choice`."""
        from bootseer.snapshots import catalogue
        from bootseer.snapshots.restore import Wish, restore_by_choice

        placed = place_targets(manifest, self.request.root)
        if any(item.target.path not in self.paths for item in placed):
            raise CorruptError(f"snapshot {self.key[:12]} holds targets that were not asked for")
        if self.documents.reads_store:
            catalogue.note_used(self.store, manifest)
        wish = Wish(
            self.settings.restore_mode,
            until_exit=self.job_start is not None,
            is_container=self.request.root != _ROOT,
            scratch=self.request.scratch,
            process=self.process,
        )
        work = Restoration(
            self.settings,
            self.store,
            manifest,
            placed,
            self.bases,
            checks_store=self.documents.reads_store,
        )
        done = restore_by_choice(work, wish, on_finished=self.note, report=self.report)
        # Targets that the set-up did not make: known to be missing.
        for target in self.bases.keys() - {item.target.path for item in placed}:
            self.note(self.paths[target], self.key, self.bases[target], "")
        result = self._result(
            "restored",
            file_count=manifest.file_count,
            content_bytes=manifest.content_bytes,
            moved_bytes=done.moved_bytes,
            setup_s=manifest.setup_ns / 1e9,
            changed_outside=manifest.outside.paths,
        )
        waited = f"; waited {self.waited_s:.1f} s for it" if self.waited_s else ""
        self.report(
            f"restored snapshot {self.key[:12]}: {result.file_count} files in "
            f"{result.seconds - self.waited_s:.1f} s instead of {result.setup_seconds:.1f} s, "
            f"{done.choice.sentence()}{waited}"
        )
        if sentence := manifest.outside.restored_sentence(manifest.node):
            self.report(f"warning: {sentence}")
        return replace(
            result,
            mode=done.choice.mode,
            mode_reason=done.choice.reason,
            ready_names=done.ready_names,
            was_here=done.was_here,
        )

    # ---- run and capture ----------------------------------------------------------------------

    def _with_lease(
        self, situation: Situation, manifest: "Manifest | None", max_age_s: float
    ) -> SetupResult:
        """Run the command and publish its snapshot. `manifest`: a snapshot that is too old."""
        # Without a limit of the user's an old snapshot is better than none.
        usable = manifest if self.settings.snapshot_max_age_s == AUTOMATIC_AGE_S else None
        if usable is not None and self._has_waited:
            # The node that was waited for has failed, and uses the old one as well.
            self.report(f"warning: snapshot {self.key[:12]} could not be made anew")
            return self._restore(usable)
        if manifest is not None:
            self.report(f"snapshot {self.key[:12]} is {_age_of(manifest)} old; it is made anew")
        self._end_server()
        self._end_waiting()
        try:
            return self._run_and_capture(situation, max_age_s)
        except SetupFailedError as error:
            if usable is None or not all(map(self._undo_failed_setup, self.paths)):
                raise
            self.report(
                f"warning: {error}; snapshot {self.key[:12]} is used once more, though it is "
                f"{_age_of(usable)} old"
            )
        self.process = None  # ended before the set-up
        return self._restore(usable)

    def _undo_failed_setup(self, target: bytes) -> bool:
        """Undo the changes of a failed set-up to a target; return whether that worked."""
        path, before = self.paths[target], self.before[target]
        if scan_before(self.request.layers, path) == before:
            return True
        inside = os.fsencode(path) + b"/"
        if len(before) > 1 or any(one.path.startswith(inside) for one in mount_points()):
            return False
        try:
            empty_directory(path)
        except OSError:
            return False
        return True

    def _run_and_capture(self, situation: Situation, max_age_s: float) -> SetupResult:
        """Run the command and make its snapshot. Raises: SetupFailedError; _NotStoredError."""
        # Here: a restore needs none of it.
        from bootseer.snapshots import catalogue
        from bootseer.snapshots.sharing import earlier_snapshots, find_base

        is_damaged = situation is Situation.DAMAGED
        is_new = situation is Situation.MISSING
        if situation is not Situation.TOO_OLD:
            self.report(f"no snapshot {self.key[:12]} yet; running the set-up")
        parts = self.resolved.all_parts(self.bases)
        earlier = earlier_snapshots(self.store)
        if is_new and (sentence := _nearest_sentence(parts, earlier)):
            self.report(sentence)
        # A damaged snapshot may be the base.
        base = None if is_damaged else find_base(earlier, parts, self.resolved.targets)
        del earlier
        look = self._outside_look()
        setup_s = _run_command(self.request, self.locks)
        try:
            outside = look(setup_s)
            shown = shown_paths(self.resolved.targets)
            self.report(f"the set-up took {setup_s:.1f} s; capturing {shown}")
            try:
                manifest = self._capture(parts, base, outside, setup_s, replaces=is_damaged)
                is_stored = catalogue.publish(self.store, manifest, replace=not is_new)
            except BusyError as error:
                if base is None:
                    raise
                logger.info("stored whole, since what it was to share is gone: %s", error)
                manifest = self._capture(parts, None, outside, setup_s, replaces=is_damaged)
                is_stored = catalogue.publish(self.store, manifest, replace=not is_new)
        except Exception as error:
            if not isinstance(error, BootseerError | OSError):
                logger.exception("unexpected error in a capture")
            # Whatever it is: the command has run, and must not run again.
            raise _NotStoredError(setup_s) from error
        for target, path in self.paths.items():
            self.note(path, self.key, self.bases[target], "")
        result = self._result(
            "captured" if is_stored else "ran",
            file_count=manifest.file_count,
            content_bytes=manifest.content_bytes,
            moved_bytes=manifest.stored_bytes if is_stored else 0,
            setup_s=setup_s,
            changed_outside=outside.paths,
        )
        if unknown := self.resolved.all_unknown(self.bases):
            age = f"; it is made anew once it is {format_age(int(max_age_s * 1e9))} old"
            self.report(
                f"the key of the snapshot does not tell {'; '.join(unknown)}"
                f"{age if max_age_s else ''}"
            )
        if sentence := outside.sentence():
            self.report(f"warning: {sentence}")
        if not is_stored:
            self.report(
                f"warning: another node has stored snapshot {self.key[:12]} meanwhile, since this "
                "one could not renew its lease; what the set-up made here is not stored"
            )
            return result
        self.report(
            f"stored snapshot {self.key[:12]}: {result.file_count} files; the set-up took "
            f"{setup_s:.1f} s, capturing {result.seconds - setup_s - self.waited_s:.1f} s"
        )
        return result

    def _outside_look(self) -> Callable[[float], "Outside"]:
        """Prepare the search for changes outside the targets.

        Return the function that searches, to be called after the command has run for some seconds.
        """
        from bootseer.snapshots.capture import OutsideLayers, look_outside, now_ns
        from bootseer.snapshots.manifest import Outside

        request = self.request
        environ = os.environ if request.environ is None else request.environ
        directory = working_directory(request)
        if request.layers is not None:
            layers = OutsideLayers(request.layers, environ, directory, self.hosts)
            return lambda setup_s: layers.changed()
        if request.root != _ROOT:
            return lambda setup_s: Outside(is_complete=False)
        began_ns = now_ns()
        return lambda setup_s: look_outside(
            self.settings, began_ns, setup_s, environ, directory, self.hosts
        )

    def _capture(
        self,
        parts: Sequence[Part],
        base: "Manifest | None",
        outside: "Outside",
        setup_s: float,
        *,
        replaces: bool,
    ) -> "Manifest":
        """Store everything that the command did, but for contents in blobs of `base`."""
        from bootseer.snapshots.capture import Change, capture, make_manifest

        wanted = self.resolved.targets
        earlier = {target.path: target for target in base.targets} if base else {}
        if len(earlier) == len(wanted) == 1:
            earlier = dict(zip(wanted, earlier.values(), strict=True))  # at another path
        layers = self.request.layers
        targets = []
        for target in wanted:
            # Once more: the command may have made it a symbolic link.
            host = resolve_in_root(self.request.root, target)
            before = self.before[target]
            is_same = host == self.paths[target]
            after = scan_after(layers, host, before) if is_same else scan(host)
            if not after and not before:
                continue
            if not after:
                raise NotFoundError(f"{text_of(target)} does not exist after the set-up")
            links = hard_links(layers, host, after) if layers else {}
            change = Change(target, host, before, after, links)
            targets.append(
                capture(
                    self.store,
                    self.settings.cache_dir,
                    change,
                    base=earlier.get(target),
                    replace=replaces,
                )
            )
        if not targets:
            raise NotFoundError(f"the set-up made none of {shown_paths(wanted)}")
        return make_manifest(
            parts, targets, setup_ns=int(setup_s * 1e9), node=self.settings.node, outside=outside
        )

    # ---- common steps -------------------------------------------------------------------------

    def _settle(self) -> None:
        """Finish or give up pending restores, before the command writes to the targets."""
        if not self.locks:
            return
        try:
            recover_mounts(self.settings, self.hosts)
        except BootseerError as error:
            logger.warning("what a dead server has mounted stays: %s", error)
        try:
            recover_targets(self.hosts, self.note)
        except BootseerError as error:
            logger.warning("giving up an interrupted restore: %s", error)
            abandon_targets(self.hosts)

    def _end_server(self) -> None:
        """End a server that was begun for a mount.

        Nothing will be mounted, and a set-up may take long.
        """
        if self.process is not None:
            self.process.abandon()

    def _result(
        self,
        how: str,
        *,
        file_count: int = 0,
        content_bytes: int = 0,
        moved_bytes: int = 0,
        setup_s: float = 0.0,
        changed_outside: tuple[str, ...] = (),
    ) -> SetupResult:
        return SetupResult(
            how=how,
            fingerprint=self.key,
            targets=tuple(text_of(target) for target in self.paths),
            file_count=file_count,
            content_bytes=content_bytes,
            moved_bytes=moved_bytes,
            seconds=time.monotonic() - self.started,
            setup_seconds=setup_s,
            changed_outside=changed_outside,
            is_changed=self.is_changed,
        )


def _age_of(manifest: "Manifest") -> str:
    return format_age(time.time_ns() - manifest.created_ns)


def _nearest_sentence(parts: Sequence[Part], earlier: Sequence["Manifest"]) -> str:
    """Return a sentence about the changes since the nearest snapshot, if it is of this set-up."""
    from bootseer.snapshots.diff import compare_parts, in_words, nearest

    near = nearest(parts, earlier)
    if near is None:
        return ""
    differences = compare_parts(near.parts, parts)
    names = {one.part for one in differences}
    if "command" in names and any(name.startswith("target ") for name in names):
        return ""  # another environment altogether
    return f"nearest is snapshot {near.fingerprint[:12]}; it differs in {in_words(differences)}"


def _run_command(request: SetupRequest, locks: Sequence[int]) -> float:
    """Run the command of a set-up, and return the seconds that it took.

    The command inherits the descriptors `locks`: no other process changes the targets while it
    runs, should this process be killed. Raises: SetupFailedError.
    """
    import subprocess  # here: nothing runs where everything is in place

    started = time.monotonic()
    command = list(request.command)
    environ = request.environ
    program = shown_program(command, os.environ if environ is None else environ)
    try:
        done = request.runner(
            command,
            stdout=_STDERR,
            stderr=_STDERR,
            cwd=request.directory or None,
            env=None if environ is None else dict(environ),
            pass_fds=locks,
        )
    except BootseerError as error:
        # An error of a container's runner. The command may have run, so it counts as failed.
        raise SetupFailedError(f"cannot run the set-up: {error}", exit_code_of(error)) from error
    except (OSError, subprocess.SubprocessError) as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        where = working_directory(request)
        raise SetupFailedError(
            f"cannot start the set-up {program!r} in {where}: {error}", code
        ) from error
    code = done.returncode
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        raise SetupFailedError(
            f"the set-up {program!r} was ended by {name}; nothing was stored", 128 - code
        )
    if code:
        raise SetupFailedError(
            f"the set-up {program!r} failed with exit code {code}; nothing was stored", code
        )
    return time.monotonic() - started
