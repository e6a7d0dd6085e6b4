"""Documents: JSON from a disk, a network or another process, read as frozen structs.

Alone owns how JSON is read and written: its size and the count of its values are checked before
anything is made of it (three bytes, an empty list and a comma, become 72 bytes of objects), no
member of ours may occur twice, every value has the type and the bounds that the struct declares, a
checksum is compared, and a version that this release does not know is refused by name. Members
that this release does not know are ignored. Pure, but for
`Form.read`, which asks a store; any thread.

`json` and not `msgspec.json` takes the bytes apart: paths that are not UTF-8 are stored as lone
surrogates, which `msgspec.json` refuses.
"""

import contextlib
import hashlib
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
"""A plan with every blob of a large tree."""
VALUE_COUNT_MAX = 2**22
"""Values that a document may have: as objects they take some 0.4 GiB. A record of a million paths
has a third of that."""

_DIGEST = "sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}"
Digest = Annotated[str, Meta(pattern=rf"\A(?:{_DIGEST})\Z")]
"""The digest of a manifest or blob of an image."""
DigestOrNone = Annotated[str, Meta(pattern=rf"\A(?:|{_DIGEST})\Z")]
AnyDigest = Annotated[str, Meta(pattern=rf"\A(?:{_DIGEST}|blake3:[0-9a-f]{{64}})\Z")]
"""A digest, also one of a stream that no image names."""
Sha256 = Annotated[str, Meta(pattern=r"\Asha256:[0-9a-f]{64}\Z")]
BlobDigest = Annotated[str, Meta(pattern=r"\A(?:sha256|blake3|points):[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number that every JSON reader reads exactly."""
Count64 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A count; also a number of nanoseconds since 1970."""
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]
"""Text without NUL, since it may become an argument or a variable of a process."""

# A path as the kernel has it; in JSON it is text, with lone surrogates for what is not UTF-8.
if TYPE_CHECKING:
    PathBytes = bytes
else:
    # Fields hold plain `bytes`: a virtual base tells a path from bytes in Base64.
    PathBytes = ABCMeta("PathBytes", (), {})
    PathBytes.register(bytes)


class Readable(Protocol):
    """A store, as far as a document needs one."""

    @property
    def url(self) -> str: ...

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes: ...


class Form(Struct, Generic[T], frozen=True, kw_only=True):
    """One kind of document, and how it is told from others."""

    type: Any
    """What a document is read as: a frozen struct, or a list of these."""
    size_max: int
    what: str = "a document that can be read"
    """For error messages: "a pointer to a bundle"."""
    kind: str = ""
    """The name that a document of this kind carries; empty: it carries none."""
    kind_member: str = "kind"
    versions: tuple[int, ...] = ()
    """The versions that this release reads, the one that it writes first; (): there are none."""
    checksum_member: str = ""
    """The member with the digest of all others. Documents of the first releases have none."""
    value_count_max: int = VALUE_COUNT_MAX
    is_foreign: bool = False
    """Programs of others write it: for them null is absence, and the last of two members with one
    name counts, as for Go."""
    indent: int | None = None

    def read(self, store: Readable, key: str) -> T:
        """The document at a key. Raises: as `decode`; NotFoundError, UnavailableError."""
        return self.decode(store.read(key, 0, self.size_max + 1), f"{store.url}/{key}")

    def decode(self, data: bytes, where: str) -> T:
        """The document in `data`, which came from `where`. Raises: CorruptError,
        UnknownFormatError."""
        return self.convert(self.parse(data, where), where)

    def parse(self, data: bytes, where: str) -> Any:
        """The JSON in `data`, not yet compared with the struct. Raises: CorruptError."""
        return parse(data, where, self.size_max, self.is_foreign, self.value_count_max)

    def convert(self, document: Any, where: str) -> T:
        """As `decode`, of a document that is parsed. Raises: CorruptError, UnknownFormatError."""
        if self.kind or self.versions:
            self._check_head(document, where)
        try:
            found: T = from_builtins(document, self.type)
        except msgspec.ValidationError as error:
            raise CorruptError(f"{where} is not {self.what}: {_problem(error)}") from None
        return found

    def _check_head(self, document: Any, where: str) -> None:
        if not isinstance(document, dict):
            raise CorruptError(f"{where} is not {self.what}")
        # First the checksum: a damaged document may look like one of a later version.
        if self.checksum_member in document and not self._is_whole(document):
            raise CorruptError(
                f"{where} does not match its {self.checksum_member}: it is damaged, or was edited"
            )
        if self.kind and document.get(self.kind_member) != self.kind:
            raise CorruptError(f"{where} is not {self.what}")
        version = document.get("version")
        if self.versions and (type(version) is not int or version not in self.versions):
            reads = " and ".join(map(str, sorted(self.versions)))
            raise UnknownFormatError(
                f"{where} has version {str(version)[:20]}, this release reads {reads}; "
                "use the Bootseer that wrote it, or a newer one"
            )

    def _is_whole(self, document: Mapping[str, Any]) -> bool:
        try:
            digest = members_digest(document, self.checksum_member)
        except RecursionError:
            return False
        return bool(document[self.checksum_member] == digest)

    def encode(self, value: T, version: int | None = None) -> bytes:
        """The bytes of a document; the same value gives the same bytes."""
        return self.encode_document(self.to_document(value, version))

    def to_document(self, value: T, version: int | None = None) -> dict[str, Any]:
        """All members of a document: its head, the struct's fields in their order, the checksum."""
        document: dict[str, Any] = {}
        if self.kind:
            document[self.kind_member] = self.kind
        if self.versions:
            document["version"] = version or self.versions[0]
        document |= to_builtins(value)
        if self.checksum_member:
            document[self.checksum_member] = members_digest(document, self.checksum_member)
        return document

    def encode_document(self, document: Mapping[str, Any]) -> bytes:
        """The bytes of what `to_document` made."""
        text = json.dumps(document, indent=self.indent, default=_text_of_path)
        return text.encode("ascii") + (b"" if self.indent is None else b"\n")


def parse(
    data: bytes,
    where: str,
    size_max: int,
    is_foreign: bool = False,
    value_count_max: int = VALUE_COUNT_MAX,
) -> Any:
    """The JSON in `data`, of at most `size_max` bytes. Raises: CorruptError, naming `where`."""
    if len(data) > size_max:
        raise CorruptError(f"{where} is larger than {size_max} bytes")
    # Those within strings count, too: nothing that is ours comes near the limit.
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
    """Structs as the dictionaries and lists that JSON has; a `Path` is text, bytes stay bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=os.fspath)


_known_kinds: set[Any] = set()
_learning = threading.Lock()


def _new_lock() -> None:
    global _learning
    _learning = threading.Lock()


# A fork may come while another thread holds it.
os.register_at_fork(after_in_child=_new_lock)


def _learn(kind: Any) -> None:
    """Have msgspec look at a struct for the first time in one thread: several at once crash it."""
    with _learning:
        with contextlib.suppress(msgspec.ValidationError, UnicodeEncodeError):
            msgspec.convert(None, kind, dec_hook=_path_of_text)
        _known_kinds.add(kind)


def from_builtins(plain: Any, kind: type[T]) -> T:
    """The inverse. Raises: msgspec.ValidationError."""
    if kind not in _known_kinds:
        _learn(kind)
    try:
        return msgspec.convert(plain, kind, dec_hook=_path_of_text)
    except UnicodeEncodeError:
        # msgspec looks for a number in text, whose lone surrogates are no UTF-8.
        raise msgspec.ValidationError("text in the place of something else") from None


def to_line(value: Any) -> str:
    """One line of JSON, for another process of ours."""
    return json.dumps(to_builtins(value), default=_text_of_path)


def from_line(line: str | bytes, kind: type[T]) -> T:
    """The inverse. Raises: CorruptError."""
    data = line.encode("utf-8") if isinstance(line, str) else line
    form: Form[T] = Form(type=kind, size_max=_LINE_BYTES_MAX)
    return form.decode(data, "a message of another process")


def is_digest(text: str) -> bool:
    """Whether `text` is the digest of a manifest or blob."""
    return bool(re.fullmatch(_DIGEST, text))


def members_digest(document: Mapping[str, Any], without: str) -> str:
    """`sha256:<hex>` of all that a document says, known to this release or not, but for the member
    that holds this digest: of its members as JSON without blanks, sorted by name."""
    members = {key: value for key, value in document.items() if key != without}
    data = json.dumps(members, sort_keys=True, separators=(",", ":"), default=_text_of_path)
    return "sha256:" + hashlib.sha256(data.encode("ascii")).hexdigest()


class _RepeatedMemberError(ValueError):
    """Readers differ in which of the two they take."""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _RepeatedMemberError("has an object with one member twice")
    return members


def _present_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in dict(pairs).items() if value is not None}


def _refuse(constant: str) -> Any:
    """NaN and the infinities are no JSON, and no number that anything here means."""
    raise ValueError(constant)


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
    """What is wrong, and where in the document; no value of it, since that may be a secret."""
    problem, _, place = str(error).replace("`", "").partition(" - at $")
    problem = re.sub("matching regex .*", "of another form", problem, flags=re.DOTALL)
    place = place.lstrip(".")
    return f"{place}: {problem}" if place else problem
