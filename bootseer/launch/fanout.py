"""Fan-out of a start: which nodes take part, their shared secret, and this node's fan-out process.

Only this module reads the sources that list the nodes: variables, files, the host's names. Without
any source the start goes on without fan-out and without a message; with a wrong source it warns
once. Main thread, before anything else has begun.
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from bootseer.errors import BootseerError, from_oserror
from bootseer.fanout import keys
from bootseer.fanout.host import HostPlan
from bootseer.fanout.hostlist import TEXT_BYTES_MAX
from bootseer.fanout.membership import AUTO, StartFacts, find_members, port_of, topology_files
from bootseer.launch.job import Say
from bootseer.linux.processes import ProcessId
from bootseer.served.processes import FANOUT, start
from bootseer.served.ready_socket import add_ready_names, new_ready_name
from bootseer.settings.config import FANOUT_KEY, Settings, is_default_store

_LISTEN_WAIT_S = 5.0
"""Limit for the fan-out process to listen. It takes milliseconds; a node too busy goes without."""


def begin_fanout(settings: Settings, command: Sequence[str], secret: str, say: Say) -> bool:
    """Begin this node's fan-out process if the start's nodes are known. Return whether it runs.

    `secret` is the value of the variable FANOUT_KEY. Never raises: a failure is one warning.
    """
    try:
        plan = find_plan(settings, command, secret)
        if plan is not None:
            _begin(plan)
        return plan is not None
    except (BootseerError, OSError) as error:
        say(f"warning: this node reads all of the store by itself, without fan-out: {error}")
        return False


def find_plan(settings: Settings, command: Sequence[str], secret: str) -> HostPlan | None:
    """Return the plan for the fan-out process; None: no fan-out. Raises: BootseerError."""
    if is_default_store(settings):
        return None
    start = (settings.job, settings.submission, str(settings.attempt))
    membership = find_members(_start_facts(settings, command, start))
    if not membership.members:
        return None
    return HostPlan(
        settings=settings,
        membership=membership,
        start=start,
        secret=_secret(settings, secret).hex(),
        user=ProcessId.of(os.getpid()),
        ready_name=new_ready_name(),
    )


def _begin(plan: HostPlan) -> None:
    with start(FANOUT, plan.settings.run_dir, copy=True) as process:
        process.tell(plan)
        # Wait until it listens, so that whoever then asks it for an object finds it.
        process.wait(_LISTEN_WAIT_S)
    add_ready_names(os.environ, plan.ready_name)


def _start_facts(
    settings: Settings, command: Sequence[str], start: tuple[str, str, str]
) -> StartFacts:
    hosts, hosts_text = settings.fanout_hosts, ""
    if hosts.startswith("/"):
        try:
            hosts_text = _text(Path(hosts))
        except OSError as error:
            raise from_oserror(error, f"read the file {hosts} (fanout_hosts)") from error
    topology_text = ""
    if hosts == AUTO:
        for path in topology_files(os.environ):
            with contextlib.suppress(OSError):
                topology_text = _text(path)
                break
    return StartFacts(
        environ=os.environ,
        names=_names(),
        node=settings.node,
        port=settings.fanout_port or port_of(*start),
        hosts=hosts,
        hosts_text=hosts_text,
        topology_text=topology_text,
        command=tuple(command),
    )


def _secret(settings: Settings, variable: str) -> bytes:
    if settings.fanout_key_file is not None:
        return keys.read_key_file(settings.fanout_key_file)
    return keys.parse_secret(os.fsencode(variable), FANOUT_KEY) if variable else b""


def _names() -> tuple[str, ...]:
    """Return the host's name and its other names in /etc/hosts, where kubelets put the full name.

    No DNS server is asked, since it might not answer.
    """
    own = os.uname().nodename
    with contextlib.suppress(OSError):
        for line in _text(Path("/etc/hosts")).splitlines():
            _, *names = line.partition("#")[0].split() or [""]
            if own in names:
                return (own, *names)
    return (own,)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(TEXT_BYTES_MAX + 1).decode("utf-8", "surrogateescape")
