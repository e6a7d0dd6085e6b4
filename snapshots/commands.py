"""What `snapshot create` and `snapshot restore` do: checks, locks, steps.

What only one of them needs is loaded by that one. Main thread.
"""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.base.shown import quoted
from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.linux.root_paths import resolve_in_root
from bootseer.served.background import ServerProcess
from bootseer.settings.config import Settings
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.manifest import Manifest, is_name
from bootseer.snapshots.targets.lock import locked
from bootseer.store import Store, open_own_store

if TYPE_CHECKING:
    from bootseer.snapshots.restoring.restore import Placed
    from bootseer.snapshots.setup.request import Report

_ROOT = Path("/")


def create_snapshot(settings: Settings, targets: Sequence[str], name: str = "") -> Manifest:
    """Capture existing directories as they are, and publish them under `name`, if given.

    Raises: InvalidInputError, NotFoundError, BusyError where something writes to them meanwhile.
    """
    if name and not is_name(name):
        raise InvalidInputError(
            f"{name!r} is not a usable name; use letters, digits, '.', '_' and '-', at most 128"
        )
    from bootseer.snapshots.capture import capture
    from bootseer.snapshots.restoring import staging
    from bootseer.snapshots.setup.targets import declared_targets
    from bootseer.snapshots.targets.scan import scan
    from bootseer.snapshots.targets.state import remember

    paths = declared_targets(targets, str(Path.cwd())).paths
    hosts = [resolve_in_root(_ROOT, path) for path in paths]
    with locked(settings.run_dir, hosts, deadline_s=settings.deadline_s):
        staging.recover(hosts, remember(settings, _ROOT))
        changes = []
        for path, host in zip(paths, hosts, strict=True):
            after = scan(host)
            if not after:
                raise NotFoundError(f"{host} does not exist; name an existing directory")
            changes.append(capture.Change(path, host, {}, after))
        with open_own_store(settings) as store:
            return capture.create(store, settings.cache_dir, changes, node=settings.node, name=name)


def restore_snapshot(
    settings: Settings,
    key: str,
    directory: Path | None = None,
    *,
    relocates: bool = False,
    allows_system: bool = False,
    report: "Report" = lambda sentence: None,
    process: ServerProcess | None = None,
) -> Manifest:
    """Put a snapshot in place, or a plain one into `directory`, or with `relocates` an environment;
    returns it. What is mounted stays mounted. `report` gets where it goes, the way that was chosen
    and why. `process`: see `early_server.early_server`.

    Raises: InvalidInputError where a target is of the system (`restoring.system_folders`) and
    `allows_system` is not set; NotFoundError, AlreadyExistsError where something else is there
    already, CorruptError; nothing has changed then.
    """
    with open_own_store(settings) as store:
        # The two take about as long, and each mostly waits: for the disk, for the store.
        loading = threading.Thread(target=_load_restoring, daemon=True)
        loading.start()
        manifest = catalogue.find(store, key)
        loading.join()
        from bootseer.snapshots.restoring import staging
        from bootseer.snapshots.restoring.mounting import mounted
        from bootseer.snapshots.restoring.restore import check_base, place, restore_to
        from bootseer.snapshots.restoring.restore_modes import Wish, restore_by_choice
        from bootseer.snapshots.targets.scan import base_digest, scan
        from bootseer.snapshots.targets.state import remember
        from bootseer.snapshots.targets.target_users import check_unused

        if directory is not None and relocates:
            _restore_relocated(settings, store, manifest, directory, report)
            catalogue.note_used(store, manifest)
            return manifest
        if directory is not None:
            restore_to(
                store,
                manifest,
                directory,
                deadline_s=settings.deadline_s,
                privileges=settings.restore_privileges,
            )
            catalogue.note_used(store, manifest)
            return manifest
        placed = place(manifest, _ROOT)
        report(f"restoring to {', '.join(quoted(item.target.path) for item in placed)}")
        if not allows_system:
            _check_targets(key, placed)
        hosts = [item.path for item in placed]
        with locked(settings.run_dir, hosts, deadline_s=settings.deadline_s):
            note = remember(settings, _ROOT)
            check_unused(settings.run_dir, hosts)
            mounted.recover(settings, hosts)
            staging.recover(hosts, note)
            bases = {}
            for item in placed:
                before = scan(item.path)
                check_base(manifest, item.target, before)
                bases[item.target.path] = base_digest(before)
            catalogue.note_used(store, manifest)
            done = restore_by_choice(
                settings,
                store,
                manifest,
                placed,
                bases,
                Wish(settings.restore_mode, process=process),
                on_finished=note,
                report=report,
            )
            report(done.choice.sentence())
        if sentence := manifest.outside.restored_sentence(manifest.node):
            report(f"warning: {sentence}")
    return manifest


def _check_targets(key: str, placed: "Sequence[Placed]") -> None:
    """Raises: InvalidInputError where a target, or where it leads, is of the system."""
    from bootseer.snapshots.restoring.system_folders import why_guarded

    for item in placed:
        for path in (Path(os.fsdecode(item.target.path)), item.path):
            if reason := why_guarded(path, Path.home()):
                raise InvalidInputError(
                    f"the snapshot {key} goes to {path}, which {reason}; see what it holds with "
                    f"`bootseer snapshot show {key} --files`, and add --system to restore it there"
                )


def _load_restoring() -> None:
    with contextlib.suppress(ImportError):  # the code that needs it tells
        import bootseer.snapshots.restoring.restore_modes
        import bootseer.snapshots.targets.state  # noqa: F401


def _restore_relocated(
    settings: Settings, store: Store, manifest: Manifest, directory: Path, report: "Report"
) -> None:
    from bootseer.snapshots.relocation.apply import restore_relocated
    from bootseer.snapshots.restoring import staging
    from bootseer.snapshots.targets.state import remember

    # Its links are followed on the way there; what files are told is the path that was asked for.
    path = Path(os.path.abspath(directory))
    with locked(settings.run_dir, [path], deadline_s=settings.deadline_s):
        staging.recover([path], remember(settings, _ROOT))
        restore_relocated(
            store,
            manifest,
            path,
            deadline_s=settings.deadline_s,
            privileges=settings.restore_privileges,
            report=report,
        )
