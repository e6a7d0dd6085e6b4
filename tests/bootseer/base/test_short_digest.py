"""SHA-256 of short and of long data, against the standard library."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from bootseer.base.short_digest import Sha256, short_digest

_PIECES = st.lists(st.tuples(st.binary(max_size=3), st.integers(0, 200_000)), max_size=6)


@given(_PIECES, st.sampled_from([bytes, bytearray, memoryview]))
def test_pieces_have_the_digest_of_their_bytes(
    repeated: list[tuple[bytes, int]], kind: type[bytes | bytearray | memoryview]
) -> None:
    pieces = [pattern * count for pattern, count in repeated]
    digest = Sha256(b"begin")
    for piece in pieces:
        digest.update(kind(piece))
    whole = b"begin" + b"".join(pieces)
    assert digest.hexdigest() == hashlib.sha256(whole).hexdigest() == short_digest(whole)
