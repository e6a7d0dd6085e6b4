"""Names and ages in messages and tables, and the word that a misspelt one was meant to be.
Pure (no I/O).
"""

from collections.abc import Iterable

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


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of `words` that is most like `word`; empty where none is."""
    # Here: hardly any command needs it.
    import difflib

    return next(iter(difflib.get_close_matches(word, sorted(words), n=1)), "")


def shown_age(age_ns: int) -> str:
    """A duration for people, in its largest unit: "3 d". What lies in the future is "0 s"."""
    age_s = max(0, age_ns) // 10**9
    for unit, length_s in (("d", 86_400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s // length_s} {unit}"
    return f"{age_s} s"
