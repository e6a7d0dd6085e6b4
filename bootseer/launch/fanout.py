"""Fan-out of a start: who takes part, and the secret that they share.

Alone reads what tells it: variables, files, the host's names, the store. What tells nothing leaves
the start without fan-out in silence; what cannot be right, with one warning. Main thread, before
anything has begun.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from bootseer.errors import BootseerError, from_oserror
from bootseer.fanout import keys
from bootseer.fanout.hostlist import TEXT_BYTES_MAX
from bootseer.fanout.membership import AUTO, Membership, Told, find_members, port_of, topology_files
from bootseer.settings.config import FANOUT_KEY, Settings
from bootseer.store.objects.store import Store

Say = Callable[[str], None]
"""Gets one sentence for people at a time."""


class Group(Struct, frozen=True):
    """The nodes that feed each other in a start, as one of them knows them."""

    membership: Membership
    start: tuple[str, str, str]
    """Job, submission and attempt."""
    secret: bytes = b""
    """Empty: it is in the store."""

    def key(self, secret: bytes) -> bytes:
        """Return the key of the start."""
        return keys.key_of(secret, self.membership.digest, *self.start)


def find_group(settings: Settings, command: Sequence[str], secret: str, say: Say) -> Group | None:
    """Return who feeds each other in this start; None where it goes without. `secret`: of the
    variable FANOUT_KEY; empty without. Never raises."""
    if not settings.fanout:
        return None
    start = (settings.job, settings.submission, str(settings.attempt))
    try:
        membership = find_members(_told(settings, command, start))
        if not membership.members:
            return None
        return Group(membership, start, _secret(settings, secret))
    except (BootseerError, OSError) as error:
        say(f"warning: this node reads all of the store by itself, without fan-out: {error}")
        return None


def shared_secret(store: Store, start: tuple[str, str, str]) -> bytes:
    """Return the secret that the first node of a start has put into the store.

    Whoever may read the store may read it. Raises: BootseerError.
    """
    key = "leases/fanout/" + "/".join(start)
    for _ in range(2):
        with contextlib.suppress(FileNotFoundError):
            return keys.parse_secret(store.read(key), f"{store.url}/{key}")
        store.publish(key, keys.new_secret())
    return keys.parse_secret(store.read(key), f"{store.url}/{key}")


def _told(settings: Settings, command: Sequence[str], start: tuple[str, str, str]) -> Told:
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
    return Told(
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
    """Return the host's name, and those beside it in /etc/hosts, where a kubelet puts the full name
    of a pod. No server is asked: it might not answer."""
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
