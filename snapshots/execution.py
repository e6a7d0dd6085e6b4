"""Runs a set-up's command, and captures and publishes what it did.

Alone owns the promise that a command which has run is not run again because it could not be
stored. The caller holds the locks of the targets and the lease of the snapshot.
"""

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.base.shown import shown_age
from bootseer.errors import BootseerError, BusyError, NotFoundError, SetupFailedError, exit_code_of
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots.attempt import Attempt, SetupResult
from bootseer.snapshots.capture import outside
from bootseer.snapshots.capture.layered_scan import hard_links, scan_after
from bootseer.snapshots.capture.outside_layers import OutsideLayers
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.manifest import Manifest, Outside
from bootseer.snapshots.setup.fingerprint import Part, shown_program
from bootseer.snapshots.setup.request import Request, Resolved, working_directory
from bootseer.snapshots.setup.targets import show
from bootseer.snapshots.targets.paths import text_of
from bootseer.snapshots.targets.scan import Scan, scan
from bootseer.store import Store

logger = logging.getLogger(__name__)
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
    from bootseer.snapshots.capture.layering import earlier_snapshots, find_base

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
        attempt.report(f"the set-up took {setup_s:.1f} s; capturing {show(attempt.targets)}")
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
    request = attempt.request
    environ = os.environ if request.environ is None else request.environ
    directory = working_directory(request)
    targets = list(attempt.paths.values())
    if request.layers is not None:
        layers = OutsideLayers(request.layers, environ, directory, targets)
        return lambda setup_s: layers.changed()
    if request.root != Path("/"):
        return lambda setup_s: Outside(is_complete=False)
    began_ns = outside.now_ns()
    return lambda setup_s: outside.look(
        attempt.settings, began_ns, setup_s, environ, directory, targets
    )


def _nearest(parts: Sequence[Part], earlier: Sequence[Manifest]) -> str:
    """Say what has changed since the snapshot that comes nearest, if it is one of this set-up."""
    from bootseer.snapshots.catalogue.compare import nearest
    from bootseer.snapshots.catalogue.part_differences import compare_parts, in_words

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
    from bootseer.snapshots.capture.capture import Change, capture, make_manifest

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
        raise NotFoundError(f"the set-up made none of {show(attempt.targets)}")
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
