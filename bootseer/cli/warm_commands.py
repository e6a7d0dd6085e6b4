"""`bootseer warm`: a directory that is not ours, recorded once and read ahead from then on."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from bootseer.base.documents import to_builtins
from bootseer.cli.lazy_group import WrappingCommand
from bootseer.cli.output import (
    Seconds,
    current_settings,
    emit_json,
    emit_table,
    human_bytes,
    json_option,
    open_current_store,
    say,
)
from bootseer.errors import BootseerError, InvalidInputError
from bootseer.settings.values import parse_name, parse_size

if TYPE_CHECKING:
    from bootseer.prefetch.warm.record import WarmRecord
    from bootseer.prefetch.warm.request import WarmRequest


@click.command(
    cls=WrappingCommand,
    needs_command=False,
    epilog="Example: bootseer warm /lustre/envs/train -- python train.py",
)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--name", metavar="NAME", help="Names the directory, where its path differs between nodes."
)
@click.option("--record", is_flag=True, help="Record also where there is a record; both count.")
@click.option(
    "--method",
    type=click.Choice(["auto", "fanotify", "inotify", "residency"]),
    default="auto",
    show_default=True,
    help="How a recording learns what is touched.",
)
@click.option(
    "--window",
    type=Seconds(1, 86_400),
    default=120.0,
    show_default=True,
    metavar="TIME",
    help="A recording ends after it, if not before.",
)
@click.option("--memory", metavar="SIZE", help="Read at most so much (half of what is available).")
@click.option(
    "--threads",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    metavar="N",
    help="Files that are read at once.",
)
@click.option("--show", is_flag=True, help="Print the record, and what was done here last.")
@click.option("--forget", is_flag=True, help="Remove the record: the next start makes a new one.")
@json_option
def warm(
    directory: Path,
    command: tuple[str, ...],
    name: str | None,
    record: bool,
    method: str,
    window: float,
    memory: str | None,
    threads: int,
    show: bool,
    forget: bool,
    as_json: bool,
) -> None:
    """Start COMMAND while what it will read below DIRECTORY is read ahead.

    For an environment on Lustre or NFS, or an image under another snapshotter. The first start
    records what is touched; later ones, on any node, read exactly that into the page cache, in
    large reads. The wrapper replaces itself by COMMAND. Without COMMAND the record is read ahead
    now. `--workload` tells several uses of a directory apart. See docs/warm.md.
    """
    _check_usage(command, record=record, show=show, forget=forget, as_json=as_json)
    memory_bytes = parse_size(memory) if memory else None
    try:
        request = replace(
            _request(directory, name),
            always_record=record,
            method=method,
            window_s=window,
            memory_bytes=memory_bytes,
            thread_count=threads,
        )
    except InvalidInputError:
        raise
    except (BootseerError, OSError) as error:
        if not command:
            raise
        # The command will know whether it can do without.
        say(str(error))
    else:
        if show:
            _show(request, as_json)
            return
        if forget:
            _forget(request)
            return
        if not command:
            _warm_now(request, as_json)
            return
        from bootseer.prefetch.warm.launch import start_warming

        if warning := start_warming(request):
            say(warning)
    _become(command)


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


def _warm_now(request: "WarmRequest", as_json: bool) -> None:
    from bootseer.base.progress import Progress
    from bootseer.prefetch.warm.launch import known_record, warm_now
    from bootseer.prefetch.warm.request import planned, shortage

    known = known_record(request)
    work = planned(request, known)
    if warning := shortage(request, work):
        say(warning)
    with Progress("reading ahead", work.planned_bytes) as progress:
        figures = warm_now(request, work, progress.advance)
    if as_json:
        emit_json({**_head(request), "planned_bytes": work.planned_bytes, **to_builtins(figures)})
        return
    click.echo(
        f"{human_bytes(figures.read_bytes)} of {request.directory} read ahead in "
        f"{figures.seconds:.1f} s, {human_bytes(figures.cached_bytes)} were there"
        + (f"; {figures.stale_count} files have changed" if figures.stale_count else "")
        + (f"; {figures.failed_count} files cannot be read" if figures.failed_count else ""),
        err=True,
    )


def _head(request: "WarmRequest") -> dict[str, Any]:
    return {"directory": request.directory, "workload": request.workload}


def _show(request: "WarmRequest", as_json: bool) -> None:
    from bootseer.prefetch.warm.launch import known_record
    from bootseer.prefetch.warm.state import node_paths, read_state

    known = known_record(request)
    paths = node_paths(Path(request.run_dir), request.identity, request.workload)
    last = read_state(paths.state)
    if as_json:
        emit_json({**_head(request), **_summary(known), "last": last, "log": str(paths.log)})
        return
    rows = [(os.fsdecode(f.path), f.size_bytes, f.range_bytes, len(f.ranges)) for f in known.files]
    emit_table(
        ("path", "file bytes", "touched bytes", "ranges count"),
        rows,
        title=f"{len(rows)} files, {human_bytes(known.range_bytes)}, "
        f"{known.recording_count} recordings, the last by {known.method}",
    )


def _summary(known: "WarmRecord") -> dict[str, Any]:
    return {
        "method": known.method,
        "recording_count": known.recording_count,
        "recorded_ns": known.recorded_ns,
        "range_bytes": known.range_bytes,
        "files": [
            {
                "path": os.fsdecode(file.path),
                "size_bytes": file.size_bytes,
                "mtime_ns": file.mtime_ns,
                "range_bytes": file.range_bytes,
                "range_count": len(file.ranges),
            }
            for file in known.files
        ],
    }


def _forget(request: "WarmRequest") -> None:
    from bootseer.prefetch.warm.record import delete_record

    with open_current_store() as store:
        delete_record(store, request.identity, request.workload)
