"""Make the directories of a set-up command, from its snapshot if there is one.

`run_setup` computes the key of the set-up, looks for its snapshot on this node and in the store,
and restores it. If there is none, one node of the cluster runs the command under a lease, captures
what it changed and publishes the snapshot; the other nodes wait for it. An error of the store, of a
snapshot or of a capture never fails a start: the command then runs as it does without Bootseer,
after one warning. A command that has run is never run again.

Call it from the main thread: it may enter a mount namespace and fork a server.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.base.shown import shown_age
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SetupFailedError,
    exit_code_of,
)
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.linux.mount_table import mount_points
from bootseer.linux.removal import empty_directory
from bootseer.linux.root_paths import resolve_in_root
from bootseer.served.cover_users import sweep_covers
from bootseer.served.processes import Process
from bootseer.settings.config import Settings
from bootseer.settings.values import AUTOMATIC_AGE_S
from bootseer.snapshots import catalogue
from bootseer.snapshots.key import Report, Request, Resolved, resolve, working_directory
from bootseer.snapshots.layers import hard_links, scan_after, scan_before
from bootseer.snapshots.manifest import Manifest, Outside
from bootseer.snapshots.mounted import (
    Found,
    drop_damaged,
    enter_own_view,
    find_mounted,
    keep_mounted,
    noting_shared,
    recover_mounts,
    recover_mounts_from,
    shared_targets,
    take_off_lingering,
)
from bootseer.snapshots.parts import Part, shown_program
from bootseer.snapshots.place import abandon_targets, place_targets, recover_targets
from bootseer.snapshots.restore import Wish, early_server, restore_by_choice
from bootseer.snapshots.scan import Scan, base_digest, scan, text_of
from bootseer.snapshots.targets import (
    check_unused,
    load_state,
    locked,
    note_user,
    other_users,
    remember,
    shown_paths,
)
from bootseer.store import LeaseWatch, Store, open_own_store
from bootseer.store.objects.lease import LeaseRenewal

logger = logging.getLogger(__name__)
OPEN_AGE_S = 7 * 86_400.0
"""How old a snapshot may be, unless a setting says otherwise, if its set-up gets something else
once an index has something else. Young enough that a security fix arrives within a week; old enough
that one start a week, and no other, pays for the set-up."""


def settled_max_age(setting_s: float, *, is_open: bool) -> float:
    """How old a stored snapshot may be, 0 for any age, of a set-up whose result may change without
    notice, or not. What is in place on a node has only the limit that the user set: to run pip
    again on top of what satisfies it changes nothing."""
    if setting_s != AUTOMATIC_AGE_S:
        return setting_s
    return OPEN_AGE_S if is_open else 0.0


def is_too_old(manifest: Manifest, max_age_s: float) -> bool:
    """Whether a snapshot is older than `max_age_s`; without a positive one none is."""
    return max_age_s > 0 and time.time_ns() - manifest.created_ns > max_age_s * 1e9


def age_of(manifest: Manifest) -> str:
    """A snapshot's age for people."""
    return shown_age(time.time_ns() - manifest.created_ns)


class SetupResult(Struct, frozen=True):
    """What `run_setup` did."""

    how: str
    """"in place" (was there already, untouched), "restored", "captured" (ran, and the snapshot is
    in the store) or "ran" (ran, nothing stored)."""
    fingerprint: str
    """Empty where it could not be computed."""
    targets: tuple[str, ...]
    file_count: int
    content_bytes: int
    moved_bytes: int
    """Over the network, to or from the store."""
    seconds: float
    setup_seconds: float
    """Seconds of the command itself, now or when the snapshot was made."""
    mode: str = ""
    """How it was restored: "mount", "link", "hardlink" or "extract"; empty where it was not."""
    mode_reason: str = ""
    ready_names: tuple[str, ...] = ()
    """For BOOTSEER_READY_SOCKETS: who sends "ready" there ends the records of mounts."""
    changed_outside: tuple[str, ...] = ()
    """What changed outside the targets while a set-up that was "captured" ran, as far as a short
    look told; of "restored": the first of that, as the snapshot has it."""
    is_changed: bool = False
    """Whether something else had lingered on the targets since the last start."""
    was_here: bool = False
    """Whether it was restored as a link to files that this node had already."""

    @property
    def hit(self) -> bool:
        """Whether the command was not needed."""
        return self.how in ("in place", "restored")


NoteWait = Callable[[str, int], Callable[[], object]]
"""Begins the stage of waiting for a node which is named; `created_ns` (0: not yet) is when that one
had made what was waited for. Gives what ends the stage."""


def no_wait(node: str, created_ns: int) -> Callable[[], object]:
    """The `NoteWait` of a set-up that has no timeline."""
    return lambda: None


class Attempt(Struct):
    """One call of `run_setup`."""

    settings: Settings
    request: Request
    report: Report
    started: float
    """When the attempt began, on the monotonic clock."""
    until_exit: bool
    """What is mounted goes when this process ends."""
    note: Callable[[Path, str, str, str], None]
    """Saves that a target holds a fingerprint, made on a base. See `state.remember`."""
    process: Process | None = None
    """Serves a mount, if one was begun."""
    targets: tuple[bytes, ...] = ()
    paths: dict[bytes, Path] = field(default_factory=dict)
    """The path of each target on this host."""
    locks: tuple[int, ...] = ()
    """Descriptors of the targets' locks, as long as they are held."""
    key: str = ""
    """The fingerprint; empty until it is known."""
    max_age_s: float = 0.0
    """How old a stored snapshot may be; 0: any age."""
    note_wait: NoteWait = no_wait
    is_changed: bool = False
    """Whether what had lingered on the targets was another one."""
    waited_s: float = 0.0
    """Seconds of waiting for another process or node that ran the same set-up."""

    def scan(self) -> dict[bytes, Scan]:
        """What the targets hold now."""
        layers = self.request.layers
        return {target: scan_before(layers, path) for target, path in self.paths.items()}

    def result(
        self,
        how: str,
        *,
        file_count: int = 0,
        content_bytes: int = 0,
        moved_bytes: int = 0,
        setup_s: float = 0.0,
        changed_outside: tuple[str, ...] = (),
    ) -> SetupResult:
        """What came of it by now."""
        return SetupResult(
            how=how,
            fingerprint=self.key,
            targets=tuple(text_of(target) for target in self.targets),
            file_count=file_count,
            content_bytes=content_bytes,
            moved_bytes=moved_bytes,
            seconds=time.monotonic() - self.started,
            setup_seconds=setup_s,
            changed_outside=changed_outside,
            is_changed=self.is_changed,
        )


def keep_mount(attempt: Attempt, store: Store, resolved: Resolved) -> SetupResult | None:
    """What is mounted on the targets, if it is what was asked for: nothing is scanned then."""
    found = mounts_in_place(attempt.settings, resolved, attempt.paths)
    if found is None:
        return None
    attempt.key, mounts = found
    if drop_damaged(attempt.settings, mounts):
        attempt.report(
            f"warning: snapshot {attempt.key[:12]}, which is mounted, is damaged in the store; "
            "it is restored anew"
        )
        return None
    if _is_outdated(attempt, store) or not keep_mounted(
        attempt.settings, mounts, until_exit=attempt.until_exit
    ):
        return None
    attempt.report(f"snapshot {attempt.key[:12]} is mounted already")
    result = attempt.result("in place", file_count=sum(one.record.file_count for one in mounts))
    return replace(
        result,
        mode=mounts[0].record.mode,
        mode_reason="it was mounted",
        ready_names=tuple(filter(None, (one.record.ready_name for one in mounts))),
    )


def keep_in_place(
    attempt: Attempt, store: Store, resolved: Resolved, before: Mapping[bytes, Scan]
) -> SetupResult | None:
    """What the targets hold, untouched, if it is what was asked for."""
    found = key_in_place(attempt.settings.cache_dir, resolved, attempt.paths, before)
    if found is None:
        return None
    attempt.key = found[0]
    if _is_outdated(attempt, store):
        return None
    attempt.report(f"snapshot {attempt.key[:12]} is in place already")
    # Targets themselves do not count, as in manifests.
    count = sum(len(scanned) - 1 for scanned in before.values() if scanned)
    return attempt.result("in place", file_count=count)


def _is_outdated(attempt: Attempt, store: Store) -> bool:
    """Whether the snapshot in place is too old by now."""
    max_age_s = attempt.settings.snapshot_max_age_s
    if max_age_s <= 0:
        return False
    try:
        manifest = catalogue.load(store, attempt.key)
    except BootseerError as error:
        # What is here is what was asked for; that it may be too old is no reason to fail.
        attempt.report(f"warning: cannot tell how old the snapshot in place is: {error}")
        return False
    if manifest is None or not is_too_old(manifest, max_age_s):
        return False
    age = age_of(manifest)
    attempt.report(f"snapshot {attempt.key[:12]}, which is in place, is {age} old")
    if not _may_replace(attempt):
        attempt.report("it is used as it is: another job on this node runs on it")
        return False
    return True


def _may_replace(attempt: Attempt) -> bool:
    """Whether what is in place can be made anew without changing it for another job."""
    if attempt.request.root != Path("/") or (attempt.until_exit and can_mount_directly()):
        return True
    return not other_users(attempt.settings.run_dir, attempt.paths.values())


def restore_instead(
    attempt: Attempt,
    store: Store,
    manifest: Manifest,
    before: Mapping[bytes, Scan],
    bases: Mapping[bytes, str],
    error: SetupFailedError,
) -> SetupResult:
    """Put a stored snapshot on the targets, though it is old, since the set-up that was to replace
    it has failed. What that left where nothing was (`before`) is removed.

    Raises: `error` where the targets cannot be made as they were; as `restore_by_choice`.
    """
    for target, path in attempt.paths.items():
        if not _made_as_before(attempt, path, before[target]):
            raise error
    attempt.report(
        f"warning: {error}; snapshot {attempt.key[:12]} is used once more, though it is "
        f"{age_of(manifest)} old"
    )
    attempt.process = None  # ended before the set-up
    return restore_stored(attempt, store, manifest, bases)


def _made_as_before(attempt: Attempt, path: Path, before: Scan) -> bool:
    if scan_before(attempt.request.layers, path) == before:
        return True
    inside = os.fsencode(path) + b"/"
    if len(before) > 1 or any(one.path.startswith(inside) for one in mount_points()):
        return False
    try:
        empty_directory(path)
    except OSError:
        return False
    return True


def restore_stored(
    attempt: Attempt, store: Store, manifest: Manifest, bases: Mapping[bytes, str]
) -> SetupResult:
    """Put the stored snapshot on the targets. Raises: as `restore_by_choice`."""
    placed = place_targets(manifest, attempt.request.root)
    if any(item.target.path not in attempt.paths for item in placed):
        raise CorruptError(f"snapshot {attempt.key[:12]} holds targets that were not asked for")
    catalogue.note_used(store, manifest)
    wish = Wish(
        attempt.settings.restore_mode,
        until_exit=attempt.until_exit,
        is_container=attempt.request.root != Path("/"),
        scratch=attempt.request.scratch,
        process=attempt.process,
    )
    done = restore_by_choice(
        attempt.settings,
        store,
        manifest,
        placed,
        bases,
        wish,
        on_finished=attempt.note,
        report=attempt.report,
    )
    # Targets that the set-up did not make: known to be missing.
    for target in bases.keys() - {item.target.path for item in placed}:
        attempt.note(attempt.paths[target], attempt.key, bases[target], "")
    result = attempt.result(
        "restored",
        file_count=manifest.file_count,
        content_bytes=manifest.content_bytes,
        moved_bytes=done.moved_bytes,
        setup_s=manifest.setup_ns / 1e9,
        changed_outside=manifest.outside.paths,
    )
    waited = f"; waited {attempt.waited_s:.1f} s for it" if attempt.waited_s else ""
    attempt.report(
        f"restored snapshot {attempt.key[:12]}: {result.file_count} files in "
        f"{result.seconds - attempt.waited_s:.1f} s instead of {result.setup_seconds:.1f} s, "
        f"{done.choice.sentence()}{waited}"
    )
    if sentence := manifest.outside.restored_sentence(manifest.node):
        attempt.report(f"warning: {sentence}")
    return replace(
        result,
        mode=done.choice.mode,
        mode_reason=done.choice.reason,
        ready_names=done.ready_names,
        was_here=done.was_here,
    )


def key_in_place(
    cache_dir: Path,
    resolved: Resolved,
    paths: Mapping[bytes, Path],
    scans: Mapping[bytes, Scan],
) -> tuple[str, dict[bytes, str]] | None:
    """The set-up's fingerprint and what was in its targets before, if all of them (`paths` on
    this host, found to hold `scans`) hold that snapshot, untouched since; else None."""
    states = [load_state(cache_dir, paths[target], scans[target]) for target in resolved.targets]
    known = [state for state in states if state is not None]
    if len(known) < len(resolved.targets):
        return None
    bases = {target: state.base for target, state in zip(resolved.targets, known, strict=True)}
    key = resolved.key(bases)
    return (key, bases) if {state.fingerprint for state in known} == {key} else None


def mounts_in_place(
    settings: Settings, resolved: Resolved, paths: Mapping[bytes, Path]
) -> tuple[str, list[Found]] | None:
    """`key_in_place` for snapshots that are mounted: the fingerprint and the mounts. Nothing in
    them is looked at. Raises: BootseerError."""
    mounts: list[Found] = []
    bases: dict[bytes, str] = {}
    fingerprints = set()
    others = []
    for target in resolved.targets:
        found = find_mounted(settings, paths[target])
        if found is None:
            others.append(target)
            continue
        mounts.append(found)
        bases[target] = found.record.base
        fingerprints.add(found.record.fingerprint)
    if not mounts:
        return None
    for target in others:
        # The set-up has made nothing here.
        state = load_state(settings.cache_dir, paths[target], scan(paths[target]))
        if state is None:
            return None
        bases[target] = state.base
        fingerprints.add(state.fingerprint)
    key = resolved.key(bases)
    return (key, mounts) if fingerprints == {key} else None


# The set-up's output is not ours to put on stdout, which carries data.
_STDERR = 2


class NotStoredError(Exception):
    """The command has run; its snapshot could not be stored. It must not run again."""

    def __init__(self, setup_s: float) -> None:
        super().__init__()
        self.setup_s = setup_s


class Circumstances(Struct, frozen=True):
    """Under which a command is run."""

    resolved: Resolved
    before: Mapping[bytes, Scan]
    """What the targets held."""
    bases: Mapping[bytes, str]
    """What the targets held before, as parts of the fingerprint."""
    replace: bool = False
    """What is stored is damaged."""
    renew: bool = False
    """What is stored is whole, but too old."""


class Ran(Struct, frozen=True):
    """A command that has been run."""

    setup_s: float
    """How long it took."""
    outside: Outside
    """What it changed that is not captured."""


def run_and_capture(attempt: Attempt, store: Store, under: Circumstances) -> SetupResult:
    """Run the command and make its snapshot. Raises: SetupFailedError; NotStoredError."""
    # Here: a restore needs none of it.
    from bootseer.snapshots.sharing import earlier_snapshots, find_base

    if not under.renew:
        attempt.report(f"no snapshot {attempt.key[:12]} yet; running the set-up")
    parts = under.resolved.all_parts(under.bases)
    earlier = earlier_snapshots(store)
    if not (under.renew or under.replace) and (sentence := _nearest(parts, earlier)):
        attempt.report(sentence)
    # What is damaged may be the base.
    base = None if under.replace else find_base(earlier, parts, attempt.targets)
    del earlier
    look = _look_outside(attempt)
    setup_s = run_command(attempt.request, attempt.locks)
    try:
        ran = Ran(setup_s, look(setup_s))
        attempt.report(f"the set-up took {setup_s:.1f} s; capturing {shown_paths(attempt.targets)}")
        manifest, is_stored = _publish(attempt, store, under, parts, base, ran)
    except Exception as error:
        if not isinstance(error, BootseerError | OSError):
            logger.exception("unexpected error in a capture")
        # Whatever it is: the command has run, and must not run again.
        raise NotStoredError(setup_s) from error
    for target, path in attempt.paths.items():
        attempt.note(path, attempt.key, under.bases[target], "")
    result = attempt.result(
        "captured" if is_stored else "ran",
        file_count=manifest.file_count,
        content_bytes=manifest.content_bytes,
        moved_bytes=manifest.stored_bytes if is_stored else 0,
        setup_s=setup_s,
        changed_outside=ran.outside.paths,
    )
    if not_in_key := under.resolved.all_unknown(under.bases):
        limit = attempt.max_age_s
        renewed = f"; it is made anew once it is {shown_age(int(limit * 1e9))} old" if limit else ""
        attempt.report(f"the key of the snapshot does not tell {'; '.join(not_in_key)}{renewed}")
    if sentence := ran.outside.sentence():
        attempt.report(f"warning: {sentence}")
    if not is_stored:
        attempt.report(
            f"warning: another node has stored snapshot {attempt.key[:12]} meanwhile, since this "
            "one could not renew its lease; what the set-up made here is not stored"
        )
        return result
    attempt.report(
        f"stored snapshot {attempt.key[:12]}: {result.file_count} files; the set-up took "
        f"{setup_s:.1f} s, capturing {result.seconds - setup_s - attempt.waited_s:.1f} s"
    )
    return result


def _look_outside(attempt: Attempt) -> Callable[[float], Outside]:
    """Before the command: what gives, when that has taken some seconds, what else it changed."""
    # Here: a restore needs none of it.
    from bootseer.snapshots.capture import OutsideLayers, look_outside, now_ns

    request = attempt.request
    environ = os.environ if request.environ is None else request.environ
    directory = working_directory(request)
    targets = list(attempt.paths.values())
    if request.layers is not None:
        layers = OutsideLayers(request.layers, environ, directory, targets)
        return lambda setup_s: layers.changed()
    if request.root != Path("/"):
        return lambda setup_s: Outside(is_complete=False)
    began_ns = now_ns()
    return lambda setup_s: look_outside(
        attempt.settings, began_ns, setup_s, environ, directory, targets
    )


def _nearest(parts: Sequence[Part], earlier: Sequence[Manifest]) -> str:
    """Say what has changed since the snapshot that comes nearest, if it is one of this set-up."""
    from bootseer.snapshots.diff import compare_parts, in_words, nearest

    near = nearest(parts, earlier)
    if near is None:
        return ""
    differences = compare_parts(near.parts, parts)
    names = {one.part for one in differences}
    if "command" in names and any(name.startswith("target ") for name in names):
        return ""  # another environment altogether
    return f"nearest is snapshot {near.fingerprint[:12]}; it differs in {in_words(differences)}"


def _publish(
    attempt: Attempt,
    store: Store,
    under: Circumstances,
    parts: Sequence[Part],
    base: Manifest | None,
    ran: Ran,
) -> tuple[Manifest, bool]:
    """What the set-up made, and whether it is in the store: else another node's is."""
    manifest = _captured(attempt, store, under, parts, base, ran)
    try:
        is_stored = catalogue.publish(store, manifest, replace=under.replace or under.renew)
    except BusyError as error:
        if not manifest.is_layered:
            raise
        logger.info("stored whole, since what it was to share is gone: %s", error)
        manifest = _captured(attempt, store, under, parts, None, ran)
        is_stored = catalogue.publish(store, manifest, replace=under.replace or under.renew)
    return manifest, is_stored


def _captured(
    attempt: Attempt,
    store: Store,
    under: Circumstances,
    parts: Sequence[Part],
    base: Manifest | None,
    ran: Ran,
) -> Manifest:
    """All that the command did, in the store, but for what blobs of `base` have already."""
    from bootseer.snapshots.capture import Change, capture, make_manifest

    earlier = {target.path: target for target in base.targets} if base else {}
    if len(earlier) == len(attempt.targets) == 1:
        earlier = dict(zip(attempt.targets, earlier.values(), strict=True))  # at another path
    layers = attempt.request.layers
    targets = []
    for target in attempt.targets:
        # Once more: the command may have made it a symbolic link.
        host = resolve_in_root(attempt.request.root, target)
        before = under.before[target]
        is_same = host == attempt.paths[target]
        after = scan_after(layers, host, before) if is_same else scan(host)
        if not after and not before:
            continue
        if not after:
            raise NotFoundError(f"{text_of(target)} does not exist after the set-up")
        links = hard_links(layers, host, after) if layers else {}
        change = Change(target, host, before, after, links)
        cache_dir = attempt.settings.cache_dir
        targets.append(
            capture(store, cache_dir, change, base=earlier.get(target), replace=under.replace)
        )
    if not targets:
        raise NotFoundError(f"the set-up made none of {shown_paths(attempt.targets)}")
    return make_manifest(
        parts,
        targets,
        setup_ns=int(ran.setup_s * 1e9),
        node=attempt.settings.node,
        outside=ran.outside,
    )


def run_command(request: Request, locks: Sequence[int]) -> float:
    """Run it; how many seconds it took. `locks`: descriptors that it inherits, so that no other
    process changes the targets while it runs, should this process be killed. Raises:
    SetupFailedError."""
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
        # Of a container's runner. It may have run: as good as the command's own failure.
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


_POLL_FIRST_S = 0.1
_POLL_MAX_S = 2.0


def run_setup(
    settings: Settings,
    request: Request,
    *,
    report: Report = lambda sentence: None,
    wait_s: float = 1800.0,
    lease_s: float = 30.0,
    until_exit: bool = False,
    forks: bool = False,
    before_own_view: Callable[[], None] = lambda: None,
    note_wait: NoteWait = no_wait,
) -> SetupResult:
    """Make the targets as the set-up command would, by restoring its snapshot if there is one.

    `report` gets what happens, a sentence at a time; a warning begins with "warning: ". `wait_s`
    bounds the wait for another process or node that is running the same set-up; `lease_s` is how
    long a node that died holds the others up. `until_exit`: what is mounted goes when
    this process ends, whatever program it is by then; else it stays.
    `forks`: a server may begin as a copy of this process (see `early_server`).
    `before_own_view`: called before this process enters a mount namespace of its own, which it does
    only with `until_exit`, where another job runs on a target (see `mounted.enter_own_view`).
    `note_wait`: begins the stage of waiting for another node.

    Raises: SetupFailedError with the command's exit code; InvalidInputError or NotFoundError for
    declared targets or inputs that cannot be used; BusyError where another job runs on a target
    that this set-up would change.
    """
    started = time.monotonic()
    sweep_covers(settings.run_dir)
    note = noting_shared(remember(settings, request.root))
    attempt = Attempt(settings, request, report, started, until_exit, note, note_wait=note_wait)
    run = _Run(attempt, wait_s, lease_s, forks, before_own_view)
    try:
        resolved = resolve(request, report, settings.cache_dir / "interpreters")
    except (InvalidInputError, NotFoundError):
        raise
    except Exception as error:
        if not isinstance(error, BootseerError | OSError):
            logger.exception("unexpected error before a set-up")
        return run.ordinary(str(error))
    return run.guarded(resolved)


class _Run:
    """Uses what there is, waits for the node that is making it, or makes it."""

    def __init__(
        self,
        attempt: Attempt,
        wait_s: float,
        lease_s: float,
        forks: bool,
        before_own_view: Callable[[], None],
    ) -> None:
        self.attempt = attempt
        self.settings = attempt.settings
        self.report = attempt.report
        self.wait_s = wait_s
        self.lease_s = lease_s
        self.forks = forks
        self.before_own_view = before_own_view
        self.end = attempt.started + wait_s
        self.is_locked = False
        self._wait: Callable[[], object] | None = None

    def guarded(self, resolved: Resolved) -> SetupResult:
        """All of it; anything but the command's own failure ends in `ordinary`."""
        attempt = self.attempt
        attempt.targets = resolved.targets
        attempt.max_age_s = settled_max_age(
            self.settings.snapshot_max_age_s, is_open=resolved.is_open
        )
        ran = False
        with ExitStack() as stack:
            try:
                attempt.paths = {
                    target: resolve_in_root(attempt.request.root, target)
                    for target in attempt.targets
                }
                hosts = list(attempt.paths.values())
                run_dir = self.settings.run_dir
                attempt.locks = stack.enter_context(
                    locked(run_dir, hosts, deadline_s=self.wait_s, report=self.report)
                )
                self.is_locked = True
                recover_mounts(self.settings, hosts)
                recover_targets(hosts, attempt.note)
                store = stack.enter_context(open_own_store(self.settings, self.report))
                return self._used(self._with_servers(store, resolved, stack))
            except SetupFailedError:
                raise
            except NotStoredError as error:
                ran = True
                reason = str(error.__cause__)
                setup_s = error.setup_s
            except (BootseerError, OSError) as error:
                reason = str(error)
            except Exception as error:
                # A mistake of ours must not keep a job from starting.
                logger.exception("unexpected error in a set-up")
                reason = f"unexpected {type(error).__name__}: {error}"
            if not ran:
                return self._used(self.ordinary(reason))
            self.report(f"warning: the set-up ran but was not stored: {reason}")
            return self._used(attempt.result("ran", setup_s=setup_s))

    def _used(self, result: SetupResult) -> SetupResult:
        """Note that the job runs on the targets now, where others could take them from it."""
        attempt = self.attempt
        if attempt.until_exit and attempt.request.root == Path("/"):
            note_user(self.settings.run_dir, shared_targets(attempt.paths.values()))
        return result

    def _leave_to_others(self) -> bool:
        """Have an own view of targets on which other jobs run, before anything changes these;
        whether there were such. Raises: BusyError where that cannot be."""
        attempt = self.attempt
        # Another root is this job's alone.
        if attempt.request.root != Path("/"):
            return False
        hosts = shared_targets(attempt.paths.values())
        used = other_users(self.settings.run_dir, hosts)
        if not used:
            return False
        if not attempt.until_exit:
            check_unused(self.settings.run_dir, hosts)
        enter_own_view(self.settings, used, self.before_own_view)
        for target, pid in used.items():
            self.report(
                f"process {pid}, another job on this node, runs on something else in {target}: "
                "this job has its own directory there, in a mount namespace of its own"
            )
        return True

    def ordinary(self, reason: str) -> SetupResult:
        """The command, as without Bootseer."""
        self._end_wait()
        self._leave_to_others()
        self.report(f"warning: running the set-up without a snapshot: {reason}")
        self._settle()
        self._end_server()
        attempt = self.attempt
        return attempt.result("ran", setup_s=run_command(attempt.request, attempt.locks))

    def _settle(self) -> None:
        """Before the command writes to the targets: no restore may be pending on them."""
        if not self.is_locked:
            return
        hosts = list(self.attempt.paths.values())
        try:
            recover_mounts(self.settings, hosts)
        except BootseerError as error:
            logger.warning("what a dead server has mounted stays: %s", error)
        try:
            recover_targets(hosts, self.attempt.note)
        except BootseerError as error:
            logger.warning("giving up an interrupted restore: %s", error)
            abandon_targets(hosts)

    def _end_server(self) -> None:
        """Nothing will be mounted, and a set-up may take long."""
        if self.attempt.process is not None:
            self.attempt.process.abandon()

    def _with_servers(self, store: Store, resolved: Resolved, stack: ExitStack) -> SetupResult:
        """`_locked`, and once more where the server of what is mounted died meanwhile."""
        try:
            return self._locked(store, resolved, stack)
        except (SetupFailedError, NotStoredError):
            raise
        except (BootseerError, OSError) as error:
            if not recover_mounts_from(self.settings, [*self.attempt.paths.values()], error):
                raise
        self._end_server()
        return self._locked(store, resolved, stack)

    def _locked(self, store: Store, resolved: Resolved, stack: ExitStack) -> SetupResult:
        attempt = self.attempt
        kept = keep_mount(attempt, store, resolved)
        if kept is not None:
            return kept
        attempt.is_changed = take_off_lingering(self.settings, attempt.paths.values())
        before = attempt.scan()
        bases = {target: base_digest(before[target]) for target in attempt.targets}
        kept = keep_in_place(attempt, store, resolved, before)
        if kept is not None:
            return kept
        if self._leave_to_others():
            before = attempt.scan()
            bases = {target: base_digest(before[target]) for target in attempt.targets}
        # In a container this interpreter's files are not there.
        if self.forks and attempt.request.root == Path("/"):
            attempt.process = stack.enter_context(early_server(self.settings))
        key = attempt.key = resolved.key(bases)
        pause = _POLL_FIRST_S
        watch = LeaseWatch()
        is_told = False
        while True:
            replace = False
            too_old = None
            try:
                manifest = catalogue.load(store, key)
                if manifest is not None and not self._is_too_old(manifest):
                    self._end_wait(manifest)
                    return restore_stored(attempt, store, manifest, bases)
                too_old = manifest
            except (CorruptError, NotFoundError) as error:
                self.report(f"warning: {error}; running the set-up to replace the snapshot")
                self._settle()
                before = attempt.scan()
                replace = True
            lease = store.lease(
                catalogue.lease_key(key),
                ttl_s=self.lease_s,
                owner=self.settings.node,
                watch=watch,
            )
            if lease is not None:
                with LeaseRenewal(lease, self.lease_s):
                    # It may have been published between our look and our lease.
                    if not replace and self._is_published(store, too_old):
                        continue
                    usable = too_old if self._is_limit_automatic() else None
                    if usable is not None and is_told:
                        # The node that was waited for has failed, and uses it as well.
                        self.report(f"warning: snapshot {key[:12]} could not be made anew")
                        return restore_stored(attempt, store, usable, bases)
                    if too_old is not None:
                        age = age_of(too_old)
                        self.report(f"snapshot {key[:12]} is {age} old; it is made anew")
                    self._end_server()
                    self._end_wait()
                    under = Circumstances(resolved, before, bases, replace, bool(too_old))
                    try:
                        return run_and_capture(attempt, store, under)
                    except SetupFailedError as error:
                        if usable is None:
                            raise
                        return restore_instead(attempt, store, usable, before, bases, error)
            if time.monotonic() >= self.end:
                return self.ordinary(
                    f"another node was still busy with it after {self.wait_s:.0f} s"
                )
            if replace:
                return self.ordinary("another node is replacing the snapshot")
            if not is_told:
                is_told = True
                if watch.owner != self.settings.node:
                    self._wait = attempt.note_wait(watch.owner, 0)
                self.report(f"another node is running the set-up of {key[:12]}; waiting")
            # Spread, so that a thousand nodes do not ask in step.
            import random  # here: who waits has time

            began = time.monotonic()
            time.sleep(min(pause * random.uniform(0.5, 1.0), max(0, self.end - began)))
            attempt.waited_s += time.monotonic() - began
            pause = min(1.5 * pause, _POLL_MAX_S)

    def _end_wait(self, manifest: Manifest | None = None) -> None:
        """Nobody is waited for from here on. What another node made during this start would have
        been waited for had it come later."""
        if manifest is not None and self._wait is None and manifest.node != self.settings.node:
            self._wait = self.attempt.note_wait(manifest.node, manifest.created_ns)
        if self._wait is not None:
            self._wait()
            self._wait = None

    def _is_too_old(self, manifest: Manifest) -> bool:
        return is_too_old(manifest, self.attempt.max_age_s)

    def _is_limit_automatic(self) -> bool:
        """Whether no maximum age was asked for: an old snapshot is better than none then."""
        return self.settings.snapshot_max_age_s == AUTOMATIC_AGE_S

    def _is_published(self, store: Store, known: Manifest | None) -> bool:
        """Whether there is a snapshot, and another one than `known`."""
        if known is None:
            return catalogue.exists(store, self.attempt.key)
        manifest = catalogue.load(store, self.attempt.key)
        return manifest is not None and manifest.created_ns != known.created_ns
