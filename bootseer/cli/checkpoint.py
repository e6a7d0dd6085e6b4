"""`bootseer checkpoint`: striped checkpoints: copy, look, check, convert, mount."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import UNSET, Struct, UnsetType

from bootseer.base.redact import public_url
from bootseer.cli.command_tree import command, current_settings
from bootseer.cli.options import AGE, OCTAL, SIZE, options, time_option
from bootseer.cli.show import document_of, emit_records, emit_table, shows
from bootseer.cli.text import (
    human_bytes,
    human_time,
    one_line,
    print_stderr,
    printable,
    say,
    warn_unwritten,
)
from bootseer.errors import (
    EXIT_OK,
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedError,
    exit_code_of,
)

if TYPE_CHECKING:
    from bootseer.fuse.striped.storage import StripedStorage
    from bootseer.fuse.striped.tools.copy_tree import CopyPlace
    from bootseer.fuse.striped.tools.fsck import Garbage
    from bootseer.fuse.striped.view import FileView
    from bootseer.store.backend import FileInfo

_READS_AT_ONCE = 16
_FILES_AT_ONCE = 4

form_options = options(
    click.option("--stripe-unit", type=SIZE, metavar="SIZE", help="Bytes per stripe unit (4MiB)."),
    click.option("--stripe-count", type=int, metavar="N", help="Number of parts of a file (8)."),
    click.option(
        "--layout",
        type=click.Choice(("striped", "plain")),
        default="striped",
        show_default=True,
        help="Layout of new files: striped over parts, or one ordinary file.",
    ),
)
"""Options for the form in which new files are stored, as `_opened` takes them."""


@contextlib.contextmanager
def _opened(
    url: str,
    *,
    stripe_unit: int | None = None,
    stripe_count: int | None = None,
    layout: str = "striped",
) -> "Iterator[CopyPlace]":
    """Yield the place that `url` names; its storage is closed at the end."""
    from bootseer.fuse.striped.layout import DEFAULT_STRIPE_COUNT, DEFAULT_STRIPE_UNIT_BYTES
    from bootseer.fuse.striped.tools.copy import open_storage
    from bootseer.fuse.striped.tools.copy_tree import CopyPlace, split_url

    folder, name = split_url(url)
    with open_storage(
        current_settings(),
        folder,
        stripe_unit_bytes=DEFAULT_STRIPE_UNIT_BYTES if stripe_unit is None else stripe_unit,
        stripe_count=DEFAULT_STRIPE_COUNT if stripe_count is None else stripe_count,
        layout="plain" if layout == "plain" else "striped",
    ) as storage:
        yield CopyPlace(storage, name)


# ---- cp ---------------------------------------------------------------------------------------


class CopiedFiles(Struct):
    """Files that were copied."""

    files: int
    bytes: int
    seconds: float


def _show_copied(done: CopiedFiles) -> None:
    rate = human_bytes(done.bytes / max(done.seconds, 1e-3))
    say(f"copied {done.files} files, {human_bytes(done.bytes)} in {done.seconds:.1f} s ({rate}/s)")


@command(
    "checkpoint cp",
    epilog="Example: bootseer checkpoint cp -r step-1000 hdfs://namenode/checkpoints/",
)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("target")
@click.option("-r", "--recursive", is_flag=True, help="Copy directories.")
@form_options
@shows(CopiedFiles, text=_show_copied)
def checkpoint_cp(
    sources: tuple[str, ...],
    target: str,
    recursive: bool,
    **form: Any,
) -> CopiedFiles:
    """Copy files into, out of or between striped trees.

    Each file appears whole or not at all, also when this is killed; so does a directory that is not
    there yet, where the storage can rename one. An existing TARGET directory, or one that ends
    in "/", gets the sources into it. Names are replaced as by cp.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.fuse.striped.tools.copy_tree import CopyPlace, copy_one, copy_tree, is_url

    if not any(map(is_url, (*sources, target))):
        raise InvalidInputError("none of these is a URL: for local files use cp")
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:

        def place(text: str) -> CopyPlace:
            if not is_url(text):
                return CopyPlace(None, os.path.abspath(text))
            return stack.enter_context(_opened(text, **form))

        into = place(target)
        is_into = target.endswith("/") or into.is_dir()
        if len(sources) > 1 and not is_into:
            raise InvalidInputError(f"{public_url(target)} is not a directory")
        jobs = [_copy_job(place(source), into, is_into, recursive) for source in sources]
        total = sum(sum(sizes.values()) for _, _, sizes in jobs)
        files = size_bytes = 0
        with ProgressBar("copying", total) as progress:
            for source, goal, sizes in jobs:
                if "" in sizes:
                    size_bytes += copy_one(source, goal, progress.advance)
                    files += 1
                    continue
                copied = copy_tree(source, goal, sizes, progress.advance)
                files += copied.file_count
                size_bytes += copied.size_bytes
    return CopiedFiles(files, size_bytes, round(time.monotonic() - started_s, 3))


def _copy_job(
    source: "CopyPlace", into: "CopyPlace", is_into: bool, recursive: bool
) -> "tuple[CopyPlace, CopyPlace, dict[str, int]]":
    """Return source, goal, and the sizes of the files to copy; "" is the source itself."""
    from bootseer.fuse.striped.tools.copy_tree import sizes_below

    goal = into.at(source.name) if is_into and source.name else into
    if not source.is_dir():
        if not source.exists():
            raise NotFoundError(f"{source} does not exist")
        if goal.is_dir():
            raise InvalidInputError(f"{goal} is a directory")
        if source.storage is None:
            return source, goal, {"": Path(source.path).stat().st_size}
        return source, goal, {"": source.storage.tree.stored.status(source.path).size_bytes}
    if not recursive:
        raise InvalidInputError(f"{source} is a directory; give -r to copy it")
    return source, goal, sizes_below(source)


# ---- ls and stat ------------------------------------------------------------------------------


class ListedFile(Struct):
    """Name in a striped tree."""

    name: str
    type: str
    """`file` or `directory`."""
    bytes: int
    modified_ns: int
    layout: str | None
    """`striped`, `plain`, `damaged`; null for a directory."""
    generation: str | None
    """Generation of a striped file."""
    segments: int
    """Number of segments; 0 for a file that is not striped."""
    parts: int
    """Number of parts in all segments."""
    error: str | UnsetType = UNSET
    """Fault of a damaged file."""


class StoredPart(Struct):
    """Part of a segment."""

    path: str
    """Path relative to the folder of the file."""
    bytes: int


class StoredSegment(Struct):
    """Segment of a striped file."""

    generation: str
    """Generation, which names the folder of the parts."""
    bytes: int
    stripe_unit_bytes: int
    block_bytes: int
    """Size of the blocks that have checksums."""
    parts: list[StoredPart]


class StoredFile(Struct):
    """File of a striped tree, and how it is stored."""

    name: str
    type: str
    """Always `file`."""
    bytes: int
    modified_ns: int
    layout: str | None
    """`striped` or `plain`."""
    generation: str | None
    """Generation of a striped file."""
    parts: int
    """Number of parts in all segments."""
    segments: list[StoredSegment]


def _listed(info: "FileInfo", view: "FileView | None") -> ListedFile:
    layout = view.layout if view else None
    segments = layout.segments if layout else ()
    return ListedFile(
        name=info.path.rpartition("/")[2],
        type="directory" if info.is_dir else "file",
        bytes=view.size_bytes if view else 0,
        modified_ns=info.modified_ns,
        layout=None if view is None else "striped" if layout else "plain",
        generation=layout.generation if layout else None,
        segments=len(segments),
        parts=sum(len(segment.parts) for segment in segments),
    )


def _show_listed(found: list[ListedFile]) -> None:
    if not click.get_current_context().params["at_length"]:
        for one in found:
            click.echo(printable(one.name))
        return
    emit_table(
        ("size", "modified", "layout", "name"),
        (
            (
                "" if one.type == "directory" else human_bytes(one.bytes),
                human_time(one.modified_ns),
                _layout(one),
                one.name + ("/" if one.type == "directory" else ""),
            )
            for one in found
        ),
    )


def _layout(one: ListedFile) -> str:
    if one.layout != "striped":
        return one.layout or ""
    segments = f", {one.segments} segments" if one.segments > 1 else ""
    return f"striped over {one.parts}{segments}"


@command(
    "checkpoint ls",
    epilog="Example: bootseer checkpoint ls -l hdfs://namenode/checkpoints/step-1000",
)
@click.argument("url")
@click.option(
    "-l", "--long", "at_length", is_flag=True, help="Show size, time and layout of each file."
)
@shows(list[ListedFile], text=_show_listed)
def checkpoint_ls(url: str, at_length: bool) -> list[ListedFile]:
    """List a directory of a striped tree, or one file."""
    with _opened(url) as place:
        assert place.storage is not None
        stored = place.storage.tree.stored
        info = place.storage.backend.stat(place.path) if place.path else None
        infos = [info] if info is not None and not info.is_dir else stored.entries(place.path)
        if not at_length and not click.get_current_context().params["as_json"]:
            # Each layout costs a read, and none is shown.
            return [_listed(one, None) for one in infos]
        return _listed_all(place.storage, infos)


def _listed_all(storage: "StripedStorage", infos: "list[FileInfo]") -> list[ListedFile]:
    from concurrent.futures import ThreadPoolExecutor

    def describe(info: "FileInfo") -> ListedFile | None:
        try:
            view = None if info.is_dir else storage.tree.stored.view_of(info)
        except NotFoundError:
            return None
        except BootseerError as error:
            damaged = _listed(info, None)
            damaged.layout, damaged.error = "damaged", str(error)
            return damaged
        return _listed(info, view)

    with ThreadPoolExecutor(8) as threads:
        return [one for one in threads.map(describe, infos) if one is not None]


def _show_stored(found: StoredFile) -> None:
    kind = "striped" if found.segments else "plain (an ordinary file)"
    click.echo(f"{printable(found.name)}: {kind}, {found.bytes} bytes")
    click.echo(f"modified {human_time(found.modified_ns)}")
    if found.segments:
        click.echo(f"generation {found.generation}")
        emit_table(
            ("segment", "part", "bytes", "stripe unit bytes"),
            (
                (index, part.path, part.bytes, segment.stripe_unit_bytes)
                for index, segment in enumerate(found.segments)
                for part in segment.parts
            ),
        )


@command(
    "checkpoint stat",
    epilog="Example: bootseer checkpoint stat hdfs://namenode/checkpoints/step-1000/model",
)
@click.argument("url")
@shows(StoredFile, text=_show_stored)
def checkpoint_stat(url: str) -> StoredFile:
    """Show how one file is stored: generation, segments, parts and their sizes."""
    from bootseer.fuse.striped.view import generation_folder

    with _opened(url) as place:
        assert place.storage is not None
        if place.is_dir():
            raise InvalidInputError(f"{public_url(url)} is a directory; use ls")
        info = place.storage.backend.stat(place.path)
        view = place.storage.tree.stored.view_of(info)
    segments = [
        document_of(
            StoredSegment,
            segment,
            bytes=segment.size_bytes,
            parts=[
                StoredPart(
                    f"{generation_folder(view.directory, segment.generation)}/{part.name}",
                    part.size_bytes,
                )
                for part in segment.parts
            ],
        )
        for segment in (view.layout.segments if view.layout else ())
    ]
    return document_of(StoredFile, _listed(info, view), segments=segments)


# ---- verify and fsck --------------------------------------------------------------------------


class DamagedRange(Struct):
    """Bytes of a file that cannot be read as they were written."""

    path: str
    offset: int
    """Offset of the damage in the file."""
    bytes: int
    """Number of damaged bytes."""
    part: str
    """Stored file that holds the damaged bytes."""
    part_offset: int
    """Offset of the damage in the stored file."""
    reason: str
    """`checksum`, `missing`, `short`, `unreadable`, or what is wrong with the layout."""


class Verified(Struct):
    """Files that were read and compared with their checksums."""

    files: int
    """Number of files that were read."""
    striped_files: int
    """Number of striped files among them, which have checksums."""
    bytes: int
    seconds: float
    damaged: list[DamagedRange]


def _show_verified(done: Verified) -> None:
    if done.damaged:
        columns = ("file=path", "offset", "bytes", "part", "part_offset", "reason")
        emit_records(done.damaged, *columns)
    say(
        f"verified {done.files} files ({done.striped_files} striped), {human_bytes(done.bytes)}: "
        + (f"{len(done.damaged)} damages" if done.damaged else "all as it was written")
    )


@command(
    "checkpoint verify",
    epilog="Example: bootseer checkpoint verify hdfs://namenode/checkpoints/step-1000",
)
@click.argument("url")
@shows(
    Verified,
    text=_show_verified,
    code=lambda done: exit_code_of(CorruptError()) if done.damaged else EXIT_OK,
)
def checkpoint_verify(url: str) -> Verified:
    """Read every byte of a file or directory and check it against its checksums.

    Names each damaged block with the part that holds it. Ordinary files have no checksums of ours:
    of those it only shows that they can be read. Exits with 15 when something is damaged.
    """
    from concurrent.futures import ThreadPoolExecutor

    from bootseer.base.parallel import StoppableProgress, map_in_threads
    from bootseer.base.progress import ProgressBar
    from bootseer.fuse.striped.tools.copy_tree import views_below
    from bootseer.fuse.striped.tools.verify import verify_file

    started_s = time.monotonic()
    with _opened(url) as place:
        storage = place.storage
        assert storage is not None
        views, unreadable = views_below(storage, place.path)
        damaged = [
            DamagedRange(info.path, 0, info.size_bytes, info.path, 0, str(error))
            for info, error in unreadable
        ]
        size_bytes = sum(view.size_bytes for view in views)
        with (
            ProgressBar("verifying", size_bytes) as bar,
            ThreadPoolExecutor(_READS_AT_ONCE) as reads,
        ):
            progress = StoppableProgress(bar.advance)
            found = map_in_threads(
                {view.path: view for view in views},
                lambda path, view: verify_file(storage.backend, view, reads, progress),
                progress,
                thread_count=_FILES_AT_ONCE,
                thread_name="verify",
                size_of=lambda view: view.size_bytes,
            )
    damaged += [
        DamagedRange(path, one.offset, one.length, one.stored_path, one.stored_offset, one.reason)
        for path, ones in found.items()
        for one in ones
    ]
    striped_count = sum(view.layout is not None for view in views)
    seconds = round(time.monotonic() - started_s, 3)
    return Verified(len(views), striped_count, size_bytes, seconds, damaged)


class TroubledFile(Struct):
    """File that cannot be read in whole."""

    path: str
    part: str
    """Stored file with the fault."""
    reason: str
    """`missing`, `short`, `long`, `damaged layout` or `unknown layout`."""
    expected_bytes: int
    """Size of the part in the layout."""
    found_bytes: int | None
    """Size of the part in the storage; null if it is missing."""


class GarbageFile(Struct):
    """Stored file or folder that no file needs, or a save that goes on."""

    path: str
    bytes: int
    modified_ns: int
    """Time of the last change of anything in it."""
    deleted: bool
    """Whether it was deleted."""


class CheckedTree(Struct):
    """Tree whose files and parts were listed and compared."""

    directories: int
    """Number of directories that were checked."""
    files: int
    troubles: list[TroubledFile]
    garbage: list[GarbageFile]
    deleted_bytes: int


def _show_checked(done: CheckedTree) -> None:
    if done.troubles:
        columns = ("file=path", "reason", "part", "expected_bytes", "found_bytes")
        emit_records(done.troubles, *columns)
    if done.garbage:
        emit_records(done.garbage, "garbage=path", "size=bytes", "age=modified_ns", "deleted")
    gone = sum(one.deleted for one in done.garbage)
    say(
        f"{done.files} files in {done.directories} directories: {len(done.troubles)} troubles, "
        f"{len(done.garbage) - gone} pieces of garbage"
    )
    if click.get_current_context().params["delete"]:
        say(f"deleted {gone} pieces of garbage, {human_bytes(done.deleted_bytes)}")


@command(
    "checkpoint fsck",
    epilog="Example: bootseer checkpoint fsck --delete hdfs://namenode/checkpoints",
)
@click.argument("url")
@click.option("--delete", is_flag=True, help="Delete garbage that is older than --age.")
@click.option(
    "--age",
    "age_s",
    type=AGE,
    default="24h",
    show_default=True,
    metavar="TIME",
    help="Keep garbage that was written to within this time; at least 1h.",
)
@time_option(
    "--grace",
    "grace_s",
    default_s=60.0,
    help="Delay of a second check before deletion, since replaced files may still be read.",
)
@shows(
    CheckedTree,
    text=_show_checked,
    code=lambda done: exit_code_of(CorruptError()) if done.troubles else EXIT_OK,
)
def checkpoint_fsck(url: str, delete: bool, age_s: float, grace_s: float) -> CheckedTree:
    """Find files whose parts are missing, and the garbage of crashed savers.

    Reads layouts and listings, no contents. --delete removes garbage, never a save that is going on
    on another node: files that are young by the storage's clock stay, and on HDFS files that are
    open for writing. Exits with 15 when a file cannot be read in whole.
    """
    from bootseer.fuse.striped.tools.fsck import MIN_AGE_S, check_tree, delete_garbage

    if delete and age_s < MIN_AGE_S:
        raise InvalidInputError("--age must be at least 1h: a save may pause for that long")
    deleted: list[Garbage] = []
    with _opened(url) as place:
        assert place.storage is not None
        if place.path and not place.is_dir():
            place.storage.backend.stat(place.path)
            raise InvalidInputError(f"{place} is a file; give the directory that it is in")
        reports = list(check_tree(place.storage, place.path))
        if delete and any(report.garbage for report in reports):
            time.sleep(grace_s)
            for report in reports:
                deleted += delete_garbage(place.storage, report, age_s)
    gone = {one.path for one in deleted}
    return CheckedTree(
        directories=len(reports),
        files=sum(report.file_count for report in reports),
        troubles=[document_of(TroubledFile, one) for report in reports for one in report.troubles],
        garbage=[
            GarbageFile(one.path, one.size_bytes, one.modified_ns, one.path in gone)
            for report in reports
            for one in report.garbage
        ],
        deleted_bytes=sum(one.size_bytes for one in deleted),
    )


# ---- convert ----------------------------------------------------------------------------------


class NotConverted(Struct):
    """File that keeps its old form."""

    path: str
    error: str
    """Reason in a sentence."""


class Converted(Struct):
    """Files that are stored in another form."""

    files: int
    """Number of files that were converted."""
    bytes: int
    """Size of these files."""
    unchanged: int
    """Number of files that had the form already."""
    failed: list[NotConverted]
    seconds: float
    exit_code: int
    """Exit code of the command."""


def _show_converted(done: Converted) -> None:
    for one in done.failed:
        say(one.error)
    say(
        f"converted {done.files} files, {human_bytes(done.bytes)}; "
        f"{done.unchanged} were as wanted already"
    )


@command(
    "checkpoint convert",
    epilog="Example: bootseer checkpoint convert -r hdfs://namenode/models/llama",
)
@click.argument("url")
@click.option("-r", "--recursive", is_flag=True, help="Convert all files of a directory.")
@form_options
@time_option(
    "--grace",
    "grace_s",
    default_s=30.0,
    help="Time for which the old parts of a converted file stay, for its readers.",
)
@shows(Converted, text=_show_converted, code=lambda done: done.exit_code)
def checkpoint_convert(
    url: str,
    recursive: bool,
    grace_s: float,
    **form: Any,
) -> Converted:
    """Store files in another form: striped, plain, or with another unit or count.

    A file is replaced in one step, once its new form is whole and durable, and only if nobody else
    has replaced it meanwhile (exit code 19; theirs stays). Killed at any time, each file is in the
    old form or the new one. Files that fit into one stripe unit are always plain.
    """
    from bootseer.base.progress import ProgressBar
    from bootseer.fuse.striped.tools.copy import convert_file, is_stored_as
    from bootseer.fuse.striped.tools.copy_tree import views_below

    started_s = time.monotonic()
    converted = size_bytes = 0
    failed: list[tuple[str, BootseerError]] = []
    had_parts_s: float | None = None
    with _opened(url, **form) as place:
        storage = place.storage
        assert storage is not None
        if place.is_dir() and not recursive:
            raise InvalidInputError(f"{place} is a directory; give -r to convert its files")
        views, damaged = views_below(storage, place.path)
        failed += [(info.path, error) for info, error in damaged]
        todo = [view for view in views if not is_stored_as(view, storage.settings)]
        with ProgressBar("converting", sum(view.size_bytes for view in todo)) as progress:
            for view in todo:
                try:
                    if convert_file(storage, view.path, storage.settings, progress.advance):
                        converted += 1
                        size_bytes += view.size_bytes
                        if view.layout is not None:
                            had_parts_s = time.monotonic()
                except (BusyError, CorruptError) as error:
                    failed.append((view.path, error))
        if had_parts_s is not None:
            # The storage deletes replaced parts when it is closed.
            time.sleep(max(0.0, had_parts_s + grace_s - time.monotonic()))
    return Converted(
        files=converted,
        bytes=size_bytes,
        unchanged=len(views) - len(todo),
        failed=[NotConverted(path, one_line(why)) for path, why in failed],
        seconds=round(time.monotonic() - started_s, 3),
        exit_code=exit_code_of(failed[0][1]) if failed else EXIT_OK,
    )


# ---- mount and restart --------------------------------------------------------------------------

# The number above means "unchanged" to the kernel (chown(2)).
_ID_MAX = 2**32 - 2


class NewCheckpointMount(Struct):
    """Checkpoint folder that was mounted."""

    url: str
    """URL without credentials."""
    directory: str
    pid: int
    """Process id of the server."""
    log: str
    created: bool
    """Whether the folder at the URL was missing, and was made."""


class Restarted(Struct):
    """Mount that a new process serves."""

    directory: str
    worker_pid: int
    """Process that answers now."""


def _show_mounted(done: NewCheckpointMount) -> None:
    print_stderr(f"{done.url} is mounted on {done.directory} (log: {done.log})")


@command(
    "checkpoint mount",
    epilog="Example: bootseer checkpoint mount hdfs://namenode/checkpoints /mnt/checkpoints",
)
@click.argument("url")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--foreground", is_flag=True, help="Serve in this process until interrupted.")
@form_options
@click.option("--memory", type=SIZE, metavar="SIZE", help="Memory limit of the mount.")
@time_option(
    "--deadline",
    least_s=1,
    help="Time without an answer of the storage after which a request fails.",
)
@click.option("--allow-other", is_flag=True, help="Allow access by other users.")
@click.option("--uid", type=click.IntRange(0, _ID_MAX), metavar="N", help="Owner of all files.")
@click.option("--gid", type=click.IntRange(0, _ID_MAX), metavar="N", help="Group of all files.")
@click.option("--umask", type=OCTAL, metavar="MODE", help="Permission bits that no file has (022).")
@click.option(
    "--lifetime-pid",
    type=click.IntRange(1, 2**22),
    metavar="PID",
    help="Unmount when this process ends.",
)
@click.option("--read-newest", is_flag=True, help="Read the newest checkpoint ahead.")
@click.option("--page-cache", is_flag=True, help="Let the kernel cache the bytes that are read.")
@click.option("--mkdir", is_flag=True, help="Create DIRECTORY if it does not exist.")
@click.option(
    "--immutable",
    is_flag=True,
    help="Make DIRECTORY itself immutable (chattr +i), against writes while nothing is mounted.",
)
@time_option("--timeout", default_s=60.0, help="Time for which SIGTERM waits for open files.")
@shows(NewCheckpointMount, text=_show_mounted)
def checkpoint_mount(
    url: str,
    directory: Path,
    *,
    foreground: bool,
    stripe_unit: int | None,
    memory: int | None,
    deadline: float | None,
    lifetime_pid: int | None,
    mkdir: bool,
    immutable: bool,
    timeout: float,
    **choices: Any,
) -> NewCheckpointMount | None:
    """Mount the checkpoints at URL on DIRECTORY.

    Returns once the mount works; a background process serves it. Large files are striped over
    several files that are read and written in parallel; docs/SEMANTICS.md lists the guarantees. A
    mount that a killed server has left on DIRECTORY is unmounted first. SIGTERM to the server
    unmounts. With --foreground, files that are still being written at the end are named and lost,
    and the exit code is 1.
    """
    from bootseer.fuse.striped.mounted.mount import make_mount_point, mount_checkpoints, mount_spec
    from bootseer.launch.checkpoints import created_warning
    from bootseer.linux.processes import ProcessId

    settings = current_settings()
    if mkdir:
        make_mount_point(settings.run_dir, directory)
    spec = mount_spec(
        settings,
        url,
        directory,
        stripe_unit_bytes=stripe_unit,
        memory_bytes=memory,
        deadline_s=deadline,
        user=None if lifetime_pid is None else ProcessId.of(lifetime_pid),
        shutdown_s=timeout,
        **choices,
    )
    if immutable:
        _protect(directory)
    if foreground:
        from bootseer.fuse.striped.mounted.server import serve_checkpoints
        from bootseer.linux.processes import notify_systemd
        from bootseer.served.service import find_checkpoints

        def ready() -> None:
            print_stderr(f"{public_url(url)} is mounted on {directory}")
            known = find_checkpoints(settings.run_dir, Path(spec.directory))
            if known is not None and known.state.root_was_made:
                say(created_warning(url))
            notify_systemd("READY=1")

        click.get_current_context().exit(warn_unwritten(serve_checkpoints(spec, ready)))
    mounted = mount_checkpoints(spec, forks=True)
    if mounted.root_was_made:
        say(created_warning(url))
    return document_of(
        NewCheckpointMount, mounted, url=public_url(mounted.url), created=mounted.root_was_made
    )


def _protect(directory: Path) -> None:
    """Make the mount point immutable; where its file system cannot, a warning is enough."""
    from bootseer.fuse.striped.mounted.mount import make_immutable

    try:
        make_immutable(directory)
    except (UnsupportedError, PermissionDeniedError) as error:
        say(f"warning: {error}; between mounts, programs would write into that folder itself")


@command(
    "checkpoint restart",
    epilog="Example: bootseer checkpoint restart /mnt/checkpoints --timeout 5m",
)
@click.argument("directory")
@click.option("--force", is_flag=True, help="Restart even if files are being written.")
@time_option("--timeout", default_s=60.0, help="Longest wait for files that are being written.")
@shows(
    Restarted, text=lambda one: print_stderr(f"process {one.worker_pid} serves {one.directory} now")
)
def checkpoint_restart(directory: str, force: bool, timeout: float) -> Restarted:
    """Serve the mount on DIRECTORY by a new process, with the code that is installed now.

    Open files stay open. The command waits for files that are being written, and gives up after
    --timeout; with --force it does not wait, and their writers get an error.
    """
    from bootseer.fuse.striped.mounted.mount import restart_checkpoints

    pid = restart_checkpoints(
        current_settings().run_dir, Path(directory), timeout_s=timeout, force=force
    )
    return Restarted(directory, pid)
