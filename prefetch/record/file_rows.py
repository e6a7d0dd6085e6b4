"""The form that traces and hot sets have in common: a header, files, and rows of numbers.

Alone owns how such a document is written and read: lines of JSON in one zstd frame, within limits
that hold before an object is made of a line. Pure (no I/O).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import zstandard
from msgspec import Struct

from bootseer.base.checked_json import count_in, parse
from bootseer.blob.index.zstd_frame import expand
from bootseer.errors import CorruptError, UnknownFormatError

_DECODED_BYTES_MAX = 256 * 2**20
"""A million rows take about 30 MB."""
_LINE_BYTES_MAX = 2**23
"""A path of a megabyte, each byte of it escaped."""
_FILE_BYTES_MAX = 2**62
"""More than any file system holds, and in whole pages still a signed number of 64 bits."""

Row = tuple[int, int, int, int]
"""The number of a file, an offset and a length in it, and one more number."""

# A row of another shape is refused where it is, before an object is made of it.
_ROWS = msgspec.json.Decoder(tuple[int, int, int, int])


class TracedFile(Struct, frozen=True):
    """A file by path and content, so that what is said of it outlives the image it was in."""

    path: bytes
    digest: bytes


class RowFormat(Struct, frozen=True):
    """One format of this form."""

    name: str
    """`format` of the header."""
    version: int
    what: str
    """For messages."""
    row_count: str
    """The header's entry for the number of rows."""
    row_count_max: int
    texts: tuple[str, ...]
    """Entries of the header that are strings."""

    def encode(
        self, header: Mapping[str, Any], files: Sequence[TracedFile], rows: Sequence[Row]
    ) -> bytes:
        """The document. Deterministic."""
        counts = {"file_count": len(files), self.row_count: len(rows)}
        lines = [json.dumps({"format": self.name, "version": self.version, **header, **counts})]
        # JSON has no bytes: a path that is not UTF-8 travels as lone surrogates, escaped.
        lines += [
            json.dumps([file.path.decode("utf-8", "surrogateescape"), file.digest.hex()])
            for file in files
        ]
        lines += ["[%d,%d,%d,%d]" % row for row in rows]  # noqa: UP031
        text = "\n".join(lines) + "\n"
        return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(text.encode("ascii"))

    def decode(self, data: bytes) -> tuple[dict[str, Any], tuple[TracedFile, ...], Iterable[Row]]:
        """Header, files and rows. Raises: CorruptError; UnknownFormatError for another kind or
        version."""
        what = f"a {self.what}"
        head, _, rest = expand(data, what, _DECODED_BYTES_MAX).partition(b"\n")
        header = parse(head, _LINE_BYTES_MAX, what)
        if not isinstance(header, dict) or header.get("format") != self.name:
            raise UnknownFormatError(f"this is no {self.what} of Bootseer")
        if header.get("version") != self.version:
            raise UnknownFormatError(
                f"the {self.what} has version {str(header.get('version'))[:20]}; "
                f"this release reads {self.version}"
            )
        try:
            return header, *self._lines(header, rest)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, CorruptError):
                raise
            raise CorruptError(f"{what} makes no sense: {error}") from error

    def _lines(
        self, header: dict[str, Any], text: bytes
    ) -> tuple[tuple[TracedFile, ...], list[Row]]:
        for key in self.texts:
            if not isinstance(header.get(key), str):
                raise TypeError(f"{key} is no string")
        file_count = count_in(header, "file_count", f"a {self.what}", self.row_count_max)
        row_count = count_in(header, self.row_count, f"a {self.what}", self.row_count_max)
        *lines, rest = text.split(b"\n", file_count)
        # Counted before an object is made for each: a line may hold several.
        if len(lines) != file_count or {rest.count(b"\n"), rest.count(b"[")} != {row_count}:
            raise ValueError("its line count is wrong")
        files = []
        for line in lines:
            path, digest_hex = parse(line, _LINE_BYTES_MAX, f"a file of a {self.what}")
            digest = bytes.fromhex(digest_hex)
            if len(digest) not in (0, 32):
                raise ValueError("a digest has a wrong length")
            files.append(TracedFile(path.encode("utf-8", "surrogateescape"), digest))
        if len(set(files)) != file_count:
            raise ValueError("it names a file twice")
        rows = _ROWS.decode_lines(rest)
        for file, offset, length, last in rows:
            if not 0 <= file < file_count or length <= 0:
                raise ValueError("a range is of no file or of no length")
            if offset < 0 or offset + length > _FILE_BYTES_MAX or not 0 <= last < 2**63:
                raise ValueError("a range reaches beyond what any file can have")
        return tuple(files), rows
