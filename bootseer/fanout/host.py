"""Process that takes part in a fan-out for one start and node: `python -m bootseer.fanout.host`.

The process listens for other nodes (`exchange`) and for the processes of this node (`local`), and
reports to `bootseer run`, which waits for the report, that it listens. It ends when the start is
ready, when the job has ended, or after a quarter of an hour. Heavy modules are imported after the
report. The volumes of pods have a process of their own around it (`kubernetes.csi.fanout_host`).
"""

import contextlib
import errno
import socket
import sys
from typing import TYPE_CHECKING

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.errors import from_oserror
from bootseer.fanout.local import socket_name
from bootseer.fanout.membership import Membership
from bootseer.linux.processes import ProcessId
from bootseer.served.processes import FANOUT, Report, serve
from bootseer.settings.config import Settings

if TYPE_CHECKING:
    from bootseer.fanout.hosting import WriteStage

_BACKLOG = 256
"""Connections that wait until its code is loaded."""


class HostPlan(Struct, frozen=True, kw_only=True):
    """Plan of the fan-out's process, as `bootseer run` sends it."""

    settings: Settings
    membership: Membership
    start: tuple[str, str, str]
    """Job, submission and attempt."""
    secret: str
    """Hexadecimal digits; empty: it is in the store."""
    user: ProcessId
    """The process that starts, and becomes the job."""
    ready_name: str
    address: str = ""
    """Address of this node, which it notes in the store for the others (`addresses`); empty where
    the membership has the addresses of all."""
    window_s: float = 900.0
    """A start that has not said `ready()` by then is taken for over."""
    says_ready: bool = True
    """Whether the start says `ready()`. If not, the figures are written once all has come."""


def main() -> int:
    """Return the exit code: 0 at its end."""
    return serve(FANOUT, lambda line, report: take_part(from_line(line, HostPlan), report))


def take_part(plan: HostPlan, report: Report, write: "WriteStage | None" = None) -> None:
    """Take part as the plan says, from now until the end.

    `write` writes the stage of the timeline, by default to the one that the environment names.

    Raises: BootseerError, OSError.
    """
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            ours.bind(socket_name(plan.settings))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Another launcher of the start has begun one on this node, which serves all.
            report.ready()
            return
        peers = stack.enter_context(_listener(plan))
        ours.listen(_BACKLOG)
        report.ready()
        from bootseer.fanout import hosting

        hosting.take_part(plan, ours, peers, write or hosting.write_stage)


def _listener(plan: HostPlan) -> socket.socket:
    """Return a socket that listens at the node's port. Raises: BootseerError."""
    own = plan.membership.members[plan.membership.own]
    host = plan.address or own.host
    address = host if host.replace(".", "").isdigit() else ""
    try:
        if address or not socket.has_dualstack_ipv6():
            return socket.create_server((address, own.port), backlog=_BACKLOG)
        return socket.create_server(
            ("", own.port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
    except OSError as error:
        what = f"listen on port {own.port}, which another job of this node may use (fanout_port)"
        raise from_oserror(error, what) from error


if __name__ == "__main__":
    sys.exit(main())
