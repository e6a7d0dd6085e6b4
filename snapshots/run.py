"""One set-up on one node: restored where its snapshot exists, else run, captured and published.

Alone owns the order of these steps and the promise that a set-up never fails because of Bootseer:
whatever goes wrong with store, snapshot or capture ends in one warning and the ordinary command.
Only the command's own failure, and a declaration that cannot be used, are errors.
"""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SetupFailedError,
)
from bootseer.linux.root_paths import resolve_in_root
from bootseer.served.cover_users import sweep_covers
from bootseer.settings.config import Settings
from bootseer.settings.values import AUTOMATIC_AGE_S
from bootseer.snapshots.attempt import Attempt, NoteWait, SetupResult, no_wait
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.age import age_of, is_too_old, settled_max_age
from bootseer.snapshots.catalogue.manifest import Manifest
from bootseer.snapshots.execution import Circumstances, NotStoredError, run_and_capture, run_command
from bootseer.snapshots.restoring import own_view, staging
from bootseer.snapshots.restoring.mounting import mounted
from bootseer.snapshots.restoring.mounting.early_server import early_server
from bootseer.snapshots.reuse import keep_in_place, keep_mount, restore_instead, restore_stored
from bootseer.snapshots.setup.request import Report, Request, Resolved, resolve
from bootseer.snapshots.targets.lock import locked
from bootseer.snapshots.targets.scan import base_digest
from bootseer.snapshots.targets.state import remember
from bootseer.snapshots.targets.target_users import check_unused, note_user, other_users
from bootseer.store import LeaseWatch, Store, open_own_store
from bootseer.store.objects.lease import LeaseRenewal

__all__ = ["SetupResult", "run_setup"]

logger = logging.getLogger(__name__)

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
    only with `until_exit`, where another job runs on a target (see `restoring.own_view`).
    `note_wait`: begins the stage of waiting for another node.

    Raises: SetupFailedError with the command's exit code; InvalidInputError or NotFoundError for
    declared targets or inputs that cannot be used; BusyError where another job runs on a target
    that this set-up would change.
    """
    started = time.monotonic()
    sweep_covers(settings.run_dir)
    note = own_view.of_shared(remember(settings, request.root))
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
                mounted.recover(self.settings, hosts)
                staging.recover(hosts, attempt.note)
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
            note_user(self.settings.run_dir, own_view.shared(attempt.paths.values()))
        return result

    def _leave_to_others(self) -> bool:
        """Have an own view of targets on which other jobs run, before anything changes these;
        whether there were such. Raises: BusyError where that cannot be."""
        attempt = self.attempt
        # Another root is this job's alone.
        if attempt.request.root != Path("/"):
            return False
        hosts = own_view.shared(attempt.paths.values())
        used = other_users(self.settings.run_dir, hosts)
        if not used:
            return False
        if not attempt.until_exit:
            check_unused(self.settings.run_dir, hosts)
        own_view.enter(self.settings, used, self.before_own_view)
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
            mounted.recover(self.settings, hosts)
        except BootseerError as error:
            logger.warning("what a dead server has mounted stays: %s", error)
        try:
            staging.recover(hosts, self.attempt.note)
        except BootseerError as error:
            logger.warning("giving up an interrupted restore: %s", error)
            staging.abandon(hosts)

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
            if not mounted.recover_from(self.settings, [*self.attempt.paths.values()], error):
                raise
        self._end_server()
        return self._locked(store, resolved, stack)

    def _locked(self, store: Store, resolved: Resolved, stack: ExitStack) -> SetupResult:
        attempt = self.attempt
        kept = keep_mount(attempt, store, resolved)
        if kept is not None:
            return kept
        attempt.is_changed = mounted.take_off_lingering(self.settings, attempt.paths.values())
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
