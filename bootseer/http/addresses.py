"""Classes of addresses, and the rule which redirects are allowed between them. Pure.

Servers redirect downloads to object stores and logins to token servers. A server on the internet
must not redirect to an address that only this node or its network can reach: the cloud's metadata
(169.254.169.254), services on this machine, the intranet.
"""

import ipaddress
from enum import IntEnum

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IPv4_BITS = 0xFFFFFFFF


class Reach(IntEnum):
    """Set of machines that can reach an address."""

    EVERYBODY = 0
    NETWORK = 1
    """Private, shared and reserved networks."""
    LINK = 2
    MACHINE = 3

    def __str__(self) -> str:
        return _NAMES[self]


_NAMES = {
    Reach.EVERYBODY: "the internet",
    Reach.NETWORK: "a private network",
    Reach.LINK: "this node's own network (link-local)",
    Reach.MACHINE: "this machine",
}


def reach_of(address: str) -> Reach:
    """Return the reach of an address in the form that `getpeername` returns.

    Raises: ValueError if it is not an address.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip in _NAT64:
            ip = ipaddress.IPv4Address(int(ip) & _IPv4_BITS)
        else:
            ip = ip.ipv4_mapped or ip.sixtofour or ip
    if ip.is_loopback or ip.is_unspecified:
        return Reach.MACHINE
    if ip.is_link_local or ip.is_multicast:
        return Reach.LINK
    return Reach.EVERYBODY if ip.is_global else Reach.NETWORK


def literal_reach(host: str) -> Reach | None:
    """Return the reach of a host that is given as an address; None for a name."""
    try:
        return reach_of(host)
    except ValueError:
        return None


def may_redirect(server: Reach, target: Reach) -> bool:
    """Return whether a server may redirect to an address with the reach `target`.

    Redirects to the internet are always allowed; to a private network unless the server is on the
    internet; to a link or to this machine only from there.
    """
    if target is Reach.NETWORK:
        return server is not Reach.EVERYBODY
    return target in (Reach.EVERYBODY, server)


def is_loopback(host: str) -> bool:
    """Return whether `host`, with or without a port, is this machine: plain HTTP is safe there."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
