"""Addresses and names of nodes that no scheduler lists: each node notes its own in the store.

A volume of a pod is mounted before the pod has an address, and nobody tells a node on which nodes
the other pods of the job run. So the nodes of such a start are numbers, which the names of pods
tell, and a node looks up an address when it first connects to that node: the addresses of its two
parents, and of a few other nodes if a parent is lost. Any thread.
"""

import ipaddress
import time

from bootseer.errors import BootseerError
from bootseer.settings.values import is_name
from bootseer.store import Store

_NOTE_BYTES_MAX = 256
_ABSENT_S = 0.5
"""Pause before an address that a node has not noted yet is looked up again."""


class NotedAddresses:
    """Addresses and names of the nodes of one start in the store."""

    def __init__(self, store: Store, start: tuple[str, str, str], port: int) -> None:
        """`start`: job, submission and attempt. `port`: port of all nodes."""
        self._store, self._port = store, port
        self._prefix = "leases/nodes/" + "/".join(start)
        self._known: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._absent_until_s: dict[int, float] = {}

    def note(self, node: int, address: str, name: str) -> None:
        """Write the address and name of a node, in place of earlier ones. Raises: BootseerError."""
        self._names[node] = name
        data = f"{address} {name}".encode("ascii")
        self._store.publish(f"{self._prefix}/{node}", data, replace=True)

    def find(self, node: int) -> tuple[str, int]:
        """Return the address and port of a node.

        Raises: ConnectionRefusedError if the node has noted no address, as if it were not up yet.
        """
        address = self._known.get(node) or self._read(node)
        if not address:
            raise ConnectionRefusedError(f"node {node} has not begun")
        self._known[node] = address
        return address, self._port

    def name(self, node: int) -> str:
        """Return the name of a node that was noted or found here; of another one, its number."""
        return self._names.get(node, str(node))

    def forget(self, node: int) -> None:
        """Look up the address of a node again: no process proved there to be that node."""
        self._known.pop(node, None)

    def _read(self, node: int) -> str:
        if time.monotonic() < self._absent_until_s.get(node, 0.0):
            return ""
        try:
            data = self._store.read(f"{self._prefix}/{node}", 0, _NOTE_BYTES_MAX)
            # Not a host name: a writer of the store could make this node resolve any name.
            address, _, name = data.decode("ascii").partition(" ")
            found = str(ipaddress.ip_address(address))
            if not is_name(name):
                raise ValueError(name)
            self._names[node] = name
            return found
        except (BootseerError, ValueError):
            self._absent_until_s[node] = time.monotonic() + _ABSENT_S
            return ""
