"""Names that are bytes, as people read them: in messages and tables. Pure (no I/O)."""

_LENGTH_MAX = 200
"""The longest name in a message; a path may have a megabyte."""


def shown(path: bytes) -> str:
    """A path as text; bytes that are no UTF-8 are escaped."""
    return path.decode("utf-8", "backslashreplace")


def quoted(name: bytes) -> str:
    """A name within a message: in quotes, on one line, and no longer than a message may be."""
    text = shown(name[:_LENGTH_MAX])
    plain = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
    return f"'{plain}{'...' if len(name) > _LENGTH_MAX else ''}'"
