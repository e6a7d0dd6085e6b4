"""Parts of two fingerprints that differ, in words for people. Pure (no I/O)."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from bootseer.snapshots.setup.fingerprint import SECRETS, Part
from bootseer.snapshots.targets.scan import NOTHING

_TOLD_MAX = 3


class Difference(Struct, frozen=True):
    """One part that is not as it was."""

    part: str
    stored: str | None
    """Its value in the stored snapshot; None where that has no such part."""
    now: str | None
    note: str
    """What that means, in plain words, or empty."""


def compare_parts(stored: Iterable[Part], now: Iterable[Part]) -> tuple[Difference, ...]:
    """Return the parts that differ, sorted by name. Pure.

    The part of the secrets is salted with the others, but those of what was in the targets. So it
    is among the differences only where these are equal, or one side has no such part.
    """
    before = {part.name: part.value for part in stored}
    after = {part.name: part.value for part in now}
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    if SECRETS in before.keys() & after.keys() and any(
        name != SECRETS and not name.startswith("before ") for name in names
    ):
        names = [name for name in names if name != SECRETS]
    return tuple(
        Difference(name, before.get(name), after.get(name), _note(name, before, after))
        for name in names
    )


def _note(name: str, before: dict[str, str], after: dict[str, str]) -> str:
    stored, now = before.get(name), after.get(name)
    kind, _, what = name.partition(" ")
    if kind == "target":
        return "another list of targets"
    if stored is None:
        return "decides the result now, did not then"
    if now is None:
        return "decided the result then, does not now"
    if name == "interpreter":
        return _interpreter_note(stored, now)
    if kind == "before":
        if now == NOTHING:
            return f"{what} is missing or empty now"
        return f"{what} holds something {'already' if stored == 'nothing' else 'else'}"
    return {
        "input": "its contents have changed",
        "exists": "it is there, or is of another kind",
        "wheels": "other wheels lie there",
        "env": "the variable has another value",
        SECRETS: "a declared variable or a hidden word has another value",
        "command": "the command is another one",
        "image": "the image is another one",
        "salt": "the salt is another one",
        "installation": "Python lies in another place",
        "settings": "these settings are others",
        "directory": "the working directory is another one",
    }.get(kind, "")


def _interpreter_note(stored: str, now: str) -> str:
    """ "implementation version abi": which of them differ."""
    before, after = stored.split(), now.split()
    if len(before) < 2 or len(after) < 2 or before[0] != after[0]:
        return "another interpreter"
    if before[1].split(".")[:2] == after[1].split(".")[:2]:
        if before[2:] == after[2:] and before[1] != after[1]:
            return f"only the patch version differs: {before[1]} then, {after[1]} now"
        return "another ABI"
    return f"another version of Python: {before[1]} then, {after[1]} now"


def in_words(differences: Sequence[Difference]) -> str:
    """Return the differences in one line, the first few of many."""
    told = [f"{one.part} ({one.note})" if one.note else one.part for one in differences[:_TOLD_MAX]]
    more = len(differences) - len(told)
    return "; ".join(told) + (f"; and {more} more" if more else "")
