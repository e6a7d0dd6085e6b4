"""The checksums that a layout has of its units. Pure (no I/O, no state)."""

import xxhash

from bootseer.store.backend import Piece


def block_checksums(pieces: list[Piece], block: int, block_bytes: int) -> list[tuple[int, int]]:
    """The number and checksum of each block, from number `block` on."""
    found = []
    room = block_bytes
    digest = xxhash.xxh3_64()
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest) >= room:
            digest.update(rest[:room])
            found.append((block, digest.intdigest()))
            digest.reset()
            rest = rest[room:]
            block, room = block + 1, block_bytes
        digest.update(rest)
        room -= len(rest)
    if room < block_bytes:
        found.append((block, digest.intdigest()))
    return found
