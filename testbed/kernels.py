"""The FUSE features of an older Linux release, on the running kernel.

The kernel offers its features in its first message (FUSE_INIT). `offer_as` leaves out the features
that the older release lacks, so that the code for older kernels runs on a new one. Faults of the
older kernel are not imitated.
"""

from msgspec.structs import replace

from bootseer.fuse.kernel import server
from bootseer.fuse.kernel.connection import InitRequest, decode_init

# FUSE's minor version and the flags that a release may offer: fuse_send_init() in fs/fuse/inode.c.
_OFFERS = {
    "5.4": (31, 0x03FFFFFB),
    # Before passthrough, resending and id-mapped mounts.
    "6.8": (39, (1 << 37) - 1),
    # Before the kernel gives up requests that are not answered.
    "6.13": (41, (1 << 42) - 1),
}
RELEASES = tuple(_OFFERS)


def offer_as(release: str) -> None:
    """Limit mounts that this process makes from now on to the features of a release of RELEASES."""
    minor, mask = _OFFERS[release]

    def decode(request: bytes | memoryview) -> InitRequest:
        offer = decode_init(request)
        return replace(offer, minor=min(offer.minor, minor), flags=offer.flags & mask)

    server.decode_init = decode  # type: ignore[attr-defined]


def offer_all() -> None:
    """Give mounts that this process makes from now on all features of the running kernel again."""
    server.decode_init = decode_init  # type: ignore[attr-defined]
