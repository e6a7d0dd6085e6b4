"""Hints: lists of files that a start reads, made by other tools, and their import as a trace.

Formats (docs/format/hotset.md, "Hints"): a plain list of files or ranges, and the records of
eStargz's optimizer. Lists are untrusted: every count and length is bounded, and paths are looked up
in the image's tree only, symbolic links included. Pure (no I/O).
"""

import stat
from collections.abc import Iterable, Iterator

from msgspec import Struct

from bootseer.base.documents import DocumentFormat, PathBytes
from bootseer.blob.tree import FileParts, Tree
from bootseer.errors import InvalidInputError
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.hotset import PAGE_BYTES, TOUCH_COUNT_MAX
from bootseer.prefetch.record.trace import ACCESS_COUNT_MAX, Access, Trace

HINTS_BYTES_MAX = 64 * 2**20
"""The most bytes of a list: more than a million long paths."""

ENDED = "hints"
"""Value of `Trace.ended` in a trace made of hints."""

_OFFSET_MAX = 2**61
_PATH_BYTES_MAX = 4096
_SYMLINKS_MAX = 40
"""Symbolic links that one path may follow, as on Linux."""
_STEPS_MAX = 4096
"""Components that one path may have, including the components of links that it follows."""


class Hint(Struct, frozen=True):
    """File that a start reads, or a range of the file."""

    path: bytes
    offset: int = 0
    length: int | None = None
    """None: up to the end of the file."""


class HintedTrace(Struct, frozen=True):
    """Trace made of hints, with counts."""

    trace: Trace
    content_bytes: int
    unknown_count: int
    """Hints whose path is not a file of the image."""


class _Entry(Struct, frozen=True):
    path: PathBytes


_ENTRY: DocumentFormat[_Entry] = DocumentFormat(
    type=_Entry, what="a record of a file", size_max=HINTS_BYTES_MAX, is_foreign=True
)


def parse(data: bytes) -> list[Hint]:
    """Parse a plain list or eStargz records (JSON lines) into hints, in order.

    A line of a plain list is a path, or a path, an offset and a length, separated by tabs or
    spaces. Empty lines and lines that begin with "#" are skipped.
    Raises: InvalidInputError, with the number of the line.
    """
    if len(data) > HINTS_BYTES_MAX:
        raise InvalidInputError(
            f"the list is larger than {HINTS_BYTES_MAX // 2**20} MiB; name less"
        )
    if data.count(b"\n") > 2 * ACCESS_COUNT_MAX:
        raise InvalidInputError(f"the list has more than {ACCESS_COUNT_MAX} lines; name less")
    lines = data.split(b"\n")
    is_json = next((line for line in lines if line.strip()), b"").lstrip().startswith(b'{"')
    parse_line = _parse_estargz if is_json else _parse_plain
    hints: list[Hint] = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\r")
        if not line.strip() or (line.startswith(b"#") and not is_json):
            continue
        if len(hints) == ACCESS_COUNT_MAX:
            raise InvalidInputError(f"the list has more than {ACCESS_COUNT_MAX} lines; name less")
        try:
            hints.append(parse_line(line))
        except ValueError as error:
            raise InvalidInputError(f"line {number} of the list is no hint: {error}") from error
    return hints


def _parse_plain(line: bytes) -> Hint:
    if b"\t" in line:
        fields = line.split(b"\t")
        if len(fields) != 3:
            raise ValueError("write a path, or a path, an offset and a length")
        return Hint(fields[0], _number(fields[1]), _number(fields[2]))
    fields = line.rsplit(None, 2)
    if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
        return Hint(fields[0], _number(fields[1]), _number(fields[2]))
    return Hint(line)


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19 or int(text) > _OFFSET_MAX:
        raise ValueError("an offset or a length is no number, or is larger than any file")
    return int(text)


def _parse_estargz(line: bytes) -> Hint:
    # `manifestDigest` and `layerIndex` name the file's layer; the merged tree has that already.
    path = _ENTRY.decode(line, "the entry").path
    if not path:
        raise ValueError("it has no path")
    return Hint(path)


def trace_of(
    hints: Iterable[Hint],
    tree: Tree,
    *,
    index_digest: str,
    workload: str,
    node: str,
    started_ns: int,
) -> HintedTrace:
    """Return the trace of a start that reads exactly the hinted ranges in order.

    Raises: InvalidInputError if they are more than a start should read; CorruptError.
    """
    numbers: dict[int, int] = {}
    files: list[TracedFile] = []
    accesses: dict[tuple[int, int, int], None] = {}
    parts = FileParts(lambda inode: tree.inode(inode).extents)
    content_bytes = unknown_count = 0
    for hint in hints:
        inode = find_file(tree, hint.path)
        if inode is None:
            unknown_count += 1
            continue
        end = _OFFSET_MAX if hint.length is None else hint.offset + hint.length
        for part in parts.within(inode, hint.offset, end):
            number = numbers.setdefault(inode, len(files))
            if number == len(files):
                files.append(TracedFile(tree.path(inode), tree.inode(inode).digest or b""))
            key = number, part.file_offset, part.length
            if key not in accesses:
                accesses[key] = None
                content_bytes += part.length
        if content_bytes > TOUCH_COUNT_MAX * PAGE_BYTES or len(accesses) > ACCESS_COUNT_MAX:
            raise InvalidInputError(
                f"the list names more than {TOUCH_COUNT_MAX * PAGE_BYTES // 2**30} GiB or "
                f"{ACCESS_COUNT_MAX} ranges of the image; name only what a start reads"
            )
    ordered = tuple(Access(*key, position) for position, key in enumerate(accesses))
    trace = Trace(index_digest, workload, node, started_ns, ENDED, 0, tuple(files), ordered)
    return HintedTrace(trace, content_bytes, unknown_count)


def find_file(tree: Tree, path: bytes) -> int | None:
    """Return the inode of the regular file at `path`, or None; follow symbolic links."""
    if len(path) > _PATH_BYTES_MAX:
        return None
    rest = path.split(b"/")[::-1]
    trail = [0]
    links = steps = 0
    while rest:
        part = rest.pop()
        steps += 1
        if steps > _STEPS_MAX:
            return None
        if part in (b"", b"."):
            continue
        if part == b"..":
            trail = trail[:-1] or [0]
            continue
        number = tree.lookup(trail[-1], part)
        if number is None:
            return None
        if not stat.S_ISLNK(tree.mode(number)):
            trail.append(number)
            continue
        links += 1
        if links > _SYMLINKS_MAX:
            return None
        target = tree.link_target(number)
        if target.startswith(b"/"):
            trail = [0]
        rest += target.split(b"/")[::-1]
    return trail[-1] if stat.S_ISREG(tree.mode(trail[-1])) else None


def plain_lines(ranges: Iterable[tuple[bytes, int, int]]) -> Iterator[bytes]:
    """Yield ranges (path, offset, length) as lines that `parse` reads.

    Paths with tabs or line feeds are left out.
    """
    for path, offset, length in ranges:
        if not any(byte in path for byte in (b"\t", b"\n")):
            yield b"/%s\t%d\t%d\n" % (path, offset, length)
