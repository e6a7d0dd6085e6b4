"""`bootseer snapshot`: environments, captured once and restored everywhere."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from bootseer.base.display import display_path, format_age
from bootseer.cli.command_tree import command, current_settings, settings_without_fanout
from bootseer.cli.grammar import RESTORE
from bootseer.cli.options import (
    mode_option,
    open_current_store,
    options,
    options_of,
    time_option,
)
from bootseer.cli.restore import restore, say_restored
from bootseer.cli.show import document_of, emit_table, shows
from bootseer.cli.text import human_bytes, human_time, printable, say
from bootseer.errors import CorruptError, exit_code_of

if TYPE_CHECKING:
    from bootseer.blob.tree import Inode
    from bootseer.snapshots.diff import ViewDifferences
    from bootseer.snapshots.key import SetupRequest
    from bootseer.snapshots.manifest import Manifest

# ---- documents --------------------------------------------------------------------------------


class ShownSnapshot(Struct):
    """Snapshot in the store."""

    fingerprint: str
    """Key of the snapshot."""
    name: str
    """Name, or empty."""
    targets: list[str]
    """Directories of the snapshot."""
    file_count: int
    content_bytes: int
    stored_bytes: int
    """Size of its own blobs."""
    whole_bytes: int
    """Size with the earlier snapshots' blobs that it takes content from."""
    setup_seconds: float
    """Duration of the set-up, which a restore saves."""
    created: str
    """Time of the capture in UTC."""
    created_ns: int
    node: str


class SnapshotTarget(Struct):
    """Directory of a snapshot."""

    path: str
    whole: bool
    """Whether it is the whole directory; false: only the changes of the set-up."""
    blob: str
    """Digest of the blob."""
    blob_bytes: int
    earlier: list[str]
    """Digests of earlier snapshots' blobs that it takes content from."""
    earlier_bytes: int
    """Size of these blobs, each in full."""
    index: str
    """Digest of the tree index."""
    file_count: int
    content_bytes: int
    deletions: list[str]
    """Names that the set-up removed."""


class SnapshotFile(Struct):
    """Name in a snapshot."""

    path: str
    mode: int
    uid: int
    gid: int
    size_bytes: int
    mtime_ns: int
    link_target: str


class SnapshotDetails(Struct):
    """Snapshot with its parts, targets and, on demand, files."""

    fingerprint: str
    name: str
    file_count: int
    content_bytes: int
    stored_bytes: int
    whole_bytes: int
    setup_seconds: float
    created: str
    created_ns: int
    node: str
    outside: list[str]
    """Names that the set-up changed outside its targets and that are not stored: the first
    hundred."""
    parts: dict[str, str]
    """Parts of the fingerprint, by name."""
    targets: list[SnapshotTarget]
    files: list[SnapshotFile] | UnsetType = UNSET
    """Every name, with `--files`."""


class ChangedPackage(Struct):
    """Package whose version differs."""

    kind: str
    """`python` or `conda`."""
    name: str
    """Normalised name."""
    before: str | None
    """Version in the first; null if it is not there."""
    after: str | None


class ChangedFile(Struct):
    """File that differs."""

    path: str
    change: str
    """`added`, `removed` or `changed`."""
    what: list[str]
    """Differing attributes of a changed file: `content`, `kind`, `mode`, `owner`, `target`,
    `attributes`, `device`, `deletion`."""
    before_bytes: int
    after_bytes: int


class SnapshotDiff(Struct):
    """Differences of two snapshots, or of a snapshot and a directory."""

    equal: bool
    """Whether nothing differs."""
    packages: list[ChangedPackage]
    files: list[ChangedFile] | UnsetType = UNSET
    """Changed files; absent with `--packages`."""


class CheckedSnapshot(Struct):
    """Snapshot that was checked."""

    fingerprint: str
    name: str
    """Name, or empty."""
    ok: bool
    problems: list[str]
    """Problems, a sentence each."""


class ExportedSnapshot(Struct):
    """Archive of a snapshot."""

    fingerprint: str
    file: str
    size_bytes: int
    """Size of the archive."""
    relative_to: str
    """Directory to which the names in the archive are relative."""
    left_out_deletions: int
    """Number of names that the set-up removed, which an archive cannot record."""


def snapshot_of(manifest: "Manifest") -> ShownSnapshot:
    """Return the document of a snapshot."""
    return document_of(
        ShownSnapshot,
        manifest,
        targets=[display_path(target.path) for target in manifest.targets],
        setup_seconds=manifest.setup_ns / 1e9,
        created=human_time(manifest.created_ns),
    )


# ---- commands ---------------------------------------------------------------------------------


def _show_stored(made: ShownSnapshot) -> None:
    click.echo(made.fingerprint)
    say(
        f"stored {made.file_count} files, {human_bytes(made.content_bytes)}, "
        f"as {human_bytes(made.stored_bytes)}"
    )


@command(
    "snapshot create", epilog="Example: bootseer snapshot create --target /opt/env --name base-env"
)
@click.option(
    "--target",
    "targets",
    metavar="DIR",
    multiple=True,
    required=True,
    help="Directory to capture; may be repeated.",
)
@click.option("--name", metavar="NAME", default="", help="A name for `restore` and `show`.")
@shows(ShownSnapshot, text=_show_stored)
def snapshot_create(targets: tuple[str, ...], name: str) -> ShownSnapshot:
    """Capture existing directories as they are."""
    from bootseer.snapshots.archive import create_snapshot

    return snapshot_of(create_snapshot(current_settings(), targets, name))


@command("snapshot restore", epilog="Example: bootseer snapshot restore base-env")
@click.argument("key")
@options_of(RESTORE)
@shows(ShownSnapshot, text=lambda done: say_restored(done.file_count, done.content_bytes))
def snapshot_restore(
    key: str, directory: str | None, relocates: bool, allows_system: bool, mode: str | None
) -> ShownSnapshot:
    """Put a snapshot's directories where they were; KEY is a fingerprint, its start, or a name.

    An existing directory must be empty, or have its contents from before the set-up. The
    directories of the snapshot are printed first.
    """
    if relocates and directory is None:
        raise click.UsageError("--relocate needs --to DIR.")
    if directory is not None and mode not in (None, "auto", "extract"):
        raise click.UsageError("--to extracts: it has no other --mode.")
    manifest = restore(
        current_settings(),
        key,
        None if directory is None else Path(directory),
        relocates=relocates,
        allows_system=allows_system,
        mode=mode,
    )
    return snapshot_of(manifest)


@command("snapshot list", epilog="Example: bootseer snapshot list --json")
@click.option(
    "--sort",
    type=click.Choice(("age", "size", "name", "targets")),
    default="age",
    show_default=True,
    help="Order: newest, largest in the store, or by text.",
)
@shows(
    list[ShownSnapshot],
    *("key=fingerprint", "name", "targets", "files=file_count", "content_bytes", "stored_bytes"),
    *("with earlier=whole_bytes", "set-up s=setup_seconds", "created", "age=created_ns"),
)
def snapshot_list(sort: str) -> list[ShownSnapshot]:
    """List the snapshots in the store, with their sizes and ages."""
    from bootseer.snapshots.catalogue import list_all

    with open_current_store() as store:
        manifests = [one for one in list_all(store) if not one.cache]
    # Sorting is stable: snapshots that compare equal stay newest first.
    if sort == "size":
        manifests.sort(key=lambda manifest: -manifest.stored_bytes)
    elif sort == "name":
        manifests.sort(key=lambda manifest: (not manifest.name, manifest.name))
    elif sort == "targets":
        manifests.sort(key=lambda manifest: [target.path for target in manifest.targets])
    return [snapshot_of(one) for one in manifests]


def _show_details(found: SnapshotDetails) -> None:
    emit_table(("part", "value"), found.parts.items(), title=found.fingerprint)
    click.echo()
    emit_table(
        ("target", "kind", "files", "deleted", "content", "stored", "earlier"),
        (
            (
                target.path,
                "whole" if target.whole else "difference",
                target.file_count,
                len(target.deletions),
                human_bytes(target.content_bytes),
                human_bytes(target.blob_bytes),
                human_bytes(target.earlier_bytes) if target.earlier else "",
            )
            for target in found.targets
        ),
    )
    if found.files:
        click.echo()
        emit_table(
            ("path", "mode", "uid", "gid", "size"),
            (
                (
                    f"{one.path} -> {one.link_target}" if one.link_target else one.path,
                    *(stat.filemode(one.mode), one.uid, one.gid, one.size_bytes),
                )
                for one in found.files
            ),
        )


@command("snapshot show", epilog="Example: bootseer snapshot show 3f2a91 --files")
@click.argument("key")
@click.option("--files", is_flag=True, help="List every name with mode, owner and size.")
@shows(SnapshotDetails, text=_show_details)
def snapshot_show(key: str, files: bool) -> SnapshotDetails:
    """Show the parts, targets and files of a snapshot or a kept cache."""
    from bootseer.snapshots import catalogue

    with open_current_store() as store:
        manifest = catalogue.find(store, key)
        trees = [catalogue.load_tree(store, target) for target in manifest.targets] if files else []
    if sentence := manifest.outside.restored_sentence(manifest.node):
        say(sentence)
    listed = [
        _file(target.path, path, tree.inode(number))
        for target, tree in zip(manifest.targets, trees, strict=False)
        for path, number in tree.walk()
    ]
    return document_of(
        SnapshotDetails,
        snapshot_of(manifest),
        outside=list(manifest.outside.paths),
        parts={part.name: part.value for part in manifest.parts},
        targets=[
            document_of(
                SnapshotTarget,
                target,
                path=display_path(target.path),
                blob=target.blob.digest,
                blob_bytes=target.blob.size_bytes,
                earlier=[blob.digest for blob in target.earlier],
                earlier_bytes=sum(blob.size_bytes for blob in target.earlier),
                index=target.index.digest,
                deletions=[display_path(path) for path in target.deletions],
            )
            for target in manifest.targets
        ],
        files=listed if files else UNSET,
    )


def _file(target: bytes, path: bytes, inode: "Inode") -> SnapshotFile:
    return document_of(
        SnapshotFile,
        inode,
        path=display_path(target + b"/" + path if path else target),
        link_target=display_path(inode.link_target),
    )


def _show_diff(found: SnapshotDiff) -> None:
    if found.packages:
        emit_table(
            ("package", "before", "after"),
            (
                (
                    one.name if one.kind == "python" else f"{one.name} ({one.kind})",
                    one.before or "-",
                    one.after or "-",
                )
                for one in found.packages
            ),
        )
    if found.files is UNSET:
        return
    if found.packages:
        click.echo()
    signs = {"added": "+", "removed": "-", "changed": "~"}
    for change in found.files:
        what = f" ({', '.join(change.what)})" if change.what else ""
        click.echo(f"{signs[change.change]} {printable(change.path)}{what}")
    grown = sum(change.after_bytes - change.before_bytes for change in found.files)
    counts = [f"{sum(one.change == kind for one in found.files)} {kind}" for kind in signs]
    more = f"{human_bytes(abs(grown))} {'more' if grown >= 0 else 'less'}"
    click.echo(f"{', '.join(counts)}; {more}")


@command("snapshot diff", epilog="Example: bootseer snapshot diff base-env 3f2a91 --packages")
@click.argument("before", metavar="A")
@click.argument("after", metavar="[B]", required=False)
@click.option("--packages", "packages_only", is_flag=True, help="Compare packages only.")
@shows(SnapshotDiff, text=_show_diff)
def snapshot_diff(before: str, after: str | None, packages_only: bool) -> SnapshotDiff:
    """Show the differences from snapshot A to B: packages and their versions, and files.

    B is another snapshot, or a directory (a path with a "/" in it). Without B: the directories on
    this host that A belongs to. Files are compared by content, mode, owner, link and extended
    attributes, not by time.
    """
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.diff import compare, disk_view, snapshot_view

    with open_current_store() as store:
        first = catalogue.find(store, before)
        view = snapshot_view(store, first)
        if after is None or "/" in after:
            other = disk_view(first, Path(after).absolute() if after else None)
        else:
            other = snapshot_view(store, catalogue.find(store, after))
    return _diff(compare(view, other), packages_only)


def _diff(comparison: "ViewDifferences", packages_only: bool) -> SnapshotDiff:
    return SnapshotDiff(
        comparison.is_equal,
        [
            ChangedPackage(one.package.kind, one.package.name, one.before, one.after)
            for one in comparison.packages
        ],
        UNSET
        if packages_only
        else [
            ChangedFile(
                display_path(one.path), one.kind, list(one.what), one.before_bytes, one.after_bytes
            )
            for one in comparison.files
        ],
    )


def _code_of_verdicts(found: list[CheckedSnapshot]) -> int:
    damaged = sum(not one.ok for one in found)
    if not damaged:
        return 0
    error = CorruptError(f"{damaged} of {len(found)} snapshots are damaged")
    say(str(error))
    return exit_code_of(error)


@command("snapshot verify", epilog="Example: bootseer snapshot verify --all --quick")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Check every snapshot in the store.")
@click.option(
    "--quick", is_flag=True, help="Check only that all objects exist with the right size."
)
@shows(
    list[CheckedSnapshot],
    *("key=fingerprint", "name", "ok", "problems"),
    code=_code_of_verdicts,
)
def snapshot_verify(keys: tuple[str, ...], every: bool, quick: bool) -> list[CheckedSnapshot]:
    """Check that snapshots can be restored: read all of their objects and compare the digests.

    Exits with 15 if an object is damaged or missing. A damaged snapshot is replaced by the next
    set-up that would use it.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.catalogue import Verifier

    if every == bool(keys):
        raise click.UsageError("Give the snapshots to check, or --all.")
    with open_current_store() as store, ProgressBar("verifying") as progress:
        verifier = Verifier(store, quick=quick, on_progress=progress.advance)
        found = (
            list(catalogue.fingerprints(store))
            if every
            else [catalogue.fingerprint_of(store, key) for key in keys]
        )
        verdicts = [verifier.check(fingerprint) for fingerprint in dict.fromkeys(found)]
    return [
        CheckedSnapshot(one.fingerprint, one.name, not one.problems, list(one.problems))
        for one in verdicts
    ]


@command("snapshot export", epilog="Example: bootseer snapshot export base-env base-env.tar.zst")
@click.argument("key")
@click.argument("file", type=click.Path(path_type=Path))
@shows(ExportedSnapshot)
def snapshot_export(key: str, file: Path) -> ExportedSnapshot:
    """Write a snapshot or a kept cache to FILE, a tar.zst that `tar --zstd -x` unpacks.

    The names of one whole directory are relative to it. Those of several directories, or of what a
    set-up changed in them, are absolute without the leading "/"; what it removed is not in it.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.archive import export_snapshot, is_one_directory

    if str(file) == "-":
        raise click.UsageError("FILE is the name of a file; nothing is exported to stdout.")
    with open_current_store() as store:
        manifest = catalogue.find(store, key)
        total = sum(blob.size_bytes for one in manifest.targets for blob in one.blobs)
        with ProgressBar("exporting", total) as progress:
            size_bytes = export_snapshot(store, manifest, file, progress.advance)
    deleted = sum(len(target.deletions) for target in manifest.targets)
    if deleted:
        say(f"warning: {deleted} names that the set-up removed are not in the archive")
    say(f"wrote {manifest.file_count} files, {human_bytes(size_bytes)}, to {file}")
    root = display_path(manifest.targets[0].path) if is_one_directory(manifest) else "/"
    return ExportedSnapshot(manifest.fingerprint, str(file), size_bytes, root, deleted)


@command(
    "snapshot import",
    epilog="Example: bootseer snapshot import env.tar.gz --target /opt/env --name env",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--target", metavar="DIR", required=True, help="Directory to which the snapshot is restored."
)
@click.option("--name", metavar="NAME", default="", help="A name for `restore` and `show`.")
@shows(ShownSnapshot, text=_show_stored)
def snapshot_import(file: Path, target: str, name: str) -> ShownSnapshot:
    """Make a snapshot of the archive FILE: a tar, tar.gz or tar.zst, with names relative to DIR.

    The archive may come from anywhere, for example `conda-pack`. DIR need not exist here, and is
    not touched.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.snapshots.archive import import_archive

    total = file.stat().st_size if file.is_file() else None
    with open_current_store() as store, ProgressBar("importing", total) as progress:
        return snapshot_of(
            import_archive(current_settings(), store, file, target, name, progress.advance)
        )


@command("snapshot fetch", epilog="Example: bootseer snapshot fetch base-env")
@click.argument("key")
@shows(ShownSnapshot)
def snapshot_fetch(key: str) -> ShownSnapshot:
    """Bring all of a snapshot into this node's cache, for later mounts of it.

    KEY is a fingerprint, its start, or a name.
    """
    from bootseer.prefetch.reading.fill import fetch_tree
    from bootseer.snapshots import catalogue
    from bootseer.snapshots.mounting import cache_index, record_name_of

    settings = settings_without_fanout()
    with open_current_store() as store:
        manifest = catalogue.find(store, key)
        for target in manifest.targets:
            cache_index(settings, store, target)
            fetch_tree(settings, store, target.index.digest, record_name_of(target.path))
    return snapshot_of(manifest)


# ---- run and explain ----------------------------------------------------------------------------

# All words after the first word of the command belong to the command, with or without "--".
_CONTEXT = {"allow_interspersed_args": False}
_VALUE_CHARACTERS = 60
"""Length to which a table cuts a part's value; `--json` has all of it."""


class Ran(Struct):
    """Set-up that was run, or restored."""

    how: str
    """`captured`, `restored`, `in place` or `ran`."""
    hit: bool
    """Whether the set-up did not have to run."""
    fingerprint: str
    targets: tuple[str, ...]
    file_count: int
    content_bytes: int
    moved_bytes: int
    """Bytes moved to or from the store."""
    seconds: float
    """Duration of everything."""
    setup_seconds: float
    """Duration of the command, now or when the snapshot was made."""
    mode: str
    """Mode in which it was restored: `mount`, `link`, `extract`; empty where it was not."""
    mode_reason: str
    """Reason for the mode."""
    changed_outside: tuple[str, ...]
    """Names that changed outside the targets while it ran, as far as a short look told; of a
    restored one the first hundred that its snapshot names."""


class PartDifference(Struct):
    """Part of a fingerprint that differs from the nearest snapshot."""

    part: str
    then: str | None
    """Value in the nearest snapshot; null if it has no such part."""
    now: str | None
    note: str
    """Meaning of the difference, or empty."""


class ExplainedSetup(Struct):
    """Parts that decide the result of a set-up, and its snapshot if there is one."""

    outcome: str
    """`in place`, `would restore` or `would run`."""
    reason: str
    """Reason in a sentence."""
    fingerprint: str
    targets: tuple[str, ...]
    parts: dict[str, str]
    """Parts of the fingerprint, by name."""
    unknown: tuple[str, ...]
    """Things that may decide the result and are not among the parts, in a few words each."""
    max_age_seconds: float
    """Maximum age of a stored snapshot; 0: any age."""
    created: str | None
    """Time at which its snapshot was made; null without one."""
    snapshot: ShownSnapshot | None
    """Snapshot of the set-up in the store."""
    nearest: str | None
    """Fingerprint of the snapshot that differs least, if the set-up has no snapshot."""
    nearest_snapshot: ShownSnapshot | None
    differences: list[PartDifference]
    """Empty where there is nothing to compare."""


_set_up_options = options(
    click.option(
        "--target",
        "targets",
        metavar="DIR",
        multiple=True,
        help="Directory that the command makes or changes. Default: inferred, and printed.",
    ),
    click.option(
        "--input",
        "inputs",
        metavar="FILE",
        multiple=True,
        help="File or directory that decides the result, besides those named in the command.",
    ),
    click.option(
        "--input-env",
        "variables",
        metavar="NAME",
        multiple=True,
        help="Environment variable that decides the result; its value is not stored.",
    ),
    click.argument("command", nargs=-1, required=True),
)


def _request(values: dict[str, Any]) -> "SetupRequest":
    from bootseer.snapshots.key import SetupRequest

    return SetupRequest(**{**values, "command": _command(values["command"])})


def _command(words: tuple[str, ...]) -> list[str]:
    """Return the words of the set-up."""
    # A line in one word is read as by `bootseer run --setup`, so that both have one snapshot.
    from bootseer.launch.job import setup_command

    if len(words) == 1 and len(words[0].split()) > 1 and not os.path.exists(words[0]):
        return setup_command(words[0])
    return list(words)


@command(
    "snapshot run",
    context_settings=_CONTEXT,
    epilog="Example: bootseer snapshot run --target /opt/env -- "
    "sh -c 'python3 -m venv /opt/env && /opt/env/bin/pip install -r requirements.txt'",
)
@time_option(
    "--wait",
    "wait_s",
    default_s=1800.0,
    most_s=30 * 86_400,
    help="Longest wait for another node or process that runs the same set-up.",
)
@mode_option
@_set_up_options
@shows(Ran)
def snapshot_run(wait_s: float, mode: str | None, **values: Any) -> Ran:
    """Run a set-up COMMAND once; later, and on other nodes, restore its result.

    COMMAND is a program and its words, or a line in quotes, which is read as that of
    `bootseer run --setup`. Exits with the command's own code when it fails. Trouble with the store
    only costs the restore: the command then runs as usual.
    """
    from bootseer.launch.signals import StartStoppedError, StopSignals, end_by
    from bootseer.snapshots.environment import run_setup

    settings = settings_without_fanout()
    if mode is not None:
        settings = replace(settings, restore_mode=mode)
    try:
        # A signal also ends the processes of the command, and the lease is given back.
        with StopSignals():
            result = run_setup(settings, _request(values), report=say, wait_s=wait_s, forks=True)
    except StartStoppedError as stopped:
        say(f"the set-up was {stopped}; nothing was stored")
        end_by(stopped.number)
    return document_of(Ran, result)


def _show_explained(found: ExplainedSetup) -> None:
    emit_table(("part", "value"), found.parts.items())
    click.echo()
    for what in found.unknown:
        click.echo(printable(f"not in the key: {what}"))
    if found.max_age_seconds:
        click.echo(f"made anew once it is {format_age(int(found.max_age_seconds * 1e9))} old")
    click.echo(printable(_sentence(found)))
    if found.nearest_snapshot is not None:
        near = found.nearest_snapshot
        made = f"of {near.created}, made by {printable(near.node)}"
        click.echo(f"nearest: {near.fingerprint[:12]} {made}; it differs in")
        emit_table(
            ("part", "then", "now", "that is"),
            ((one.part, _short(one.then), _short(one.now), one.note) for one in found.differences),
        )


def _sentence(found: ExplainedSetup) -> str:
    from bootseer.snapshots.explain import IN_PLACE, RESTORE

    key = found.fingerprint[:12]
    if found.outcome == IN_PLACE:
        return f"snapshot {key} is in place: {found.reason}"
    if found.outcome == RESTORE and found.snapshot is not None:
        return (
            f"would restore snapshot {key}: {found.snapshot.file_count} files, "
            f"{human_bytes(found.snapshot.whole_bytes)} to fetch at most instead of a set-up of "
            f"{found.snapshot.setup_seconds:.1f} s; {found.reason}"
        )
    return f"would run the set-up and store it as snapshot {key}: {found.reason}"


def _short(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= _VALUE_CHARACTERS else f"{value[: _VALUE_CHARACTERS - 3]}..."


@command(
    "snapshot explain",
    context_settings=_CONTEXT,
    epilog="Example: bootseer snapshot explain -- pip install -r requirements.txt",
)
@_set_up_options
@shows(ExplainedSetup, text=_show_explained)
def snapshot_explain(**values: Any) -> ExplainedSetup:
    """Show the parts that decide the result of a set-up COMMAND, and whether it has a snapshot.

    If there is none: the differences from the stored snapshot that comes nearest. Nothing is run
    and nothing changes. COMMAND may be a line in quotes, such as that of a `bootseer run --setup`.
    """
    from bootseer.snapshots.explain import explain_setup

    found = explain_setup(settings_without_fanout(), _request(values), say)
    return ExplainedSetup(
        outcome=found.outcome,
        reason=found.reason,
        fingerprint=found.fingerprint,
        targets=found.targets,
        parts={part.name: part.value for part in found.parts},
        unknown=found.unknown,
        max_age_seconds=found.max_age_s,
        created=human_time(found.snapshot.created_ns) if found.snapshot else None,
        snapshot=snapshot_of(found.snapshot) if found.snapshot else None,
        nearest=found.nearest.fingerprint if found.nearest else None,
        nearest_snapshot=snapshot_of(found.nearest) if found.nearest else None,
        differences=[
            PartDifference(one.part, one.stored, one.now, one.note) for one in found.differences
        ],
    )
