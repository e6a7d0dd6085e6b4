"""Where a registry may send us: judged by the addresses that connections really have. Pure.

Registries redirect downloads to object stores, and logins to token servers. A registry on the
internet has no business with what only this node or its network can reach: the cloud's metadata
(169.254.169.254), services on this machine, the intranet.
"""

import ipaddress
from enum import IntEnum

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_IPv4_BITS = 0xFFFFFFFF


class Reach(IntEnum):
    """Who can reach an address."""

    EVERYBODY = 0
    NETWORK = 1
    """Private, shared and reserved networks."""
    LINK = 2
    MACHINE = 3


def reach_of(address: str) -> Reach:
    """Of an address, as `getpeername` tells it. Raises: ValueError where it is none."""
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


def may_lead(registry: Reach, target: Reach) -> bool:
    """Whether a registry may send us to `target`: to the internet always; into private networks
    where it is not on the internet itself; to a link or this machine only where it is there."""
    if target is Reach.NETWORK:
        return registry is not Reach.EVERYBODY
    return target in (Reach.EVERYBODY, registry)
