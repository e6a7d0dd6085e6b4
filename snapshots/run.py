"""One set-up on one node: restored where its snapshot exists, else run, captured and published.

Alone owns the order of these steps and the promise that a set-up never fails because of Bootseer:
whatever goes wrong with store, snapshot or capture ends in one warning and the ordinary command.
Only the command's own failure, and a declaration that cannot be used, are errors.
"""

import logging
import os
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from bootseer.config import Settings
from bootseer.errors import (
    BootseerError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    SetupFailedError,
)
from bootseer.prefetch.cover_users import sweep_covers
from bootseer.rooted import resolve_in_root
from bootseer.snapshots import catalogue, outside
from bootseer.snapshots.age import is_too_old, show_age
from bootseer.snapshots.keeper import LeaseKeeper
from bootseer.snapshots.lock import locked
from bootseer.snapshots.manifest import Manifest, text_of
from bootseer.snapshots.present import key_in_place, mounts_in_place
from bootseer.snapshots.restoring import mounted
from bootseer.snapshots.restoring import work as working
from bootseer.snapshots.restoring.mounted import keep_mounted
from bootseer.snapshots.restoring.restore import place
from bootseer.snapshots.restoring.restore_modes import Wish, restore_by_choice
from bootseer.snapshots.scan import Scan, base_digest, scan
from bootseer.snapshots.setup.execute import run_command
from bootseer.snapshots.setup.request import Report, Request, Resolved, resolve, working_directory
from bootseer.snapshots.setup.result import SetupResult
from bootseer.snapshots.setup.targets import show
from bootseer.snapshots.state import remember
from bootseer.store import Store, open_store

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
) -> SetupResult:
    """Make the targets as the set-up command would, by restoring its snapshot if there is one.

    `report` gets what happens, a sentence at a time; a warning begins with "warning: ". `wait_s`
    bounds the wait for another process or node that is running the same set-up; `lease_s` is how
    long a node that died holds the others up. `until_exit`: what is mounted goes when
    this process ends, whatever program it is by then; else it stays.

    Raises: SetupFailedError with the command's exit code; InvalidInputError or NotFoundError for
    declared targets or inputs that cannot be used.
    """
    started = time.monotonic()
    sweep_covers(settings)
    run = _Run(settings, request, report, wait_s, lease_s, started, until_exit)
    try:
        resolved = resolve(request, report)
    except (InvalidInputError, NotFoundError):
        raise
    except Exception as error:
        if not isinstance(error, BootseerError | OSError):
            logger.exception("unexpected error before a set-up")
        return run.ordinary(str(error))
    return run.guarded(resolved)


class _Run:
    def __init__(
        self,
        settings: Settings,
        request: Request,
        report: Report,
        wait_s: float,
        lease_s: float,
        started: float,
        until_exit: bool,
    ) -> None:
        self.settings = settings
        self.request = request
        self.report = report
        self.wait_s = wait_s
        self.lease_s = lease_s
        self.started = started
        self.end = started + wait_s
        self.targets: tuple[bytes, ...] = ()
        self.paths: dict[bytes, Path] = {}
        self.key = ""
        self.is_locked = False
        self.until_exit = until_exit
        self.note = remember(settings, request.root)

    def guarded(self, resolved: Resolved) -> SetupResult:
        """All of it; anything but the command's own failure ends in `ordinary`."""
        self.targets = resolved.targets
        ran = False
        with ExitStack() as stack:
            try:
                self.paths = {
                    target: resolve_in_root(self.request.root, target) for target in self.targets
                }
                hosts = list(self.paths.values())
                stack.enter_context(locked(self.settings.run_dir, hosts, deadline_s=self.wait_s))
                self.is_locked = True
                mounted.recover(self.settings, hosts)
                working.recover(hosts, self.note)
                store = stack.enter_context(
                    open_store(self.settings.store_url, deadline_s=self.settings.deadline_s)
                )
                return self._locked(store, resolved)
            except SetupFailedError:
                raise
            except _NotStoredError as error:
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
                return self.ordinary(reason)
        self.report(f"warning: the set-up ran but was not stored: {reason}")
        return self._result("ran", setup_s=setup_s)

    def ordinary(self, reason: str) -> SetupResult:
        """The command, as without Bootseer."""
        self.report(f"warning: running the set-up without a snapshot: {reason}")
        self._settle()
        return self._result("ran", setup_s=run_command(self.request))

    def _settle(self) -> None:
        """Before the command writes to the targets: no restore may be pending on them."""
        if not self.is_locked:
            return
        hosts = list(self.paths.values())
        try:
            working.recover(hosts, self.note)
        except BootseerError as error:
            logger.warning("giving up an interrupted restore: %s", error)
            working.abandon(hosts)

    def _locked(self, store: Store, resolved: Resolved) -> SetupResult:
        kept = self._kept_mount(store, resolved)
        if kept is not None:
            return kept
        before = self._scan()
        bases = {target: base_digest(before[target]) for target in self.targets}
        if self._is_in_place(store, resolved, before):
            self.report(f"snapshot {self.key[:12]} is in place already")
            return self._result("in place", file_count=sum(map(len, before.values())))
        self.key = resolved.key(bases)
        pause = _POLL_FIRST_S
        is_told = False
        while True:
            replace = False
            too_old = None
            try:
                manifest = catalogue.load(store, self.key)
                if manifest is not None and not self._is_too_old(manifest):
                    return self._restore(store, manifest, bases)
                too_old = manifest
            except (CorruptError, NotFoundError) as error:
                self.report(f"warning: {error}; running the set-up to replace the snapshot")
                self._settle()
                before = self._scan()
                replace = True
            lease = store.lease(
                catalogue.lease_key(self.key), ttl_s=self.lease_s, owner=self.settings.node
            )
            if lease is not None:
                with LeaseKeeper(lease, self.lease_s):
                    # It may have been published between our look and our lease.
                    if not replace and self._is_published(store, too_old):
                        continue
                    if too_old is not None:
                        age = show_age(time.time_ns() - too_old.created_ns)
                        self.report(f"snapshot {self.key[:12]} is {age} old; it is made anew")
                    return self._capture(
                        store, resolved, before, bases, replace=replace, renew=bool(too_old)
                    )
            if time.monotonic() >= self.end:
                return self.ordinary(
                    f"another node was still busy with it after {self.wait_s:.0f} s"
                )
            if replace:
                return self.ordinary("another node is replacing the snapshot")
            if not is_told:
                is_told = True
                self.report(f"another node is running the set-up of {self.key[:12]}; waiting")
            # Spread, so that a thousand nodes do not ask in step.
            time.sleep(min(pause * random.uniform(0.5, 1.0), max(0, self.end - time.monotonic())))
            pause = min(1.5 * pause, _POLL_MAX_S)

    def _scan(self) -> dict[bytes, Scan]:
        return {target: scan(path) for target, path in self.paths.items()}

    def _is_in_place(self, store: Store, resolved: Resolved, before: Mapping[bytes, Scan]) -> bool:
        found = key_in_place(self.settings.cache_dir, resolved, self.paths, before)
        if found is None:
            return False
        self.key = found[0]
        return not self._is_outdated(store)

    def _is_outdated(self, store: Store) -> bool:
        """Whether the snapshot in place is too old by now."""
        if not self.settings.snapshot_max_age_s:
            return False
        try:
            manifest = catalogue.load(store, self.key)
        except BootseerError as error:
            # What is here is what was asked for; that it may be too old is no reason to fail.
            self.report(f"warning: cannot tell how old the snapshot in place is: {error}")
            return False
        return manifest is not None and self._is_too_old(manifest)

    def _kept_mount(self, store: Store, resolved: Resolved) -> SetupResult | None:
        """What is mounted on the targets, if it is what was asked for: nothing is scanned then."""
        found = mounts_in_place(self.settings, resolved, self.paths)
        if found is None:
            return None
        self.key, mounts = found
        if self._is_outdated(store) or not keep_mounted(
            self.settings, mounts, until_exit=self.until_exit
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

    def _is_too_old(self, manifest: Manifest) -> bool:
        return is_too_old(manifest, self.settings.snapshot_max_age_s)

    def _is_published(self, store: Store, known: Manifest | None) -> bool:
        """Whether there is a snapshot, and another one than `known`."""
        if known is None:
            return catalogue.exists(store, self.key)
        manifest = catalogue.load(store, self.key)
        return manifest is not None and manifest.created_ns != known.created_ns

    def _restore(self, store: Store, manifest: Manifest, bases: Mapping[bytes, str]) -> SetupResult:
        placed = place(manifest, self.request.root)
        if any(item.target.path not in self.paths for item in placed):
            raise CorruptError(f"snapshot {self.key[:12]} holds targets that were not asked for")
        catalogue.note_used(store, manifest)
        wish = Wish(
            self.settings.restore_mode,
            until_exit=self.until_exit,
            is_container=self.request.root != Path("/"),
            scratch=self.request.scratch,
        )
        done = restore_by_choice(
            self.settings,
            store,
            manifest,
            placed,
            bases,
            wish,
            on_finished=self.note,
            report=self.report,
        )
        # Targets that the set-up did not make: known to be missing.
        for target in bases.keys() - {item.target.path for item in placed}:
            self.note(self.paths[target], self.key, bases[target])
        result = self._result(
            "restored",
            file_count=manifest.file_count,
            content_bytes=manifest.content_bytes,
            moved_bytes=done.moved_bytes,
            setup_s=manifest.setup_ns / 1e9,
        )
        self.report(
            f"restored snapshot {self.key[:12]}: {result.file_count} files in "
            f"{result.seconds:.1f} s instead of {result.setup_seconds:.1f} s, "
            f"{done.choice.sentence()}"
        )
        return replace(
            result,
            mode=done.choice.mode,
            mode_reason=done.choice.reason,
            ready_names=done.ready_names,
        )

    def _capture(
        self,
        store: Store,
        resolved: Resolved,
        before: Mapping[bytes, Scan],
        bases: Mapping[bytes, str],
        *,
        replace: bool,
        renew: bool,
    ) -> SetupResult:
        """`replace`: what is stored is damaged; `renew`: it is whole, but too old."""
        if not renew:
            self.report(f"no snapshot {self.key[:12]} yet; running the set-up")
        began_ns = outside.now_ns()
        setup_s = run_command(self.request)
        try:
            manifest = self._publish(
                store, resolved, before, bases, setup_s, replace=replace, renew=renew
            )
        except Exception as error:
            if not isinstance(error, BootseerError | OSError):
                logger.exception("unexpected error in a capture")
            # Whatever it is: the command has run, and must not run again.
            raise _NotStoredError(setup_s) from error
        for target, path in self.paths.items():
            self.note(path, self.key, bases[target])
        result = self._result(
            "captured",
            file_count=manifest.file_count,
            content_bytes=manifest.content_bytes,
            moved_bytes=manifest.stored_bytes,
            setup_s=setup_s,
            changed_outside=self._changed_outside(began_ns, setup_s),
        )
        self.report(
            f"stored snapshot {self.key[:12]}: {result.file_count} files; the set-up took "
            f"{setup_s:.1f} s, capturing {result.seconds - setup_s:.1f} s"
        )
        return result

    def _changed_outside(self, began_ns: int, setup_s: float) -> tuple[str, ...]:
        """Say what else the set-up has changed. Of another root nothing is known."""
        if self.request.root != Path("/"):
            return ()
        environ = os.environ if self.request.environ is None else self.request.environ
        directory = working_directory(self.request)
        targets = list(self.paths.values())
        found = outside.look(self.settings, began_ns, setup_s, environ, directory, targets)
        if sentence := found.sentence():
            self.report(f"warning: {sentence}")
        return found.paths

    def _publish(
        self,
        store: Store,
        resolved: Resolved,
        before: Mapping[bytes, Scan],
        bases: Mapping[bytes, str],
        setup_s: float,
        *,
        replace: bool,
        renew: bool,
    ) -> Manifest:
        # Here: a restore needs none of it.
        from bootseer.snapshots.capture import Change, capture, make_manifest

        targets = []
        for target in self.targets:
            # Once more: the command may have made it a symbolic link.
            host = resolve_in_root(self.request.root, target)
            after = scan(host)
            if not after and not before[target]:
                continue
            if not after:
                raise NotFoundError(f"{text_of(target)} does not exist after the set-up")
            change = Change(target, host, before[target], after)
            targets.append(capture(store, self.settings.cache_dir, change, replace=replace))
        if not targets:
            raise NotFoundError(f"the set-up made none of {show(self.targets)}")
        manifest = make_manifest(
            resolved.all_parts(bases),
            targets,
            setup_ns=int(setup_s * 1e9),
            node=self.settings.node,
        )
        catalogue.publish(store, manifest, replace=replace or renew)
        return manifest

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
            targets=tuple(text_of(target) for target in self.targets),
            file_count=file_count,
            content_bytes=content_bytes,
            moved_bytes=moved_bytes,
            seconds=time.monotonic() - self.started,
            setup_seconds=setup_s,
            changed_outside=changed_outside,
        )


class _NotStoredError(Exception):
    """The command has run; its snapshot could not be stored. It must not run again."""

    def __init__(self, setup_s: float) -> None:
        super().__init__()
        self.setup_s = setup_s
