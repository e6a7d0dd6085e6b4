"""Codec of JSON documents: from a disk, a network or another process into frozen structs, and back.

The only module that reads or writes JSON documents. Reading checks, in this order: the size and the
number of values, before any object is built (the three bytes of an empty list and a comma become 72
bytes of objects); that no member occurs twice; the checksum, the kind and the version, where the
format has them; the type and bounds of every member that the struct declares. Unknown members are
ignored, unknown versions are refused by name. Only `DocumentFormat.read` does I/O. Any thread.

The parser is `json`, not `msgspec.json`: paths that are not UTF-8 are stored as lone surrogates,
which `msgspec.json` refuses.
"""

import contextlib
import json
import os
import re
import threading
from abc import ABCMeta
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from bootseer.errors import CorruptError, UnknownFormatError

T = TypeVar("T")

_LINE_BYTES_MAX = 2**27
"""Largest message between processes: a plan that lists every blob of a large tree."""
VALUE_COUNT_MAX = 2**22
"""Largest number of values in a document. As objects they take about 0.4 GiB; the record of a
million paths has a third of them."""

_DIGEST = "sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}"
Digest = Annotated[str, Meta(pattern=rf"\A(?:{_DIGEST})\Z")]
"""Digest of a manifest or blob of an image."""
DigestOrNone = Annotated[str, Meta(pattern=rf"\A(?:|{_DIGEST})\Z")]
AnyDigest = Annotated[str, Meta(pattern=rf"\A(?:{_DIGEST}|blake3:[0-9a-f]{{64}})\Z")]
"""Digest of a manifest or blob of an image, or of a tar stream (`blake3:`)."""
Sha256 = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
BlobDigest = Annotated[str, Meta(pattern=r"\A(?:sha256|blake3|points):[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""Non-negative integer that every JSON reader represents exactly."""
Count64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Non-negative 64-bit integer, for example nanoseconds since 1970."""
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]
"""Text without NUL, so that it can be an argument or an environment variable of a process."""

# A path in the kernel's bytes. In JSON it is text; bytes that are not UTF-8 are lone surrogates.
if TYPE_CHECKING:
    PathBytes = bytes
else:
    # Fields hold plain `bytes`; the virtual base class keeps msgspec from decoding them as Base64.
    PathBytes = ABCMeta("PathBytes", (), {})
    PathBytes.register(bytes)


class ReadableStore(Protocol):
    """The part of a store that `DocumentFormat.read` needs."""

    @property
    def url(self) -> str: ...

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes: ...


class DocumentFormat(Struct, Generic[T], frozen=True, kw_only=True):
    """Format of one kind of document: its type, its limits, and the members that identify it."""

    type: Any
    """Type of the decoded document: a frozen struct, or a list of them."""
    size_max: int
    """Largest encoded size in bytes."""
    what: str = "a document that can be read"
    """Noun phrase for error messages, such as "a pointer to a bundle"."""
    kind: str = ""
    """Value of the member `kind_member` in every document; empty if the format has no such member.
    """
    kind_member: str = "kind"
    version: int = 0
    """Version that this release reads and writes; 0 if the format has none."""
    checksum_member: str = ""
    """Name of the member with the digest of all other members; empty if there is none."""
    value_count_max: int = VALUE_COUNT_MAX
    is_foreign: bool = False
    """Whether other programs write the documents: null then means absent, and of two members with
    one name the last one counts, as in Go."""
    indent: int | None = None

    def read(self, store: ReadableStore, key: str) -> T:
        """Return the document at `key`. Raises: as `decode`; NotFoundError, UnavailableError."""
        return self.decode(store.read(key, 0, self.size_max + 1), f"{store.url}/{key}")

    def decode(self, data: bytes, where: str) -> T:
        """Return the document in `data`; errors name its origin `where`.

        Raises: CorruptError, UnknownFormatError.
        """
        return self.convert(self.parse(data, where), where)

    def parse(self, data: bytes, where: str) -> Any:
        """Return the JSON values in `data`, unchecked against the struct. Raises: CorruptError."""
        return parse(data, where, self.size_max, self.is_foreign, self.value_count_max)

    def convert(self, document: Any, where: str) -> T:
        """Return parsed JSON as the document's type, after all checks.

        Raises: CorruptError, UnknownFormatError.
        """
        if self.kind or self.version:
            self._check_head(document, where)
        try:
            found: T = from_builtins(document, self.type)
        except msgspec.ValidationError as error:
            raise CorruptError(f"{where} is not {self.what}: {_problem(error)}") from None
        return found

    def _check_head(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise CorruptError(f"{where} is not {self.what}")
        # The checksum comes first: a damaged document may look like one of a later version.
        if self.checksum_member in document and not self._is_whole(document):
            raise CorruptError(
                f"{where} does not match its {self.checksum_member}: it is damaged, or was edited"
            )
        if self.kind and document.get(self.kind_member) != self.kind:
            raise CorruptError(f"{where} is not {self.what}")
        version = document.get("version")
        if self.version and (type(version) is not int or version != self.version):
            raise UnknownFormatError(
                f"{where} has version {str(version)[:20]}, this release reads {self.version}; "
                "use the Bootseer that wrote it, or a newer one"
            )

    def _is_whole(self, document: Mapping[str, Any]) -> bool:
        try:
            digest = members_digest(document, self.checksum_member)
        except RecursionError:
            return False
        return bool(document[self.checksum_member] == digest)

    def encode(self, value: T) -> bytes:
        """Return the bytes of a document; the same value gives the same bytes."""
        return self.encode_document(self.to_document(value))

    def to_document(self, value: T) -> dict[str, Any]:
        """Return the document's members: kind, version, the struct's fields, the checksum."""
        document: dict[str, Any] = {}
        if self.kind:
            document[self.kind_member] = self.kind
        if self.version:
            document["version"] = self.version
        document |= to_builtins(value)
        if self.checksum_member:
            document[self.checksum_member] = members_digest(document, self.checksum_member)
        return document

    def encode_document(self, document: Mapping[str, Any]) -> bytes:
        """Return the JSON bytes of a document that `to_document` returned."""
        text = json.dumps(document, indent=self.indent, default=_text_of_path)
        return text.encode("ascii") + (b"" if self.indent is None else b"\n")


def parse(
    data: bytes,
    where: str,
    size_max: int,
    is_foreign: bool = False,
    value_count_max: int = VALUE_COUNT_MAX,
) -> Any:
    """Return the JSON values in `data`; see `DocumentFormat` for limits. Raises: CorruptError."""
    if len(data) > size_max:
        raise CorruptError(f"{where} is larger than {size_max} bytes")
    # Commas and brackets inside strings count too; our own documents stay far below the limit.
    if sum(map(data.count, (b",", b"[", b"{"))) > value_count_max:
        raise CorruptError(f"{where} has more than {value_count_max} values")
    try:
        return json.loads(
            data,
            parse_constant=_refuse,
            object_pairs_hook=_present_members if is_foreign else _members,
        )
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, _RepeatedMemberError) else "is not valid JSON"
        raise CorruptError(f"{where} {problem}") from None


def to_builtins(value: Any) -> Any:
    """Return structs as dictionaries and lists; a `Path` becomes text, bytes stay bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=os.fspath)


_known_kinds: set[Any] = set()
_learning = threading.Lock()


def _new_lock() -> None:
    global _learning
    _learning = threading.Lock()


# Another thread may hold the lock at the moment of a fork.
os.register_at_fork(after_in_child=_new_lock)


def _learn(kind: Any) -> None:
    """Analyze a struct with msgspec under a lock: analyzing it in two threads at once crashes."""
    with _learning:
        with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
            msgspec.convert(None, kind, dec_hook=_path_of_text)
        _known_kinds.add(kind)


def from_builtins(plain: Any, kind: type[T]) -> T:
    """Return dictionaries and lists as an instance of `kind`, the inverse of `to_builtins`.

    Raises: msgspec.ValidationError.
    """
    if kind not in _known_kinds:
        _learn(kind)
    try:
        return msgspec.convert(plain, kind, dec_hook=_path_of_text)
    except UnicodeEncodeError:
        # msgspec tries to read a number from the text and cannot encode its lone surrogates.
        raise msgspec.ValidationError("text in the place of something else") from None


def to_line(value: Any) -> str:
    """Return a struct as one line of JSON, a message to another process of Bootseer."""
    return json.dumps(to_builtins(value), default=_text_of_path)


def from_line(line: str | bytes, kind: type[T]) -> T:
    """Return the struct in a line that `to_line` wrote. Raises: CorruptError."""
    data = line.encode("utf-8") if isinstance(line, str) else line
    form: DocumentFormat[T] = DocumentFormat(type=kind, size_max=_LINE_BYTES_MAX)
    return form.decode(data, "a message of another process")


def is_digest(text: str) -> bool:
    """Return whether `text` is the digest of a manifest or blob of an image."""
    return bool(re.fullmatch(_DIGEST, text))


def members_digest(document: Mapping[str, Any], without: str) -> str:
    """Return the `sha256:<hex>` of a document's members except the member `without`.

    The hashed form is JSON without blanks, its members sorted by name. Members that this release
    does not know are included.
    """
    members = {key: value for key, value in document.items() if key != without}
    data = json.dumps(members, sort_keys=True, separators=(",", ":"), default=_text_of_path)
    import hashlib  # here: it loads OpenSSL, which most starts do not need

    return "sha256:" + hashlib.sha256(data.encode("ascii")).hexdigest()


class _RepeatedMemberError(ValueError):
    """An object has two members with one name; JSON readers differ in which one they take."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _RepeatedMemberError("has an object with one member twice")
    return members


def _present_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in dict(pairs).items() if value is not None}


def _refuse(constant: str) -> Any:
    raise ValueError(constant)  # NaN and the infinities are not JSON


def _path_of_text(kind: Any, text: Any) -> bytes | Path:
    if not isinstance(text, str):
        raise ValueError("a path is no text")
    if kind is Path:
        return Path(text)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ValueError("a path has half a character") from None


def _text_of_path(path: Any) -> str:
    if not isinstance(path, bytes):
        raise TypeError(f"JSON has no {type(path).__name__}")
    return path.decode("utf-8", "surrogateescape")


def _problem(error: msgspec.ValidationError) -> str:
    """Return the problem and its place in the document, without values: they may be secrets."""
    problem, _, place = str(error).replace("`", "").partition(" - at $")
    problem = re.sub("matching regex .*", "of another form", problem, flags=re.DOTALL)
    place = place.lstrip(".")
    return f"{place}: {problem}" if place else problem
