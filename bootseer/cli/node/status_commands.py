"""`bootseer status`: all that is mounted, or runs in the background, on this node."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bootseer.base.documents import to_builtins
from bootseer.cli.output import current_settings, emit_json, emit_table, json_option, printable

if TYPE_CHECKING:
    from bootseer.served.status import Entry

_COLUMNS = ("kind", "what", "where", "since", "server", "users", "health")
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


@click.command(epilog="Example: bootseer status --json")
@json_option
def status(as_json: bool) -> None:
    """Show what is mounted, or runs in the background, on this node.

    Images, environments, checkpoint folders, publishers, keepers and warming: what and where it is,
    since when, which processes serve and use it, what is wrong with it and what to do. What other
    users have mounted is named. `image status` and `mount --status` have the figures of one kind.
    """
    entries = node_entries(current_settings().run_dir)
    if as_json:
        emit_json({"served": [to_builtins(one) for one in entries]})
        return
    emit_entries(entries)


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
