"""Names of timelines in a store, and objects that hold the timelines of several nodes.

docs/format/timeline.md has the format. Pure, of the standard library alone.
"""

import io
import re
import tarfile
from collections.abc import Iterator, Mapping

FOLDER = "starts/"
SUFFIX = ".jsonl.zst"
GATHERED_SUFFIX = ".tar"
OBJECT_BYTES_MAX = 16 * 1024 * 1024
"""Largest object: a timeline is compressed to about a tenth."""
MEMBERS_MAX = 1024
"""Most timelines of an object that are read; nodes write 256."""

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RANK = r"[0-9]{1,9}(?:\.[0-9a-z]{1,16})?"
_CREATION = r"[0-9]{8}T[0-9]{6}Z-[0-9]{1,10}"
_START = re.compile(rf"({_WORD}|)-([0-9]{{1,9}})")
_NAME = re.compile(rf"{_CREATION}-{_WORD}-{_RANK}")
_GATHERED = re.compile(rf"{_CREATION}-{_WORD}")


def key_of(job: str, submission: str, attempt: int, name: str) -> str:
    """Return the key of a node's timeline; `name` is that of its first file, without suffix."""
    return f"{FOLDER}{job}/{submission}-{attempt}/{name}{SUFFIX}"


def gathered_key_of(job: str, submission: str, attempt: int, name: str) -> str:
    """Return the key of an object that a node gathers; `name` is `TIME-PID-NODE` of its process."""
    return f"{FOLDER}{job}/{submission}-{attempt}/{name}{GATHERED_SUFFIX}"


def start_of(key: str) -> tuple[str, str] | None:
    """Return the job and start of an object's key, or None if the key is not a timeline's."""
    parts = key.split("/")
    return (parts[1], parts[2]) if len(parts) == 4 and key.startswith(FOLDER) else None


def is_start(word: str) -> bool:
    """Return whether `word` is the folder of a start, SUBMISSION-ATTEMPT."""
    return bool(_START.fullmatch(word))


def timeline_name(file: str) -> str | None:
    """Return the name TIME-PID-NODE-RANK of a timeline's object; None for any other object."""
    name = file.removesuffix(SUFFIX)
    return name if name != file and _NAME.fullmatch(name) else None


def gathered_name(file: str) -> str | None:
    """Return the name TIME-PID-NODE of an object of several timelines; None for any other."""
    name = file.removesuffix(GATHERED_SUFFIX)
    return name if name != file and _GATHERED.fullmatch(name) else None


def encode_gathered(timelines: Mapping[str, bytes]) -> bytes:
    """Return the object that holds these timelines: the content of their objects, by name."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(timelines.items()):
            member = tarfile.TarInfo(name + SUFFIX)
            member.size, member.mode = len(content), 0o600
            archive.addfile(member, io.BytesIO(content))
    return target.getvalue()


def decode_gathered(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and content of each timeline in an object; other members are skipped.

    Raises: ValueError if `data` is no archive, or is cut off.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for number, member in enumerate(archive):
                if number == MEMBERS_MAX:
                    return
                name, first = timeline_name(member.name), member.offset_data
                if name is None or not member.isreg() or member.issparse():
                    continue
                if not 0 <= member.size <= len(data) - first:
                    raise ValueError("it is cut off")
                yield name, data[first : first + member.size]
    except (tarfile.TarError, OverflowError, EOFError, RecursionError) as error:
        raise ValueError(str(error)) from error
