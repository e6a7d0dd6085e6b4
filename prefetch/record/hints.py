"""Hints that others made about what a start reads, as a trace; and the hot set as such hints.

Pure (no I/O). Alone owns the formats that are read and written (docs/format/hotset.md, "Hints"): a
plain list of files or ranges, and the records of eStargz's optimizer. A list comes from anywhere,
so it is bounded in every respect; a path is looked up in the image only, symbolic links included.
"""

import stat
from collections.abc import Iterable, Iterator

from msgspec import Struct

from bootseer.base.documents import DocumentFormat, PathBytes
from bootseer.blob.parts import FileParts
from bootseer.blob.tree import Tree
from bootseer.errors import InvalidInputError
from bootseer.prefetch.record.file_rows import TracedFile
from bootseer.prefetch.record.hotset import HotSet
from bootseer.prefetch.record.touches import PAGE_BYTES, TOUCH_COUNT_MAX
from bootseer.prefetch.record.trace import ACCESS_COUNT_MAX, Access, Trace

HINTS_BYTES_MAX = 64 * 2**20
"""The most bytes of a list: more than a million long paths."""

ENDED = "hints"
"""What such a trace has in place of what ended its record."""

_OFFSET_MAX = 2**61
_PATH_BYTES_MAX = 4096
_SYMLINKS_MAX = 40
"""The most symbolic links on the way of one path, as Linux has it."""
_STEPS_MAX = 4096
"""Parts of a path, those of links on its way included."""


class Hint(Struct, frozen=True):
    """A file that a start reads, or a range of it."""

    path: bytes
    offset: int = 0
    length: int | None = None
    """None: to the file's end."""


class Hinted(Struct, frozen=True):
    """What of a list an image has."""

    trace: Trace
    content_bytes: int
    unknown_count: int
    """Hints whose path is no file of the image."""


class _Entry(Struct, frozen=True):
    path: PathBytes


_ENTRY: DocumentFormat[_Entry] = DocumentFormat(
    type=_Entry, what="a record of a file", size_max=HINTS_BYTES_MAX, is_foreign=True
)


def parse(data: bytes) -> list[Hint]:
    """The hints of a list, in order: of a plain one, or of eStargz records (JSON lines).

    A line of a plain list is a path, or a path, an offset and a length, with tabs (or spaces)
    between; empty lines and lines that begin with "#" are skipped.
    Raises: InvalidInputError, naming the line.
    """
    if len(data) > HINTS_BYTES_MAX:
        raise InvalidInputError(
            f"the list is larger than {HINTS_BYTES_MAX // 2**20} MiB; name less"
        )
    if data.count(b"\n") > 2 * ACCESS_COUNT_MAX:
        raise InvalidInputError(f"the list has more than {ACCESS_COUNT_MAX} lines; name less")
    lines = data.split(b"\n")
    is_json = next((line for line in lines if line.strip()), b"").lstrip().startswith(b'{"')
    read = _record if is_json else _plain
    hints: list[Hint] = []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\r")
        if not line.strip() or (line.startswith(b"#") and not is_json):
            continue
        if len(hints) == ACCESS_COUNT_MAX:
            raise InvalidInputError(f"the list has more than {ACCESS_COUNT_MAX} lines; name less")
        try:
            hints.append(read(line))
        except ValueError as error:
            raise InvalidInputError(f"line {number} of the list is no hint: {error}") from error
    return hints


def _plain(line: bytes) -> Hint:
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


def _record(line: bytes) -> Hint:
    """An entry as stargz-snapshotter's recorder writes it; `manifestDigest` and `layerIndex` say in
    which layer the file was found, which the merged tree says as well."""
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
) -> Hinted:
    """The hints as a trace of a start that read just that, in that order.

    Raises: InvalidInputError where it is more than any start should read; CorruptError.
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
    return Hinted(trace, content_bytes, unknown_count)


def find_file(tree: Tree, path: bytes) -> int | None:
    """The regular file at `path`, where the image's root is `/`; follows symbolic links."""
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


def plain_lines(hot: HotSet) -> Iterator[bytes]:
    """The hot set as a plain list, which `parse` reads. Paths that no line can hold are left out:
    those with a tab or a line feed in them."""
    for hot_range in hot.ranges:
        if not any(byte in hot_range.path for byte in (b"\t", b"\n")):
            yield b"/%s\t%d\t%d\n" % (hot_range.path, hot_range.offset, hot_range.length)
