"""Addresses by who can reach them, and which server may send us to which address. Pure.

A server redirects downloads to object stores and logins to token servers. One on the internet has
no business with what only this node or its network can reach: the cloud's metadata
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
    """Return who can reach an address, which is written as `getpeername` tells it.

    Raises: ValueError where it is no address.
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
    """Return who can reach a host that is written as an address; None for a name."""
    try:
        return reach_of(host)
    except ValueError:
        return None


def may_lead(server: Reach, target: Reach) -> bool:
    """Tell whether a server may send us to `target`: to the internet always; into private networks
    where it is not on the internet itself; to a link or this machine only where it is there."""
    if target is Reach.NETWORK:
        return server is not Reach.EVERYBODY
    return target in (Reach.EVERYBODY, server)


def is_loopback(host: str) -> bool:
    """Tell whether `host`, with or without a port, is this machine: plain HTTP is safe there."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
