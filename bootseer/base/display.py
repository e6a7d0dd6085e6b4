"""Text of paths, names and ages for messages, and suggestions for misspelt words. Pure."""

from collections.abc import Iterable

_LENGTH_MAX = 200
"""Longest name in a message, in bytes; a path may have a megabyte."""


def display_path(path: bytes) -> str:
    """Return a path as text; bytes that are not UTF-8 are escaped."""
    return path.decode("utf-8", "backslashreplace")


def quoted(name: bytes) -> str:
    """Return a name for a message: in quotes, on one line, cut to a length that fits."""
    text = display_path(name[:_LENGTH_MAX])
    plain = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
    return f"'{plain}{'...' if len(name) > _LENGTH_MAX else ''}'"


def closest_word(word: str, words: Iterable[str]) -> str:
    """Return the one of `words` that is most similar to `word`; empty if none is similar."""
    # Imported here, since few commands need it.
    import difflib

    return next(iter(difflib.get_close_matches(word, sorted(words), n=1)), "")


def format_age(age_ns: int) -> str:
    """Return an age in its largest unit, such as "3 d"; "0 s" for a negative age."""
    age_s = max(0, age_ns) // 10**9
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s // length_s} {unit}"
    return f"{age_s} s"
