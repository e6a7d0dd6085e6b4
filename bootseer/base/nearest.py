"""What a misspelt word may have been meant to be. Pure."""

from collections.abc import Iterable


def nearest(word: str, words: Iterable[str]) -> str:
    """The one of `words` that is most like `word`; empty where none is."""
    # Here: hardly any command needs it.
    import difflib

    return next(iter(difflib.get_close_matches(word, sorted(words), n=1)), "")
