"""Codec of traces and hot sets: a header, files, and rows of numbers.

The document is lines of JSON in one zstd frame. Limits are checked before a line becomes an object.
Pure (no I/O).
"""

import json
import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec
import zstandard
from msgspec import Struct

from bootseer.base.documents import DocumentFormat, PathBytes
from bootseer.blob.frames import LINE_BYTES_MAX, expand_lines
from bootseer.errors import CorruptError

_DECODED_BYTES_MAX = 256 * 2**20
"""Size of the largest decoded document; a million rows take about 30 MB."""
HEADER_BYTES_MAX = LINE_BYTES_MAX
_FILE_BYTES_MAX = 2**62
"""More than any file system holds; rounded up to pages it is still a signed number of 64 bits."""

Row = tuple[int, int, int, int]
"""Number of a file, offset and length in it, and one more number."""


class TracedFile(Struct, frozen=True):
    """File named by path and content digest, and so independent of an image."""

    path: bytes
    digest: bytes


# A file's line; a line of any other form is refused before it becomes an object. Possessive: to go
# back in a long path, `re` would take a hundred bytes of memory for each character.
_FILE = re.compile(rb'\["(?:[^"\\]++|\\.)*+", ?"(?:[0-9a-f]{64})?"\]')


_FILES_FORM: DocumentFormat[list[tuple[PathBytes, str]]] = DocumentFormat(
    type=list[tuple[PathBytes, str]],
    size_max=_DECODED_BYTES_MAX,
    value_count_max=_DECODED_BYTES_MAX,
)


class RowsHeader(Protocol):
    """The first line of a document: the number of lines of each kind that follow."""

    @property
    def file_count(self) -> int: ...

    @property
    def row_count(self) -> int: ...


H = TypeVar("H", bound=RowsHeader)


def encode_rows(
    form: DocumentFormat[H], header: H, files: Sequence[TracedFile], rows: Sequence[Row]
) -> bytes:
    """Encode a document. Deterministic."""
    lines = [form.encode(header).decode("ascii")]
    # JSON has no bytes: a path that is not UTF-8 is written with lone surrogates, escaped.
    lines += [
        json.dumps([file.path.decode("utf-8", "surrogateescape"), file.digest.hex()])
        for file in files
    ]
    lines += ["[%d,%d,%d,%d]" % row for row in rows]  # noqa: UP031
    text = "\n".join(lines) + "\n"
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode("ascii"))


def decode_rows(
    form: DocumentFormat[H], data: bytes
) -> tuple[H, tuple[TracedFile, ...], list[Row]]:
    """Decode a document. Raises: CorruptError; UnknownFormatError for another version."""
    head, _, rest = expand_lines(data, form.what, _DECODED_BYTES_MAX).partition(b"\n")
    header = form.decode(head, "this document")
    *lines, rest = rest.split(b"\n", header.file_count)
    # Counted before any object is made; several arrays on one line would be counted as one.
    counts = {rest.count(b"\n"), rest.count(b"[")}
    if len(lines) != header.file_count or counts != {header.row_count}:
        raise CorruptError(f"{form.what} has another number of lines than it says")
    files = _files(lines, form.what)
    try:
        # A row of another shape is refused before an object is made of it. Made here, since a
        # server waits for each module that it loads, and most starts read no rows.
        rows = msgspec.json.Decoder(Row).decode_lines(rest)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{form.what} has a row that makes no sense: {error}") from error
    for file, offset, length, last in rows:
        if not 0 <= file < len(files) or length <= 0:
            raise CorruptError(f"{form.what} has a range of no file or of no length")
        if offset < 0 or offset + length > _FILE_BYTES_MAX or not 0 <= last < 2**63:
            raise CorruptError(f"{form.what} has a range beyond what any file can have")
    return header, files, rows


def _files(lines: Sequence[bytes], what: str) -> tuple[TracedFile, ...]:
    if not all(map(_FILE.fullmatch, lines)):
        raise CorruptError(f"{what} has a line that is not a path and a digest")
    found = _FILES_FORM.decode(b"[%b]" % b",".join(lines), what)
    files = tuple(TracedFile(path, bytes.fromhex(digest)) for path, digest in found)
    if len(set(files)) != len(lines):
        raise CorruptError(f"{what} names a file twice")
    return files
