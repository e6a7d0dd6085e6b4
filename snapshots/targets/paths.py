"""Paths of targets and of names in them: bytes, their text in JSON, checks. Pure (no I/O)."""

from collections.abc import Sequence

from bootseer.errors import CorruptError, InvalidInputError


def text_of(path: bytes) -> str:
    """A path in JSON: bytes that are not UTF-8 become surrogates and come back unchanged."""
    return path.decode("utf-8", "surrogateescape")


def is_plain(components: Sequence[bytes]) -> bool:
    """Whether path components lead only downwards."""
    return all(
        component and component not in (b".", b"..") and b"\0" not in component
        for component in components
    )


def checked_target(path: bytes) -> bytes:
    """`path`, if it can be a target. Raises: CorruptError."""
    if not path.startswith(b"/") or not is_plain(path[1:].split(b"/")):
        raise CorruptError(f"{text_of(path)[:200]!r} is not an absolute, plain target path")
    return path


def target_path(text: str, directory: str) -> bytes:
    """A target that a user wrote, as an absolute plain path; relative ones from `directory`.

    ".." is taken away by name, as shells' `cd` does. Raises: InvalidInputError.
    """
    import posixpath

    if not text:
        raise InvalidInputError("a target is empty; name a directory, '.' for this one")
    path = posixpath.normpath(posixpath.join(directory, text)).encode("utf-8", "surrogateescape")
    # POSIX lets a path begin with exactly two slashes and normpath keeps them.
    path = b"/" + path.lstrip(b"/")
    if path == b"/":
        raise InvalidInputError("the whole root cannot be a target; name directories inside it")
    try:
        return checked_target(path)
    except CorruptError as error:
        raise InvalidInputError(str(error)) from None
