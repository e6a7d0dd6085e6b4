"""`bootseer status` and `unmount`: all that is mounted, or runs in the background, on this node."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from bootseer.base.documents import to_builtins
from bootseer.cli.output import (
    Seconds,
    current_settings,
    emit_json,
    emit_table,
    json_option,
    printable,
    say,
)
from bootseer.errors import EXIT_FAILURE, EXIT_OK, DeadlineError, NotFoundError

if TYPE_CHECKING:
    from bootseer.served.status import Entry

CHECKPOINTS = ("checkpoints", "volume")
_COLUMNS = ("kind", "what", "where", "since", "server", "users", "health")
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@click.command(epilog="Example: bootseer status /mnt/train")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(0, 86_400),
    metavar="TIME",
    help="First wait, at most so long, until what starts recorded or pulled is published.",
)
@json_option
def status(directory: Path | None, wait_s: float | None, as_json: bool) -> int:
    """Show what is mounted, or runs in the background, on this node; or the figures of DIR's mount.

    Images, environments, checkpoint folders, publishers, attendants and warming: what and where it
    is, since when, which processes serve and use it, what is wrong with it and what to do. What
    other users have mounted is named. With --json there are all figures of each mount. With DIR it
    exits with 1 where the server is dead or does not answer.
    """
    settings = current_settings()
    if wait_s is not None:
        from bootseer.prefetch.publish.publishing import wait_published

        if not wait_published(settings, wait_s):
            raise DeadlineError(f"a record was still being published after {wait_s:g} s")
    if directory is not None:
        entries = [_entry_at(settings.run_dir, directory)]
    else:
        entries = node_entries(settings.run_dir)
    if as_json:
        emit_json({"served": [to_builtins(one) for one in entries]})
    elif directory is not None and entries[0].figures is not None:
        from bootseer.cli.node.served_figures import print_checkpoint_figures, print_image_figures

        is_checkpoint = entries[0].kind in CHECKPOINTS
        show = print_checkpoint_figures if is_checkpoint else print_image_figures
        show(entries[0].figures)
    else:
        emit_entries(entries)
    is_broken = directory is not None and entries[0].health in ("dead", "silent")
    return EXIT_FAILURE if is_broken else EXIT_OK


def _entry_at(run_dir: Path, directory: Path) -> "Entry":
    """The row of what is mounted on `directory`, with its throughput of this moment. Raises:
    NotFoundError; UnavailableError, DeadlineError where a checkpoint mount's server is silent."""
    from bootseer.fuse.striped.mounted.status import mount_status
    from bootseer.linux.mount_table import absolute
    from bootseer.served.status import entry_of, known_servers

    path = str(absolute(directory))
    found = [
        entry
        for known in known_servers(run_dir)
        if path in (*(entry := entry_of(known, run_dir)).where, known.state.directory)
    ]
    if not found:
        raise NotFoundError(
            f"nothing of Bootseer's is mounted on {path}; `bootseer status` shows what is mounted"
        )
    entry = max(found, key=lambda one: (one.figures is not None, one.since_s or 0))
    if entry.kind in CHECKPOINTS and entry.figures is not None:
        return replace(entry, figures=mount_status(run_dir, directory))
    return entry


@click.command(epilog="Example: bootseer unmount /mnt/train")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(0, 3600),
    metavar="TIME",
    help="How long open files of an image or a checkpoint folder may stay open before they are cut "
    "off (10 s).",
)
@click.option(
    "--lazy", is_flag=True, help="Take an environment off also while files in it are open."
)
@json_option
def unmount(directory: Path, timeout_s: float | None, lazy: bool, as_json: bool) -> int:
    """Unmount an image, environment or checkpoint folder from DIR, also where its server is dead.

    What was written into an environment is gone. Exits with 1 and names them when files of a
    checkpoint folder were still being written: nothing of those is kept.
    """
    from bootseer.cli.checkpoint.mount_commands import warn_unwritten
    from bootseer.fuse.striped.mounted.mount import unmount_checkpoints
    from bootseer.fuse.striped.mounted.options import SUBTYPE
    from bootseer.linux.mount_table import absolute, find_mount
    from bootseer.served.covers import cover_at
    from bootseer.served.status import find_known

    settings = current_settings()
    path = absolute(directory)
    answer: dict[str, Any] = {"directory": path}
    if cover_at(path) is not None:
        from bootseer.snapshots.mounted import unmount_snapshot

        if timeout_s is not None:
            raise click.UsageError("--timeout is not for environments; --lazy is")
        is_covered = unmount_snapshot(settings, directory, lazy=lazy)
        if is_covered and not as_json:
            say(f"an earlier snapshot is still mounted on {directory}; unmount it likewise")
        answer["still_mounted"] = bool(is_covered)
    else:
        if lazy:
            raise click.UsageError(f"--lazy is for environments, and none is mounted on {path}")
        wait_s = 10.0 if timeout_s is None else timeout_s
        mounted, known = find_mount(path), find_known(settings.run_dir, path)
        is_checkpoint = mounted.subtype == SUBTYPE if mounted else known and known.is_running
        if is_checkpoint:
            answer["unwritten"] = list(
                unmount_checkpoints(settings.run_dir, directory, timeout_s=wait_s)
            )
        else:
            from bootseer.prefetch.images.mount import unmount_image

            unmount_image(settings, directory, timeout_s=wait_s)
    if as_json:
        emit_json(answer)
    return warn_unwritten(answer.get("unwritten", ()))


def emit_entries(entries: "list[Entry]") -> None:
    """Print a row for each, and what is wrong with them."""
    emit_table(_COLUMNS, map(_cells, entries))
    for one in entries:
        if one.problem:
            place = ", ".join(one.where) or one.what
            click.echo(printable(f"{one.kind} {place}: {one.problem}; {one.remedy}"))


def node_entries(run_dir: Path) -> "list[Entry]":
    """A row for each thing that is served; asks its server."""
    from bootseer.prefetch.warm.state import running_states
    from bootseer.served.status import Entry, entry_of, foreign_entries, known_servers, unserving

    servers = known_servers(run_dir)
    entries = [*(entry_of(one, run_dir) for one in servers), *unserving(run_dir)]
    for state, log in running_states(run_dir):
        entries.append(
            Entry(
                kind="warming",
                what=f"{state.get('workload', '')} ({state.get('action', '')})",
                where=(str(state.get("directory", "")),),
                since_s=state.get("started_ns", 0) / 1e9,
                pid=state.get("pid"),
                worker_pid=None,
                users=tuple(filter(None, [state.get("command_pid")])),
                health="degraded" if state.get("warning") else "ok",
                problem=state.get("warning", ""),
                remedy=f"see {log}" if state.get("warning") else "",
                log=os.fspath(log),
            )
        )
    return [*entries, *foreign_entries(servers, run_dir)]


def _cells(one: "Entry") -> tuple[str, ...]:
    server = " ".join(str(pid) for pid in (one.pid, one.worker_pid) if pid)
    users = " ".join(map(str, one.users))
    where = ", ".join(one.where)
    what = one.what
    if one.until_s is not None:
        what += f" (for another {_span(one.until_s - time.time())})"
    return (one.kind, what, where, _ago(one.since_s), server, users, one.health)


def _ago(since_s: float | None) -> str:
    if since_s is None:
        return ""
    return _span(time.time() - since_s)


def _span(seconds: float) -> str:
    size, unit = next((one for one in _UNITS if seconds >= one[0]), _UNITS[-1])
    return f"{max(seconds, 0) / size:.0f} {unit}"
