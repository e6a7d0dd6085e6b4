"""`bootseer warm`: a directory of another tool, recorded once and read ahead from then on."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import replace

from bootseer.cli.command_tree import WrappingCommand, command, current_settings
from bootseer.cli.options import SIZE, open_current_store
from bootseer.cli.show import document_of, emit_records, shows
from bootseer.cli.text import human_bytes, print_stderr, say
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.settings.values import parse_name

if TYPE_CHECKING:
    from bootseer.prefetch.warm.request import WarmRequest


class WarmedDirectory(Struct, kw_only=True):
    """Directory that was read ahead."""

    directory: str
    """Real path of the directory."""
    workload: str
    planned_bytes: int
    """Bytes of the record for which memory has room."""
    read_bytes: int
    """Bytes that were read."""
    cached_bytes: int
    """Bytes of the plan that were in the page cache before."""
    file_count: int
    """Parts of files (32 MiB) that are as recorded."""
    stale_count: int
    """Files that have changed or gone."""
    stale_bytes: int
    """Bytes of the record in these files."""
    failed_count: int
    """Files that could not be opened or read."""
    seconds: float
    """Duration of the read-ahead."""
    is_complete: bool
    """Whether nothing was cut off by a deadline or the command's end."""


class RecordedFile(Struct):
    """File of a record."""

    path: str
    size_bytes: int
    mtime_ns: int
    range_bytes: int
    """Bytes of the file on record."""
    range_count: int


class ShownRecord(Struct, kw_only=True):
    """Record of a directory, with `--show`, and the last work of this node."""

    directory: str
    """Real path of the directory."""
    workload: str
    method: str
    """Method of the newest recording."""
    recording_count: int
    recorded_ns: int
    """End of the newest recording."""
    range_bytes: int
    """Bytes on record."""
    files: list[RecordedFile]
    last: dict[str, Any]
    """Last work of this node: its plan and figures."""
    log: str
    """Log of the background process."""


def _show(found: WarmedDirectory | ShownRecord) -> None:
    if isinstance(found, ShownRecord):
        emit_records(
            found.files,
            *("path", "file bytes=size_bytes", "touched bytes=range_bytes"),
            "ranges count=range_count",
            title=f"{len(found.files)} files, {human_bytes(found.range_bytes)}, "
            f"{found.recording_count} recordings, the last by {found.method}",
        )
        return
    print_stderr(
        f"{human_bytes(found.read_bytes)} of {found.directory} read ahead in "
        f"{found.seconds:.1f} s, {human_bytes(found.cached_bytes)} were there"
        + (f"; {found.stale_count} files have changed" if found.stale_count else "")
        + (f"; {found.failed_count} files cannot be read" if found.failed_count else "")
    )


@command(
    "warm",
    cls=WrappingCommand,
    needs_command=False,
    epilog="Example: bootseer warm /lustre/envs/train -- python train.py",
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--name", metavar="NAME", help="Name of the directory, if its path differs between nodes."
)
@click.option(
    "--record", is_flag=True, help="Record even if there is a record; the union of both is stored."
)
@click.option(
    "--method",
    type=click.Choice(["auto", "fanotify", "inotify", "residency"]),
    default="auto",
    show_default=True,
    help="How a recording finds the files that are opened.",
)
@click.option(
    "--memory",
    type=SIZE,
    metavar="SIZE",
    help="Limit for the bytes that are read (half of the available memory).",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    metavar="N",
    help="Number of files that are read at once.",
)
@click.option(
    "--show", is_flag=True, help="Print the record, and the result of the last run on this node."
)
@click.option("--forget", is_flag=True, help="Remove the record: the next start makes a new one.")
@shows(WarmedDirectory | ShownRecord, text=_show)
def warm(
    directory: Path,
    command: tuple[str, ...],
    name: str | None,
    record: bool,
    method: str,
    memory: int | None,
    threads: int,
    show: bool,
    forget: bool,
) -> WarmedDirectory | ShownRecord | None:
    """Start COMMAND, and read ahead the parts of DIRECTORY that earlier starts have read.

    For an environment on Lustre or NFS, or an image under another snapshotter. The first start
    records the parts that are read; later starts, on any node, read exactly these into the page
    cache, in large reads. The wrapper replaces itself by COMMAND. Without COMMAND, the recorded
    parts are read now. `--workload` distinguishes several uses of a directory. See docs/warm.md.
    """
    as_json = click.get_current_context().params["as_json"]
    _check_usage(command, record=record, show=show, forget=forget, as_json=as_json)
    try:
        request = replace(
            _request(directory, name),
            always_record=record,
            method=method,
            window_s=current_settings().record_window_s,
            memory_bytes=memory,
            thread_count=threads,
        )
    except InvalidInputError:
        raise
    except (BootseerError, OSError) as error:
        if not command:
            raise
        # Without the record the command only reads more slowly.
        say(str(error))
    else:
        if show:
            return _record_of(request)
        if forget:
            _forget(request)
            return None
        if not command:
            return _warm_now(request)
        from bootseer.prefetch.warm.request import start_warming

        if warning := start_warming(request):
            say(warning)
    _become(command)
    return None


def _check_usage(
    command: tuple[str, ...], *, record: bool, show: bool, forget: bool, as_json: bool
) -> None:
    if command and (show or forget or as_json):
        raise click.UsageError("--show, --forget and --json are for use without COMMAND")
    if record and not command:
        raise click.UsageError("--record needs a COMMAND to record")
    if forget and (show or as_json):
        raise click.UsageError("--forget prints nothing: use it by itself")


def _request(directory: Path, name: str | None) -> "WarmRequest":
    from bootseer.prefetch.warm.request import warm_request

    return warm_request(current_settings(), directory, parse_name(name) if name else None)


def _become(command: tuple[str, ...]) -> None:
    from bootseer.launch.signals import hand_over
    from bootseer.linux.scripts import execute

    hand_over()
    execute(command)


def _warm_now(request: "WarmRequest") -> WarmedDirectory:
    from bootseer.base.progress import ProgressBar
    from bootseer.prefetch.warm.plan import plan_read_ahead
    from bootseer.prefetch.warm.reader import read_ahead
    from bootseer.prefetch.warm.request import stored_record

    plan = plan_read_ahead(stored_record(request), request.memory_bytes)
    if warning := plan.memory_warning(request.directory):
        say(warning)
    with ProgressBar("reading ahead", plan.planned_bytes) as progress:
        figures = read_ahead(
            request.directory,
            plan,
            thread_count=request.thread_count,
            deadline_s=request.read_deadline_s,
            on_bytes=progress.advance,
        )
    return document_of(
        WarmedDirectory,
        figures,
        directory=request.directory,
        workload=request.workload,
        planned_bytes=plan.planned_bytes,
    )


def _record_of(request: "WarmRequest") -> ShownRecord:
    from bootseer.prefetch.warm.request import read_outcome, stored_record

    known = stored_record(request)
    paths = request.node_paths
    return document_of(
        ShownRecord,
        known,
        directory=request.directory,
        workload=request.workload,
        files=[
            document_of(RecordedFile, one, path=os.fsdecode(one.path), range_count=len(one.ranges))
            for one in known.files
        ],
        last=read_outcome(paths.outcome),
        log=str(paths.log),
    )


def _forget(request: "WarmRequest") -> None:
    from bootseer.prefetch.warm.record import delete_record

    with open_current_store() as store:
        delete_record(store, request.identity, request.workload)
