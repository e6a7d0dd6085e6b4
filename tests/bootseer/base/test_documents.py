"""Documents that are read must be small, typed, complete and of a known version."""

import json
import subprocess
import sys
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from bootseer.base.documents import Count, DocumentFormat, PathBytes, Sha256, parse
from bootseer.errors import CorruptError, UnknownFormatError
from bootseer.prefetch.index.records import LAYER_FORM
from bootseer.snapshots.manifest import decode
from testbed.bounded import run_bounded


class Thing(Struct, frozen=True):
    digest: Sha256
    size_bytes: Count = 0
    paths: Annotated[tuple[PathBytes, ...], Meta(max_length=3)] = ()


FORM: DocumentFormat[Thing] = DocumentFormat(
    type=Thing, what="a thing", kind="thing", version=1, size_max=10**7, indent=1,
    checksum_member="checksum",
)  # fmt: skip
DIGEST = "sha256:" + "0" * 64
THING = Thing(DIGEST, 7, (b"usr/\xff", b"a"))


def unsigned(**members: object) -> bytes:
    return json.dumps({"kind": "thing", "version": 1, "digest": DIGEST, **members}).encode()


@pytest.mark.parametrize("value", [b"[]", b"{}", b'[{"":[]}]', b"1"])
def test_values_are_counted_before_they_are_made(value: bytes) -> None:
    data = b"[" + (value + b",") * 5_000_000 + value + b"]"
    for read in (
        lambda: parse(data, "x", 2**30),
        lambda: decode(data),
        lambda: LAYER_FORM.decode(data, "x"),
    ):
        assert not run_bounded(read, (CorruptError,), memory_bytes=2**24)


@pytest.mark.parametrize(
    "data",
    [b"NaN", b"[Infinity]", b"-Infinity", b"{", b"\xff", b"", b"[" * 10**6, b'{"a":' * 10**6,
     b"1" * 10**5],
)  # fmt: skip
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match="a file is not valid JSON"):
        parse(data, "a file", 10**7)


def test_the_size_is_checked_first() -> None:
    with pytest.raises(CorruptError, match="larger than 3 bytes"):
        parse(b"[1] ", "a file", 3)
    assert parse(b"[1]", "a file", 3) == [1]


def test_no_member_occurs_twice() -> None:
    with pytest.raises(CorruptError, match="a file has an object with one member twice"):
        parse(b'[{"a": 1, "b": 2, "a": 1}]', "a file", 100)


def test_what_others_write_is_read_as_go_reads_it() -> None:
    assert parse(b'{"a": 1, "a": 2}', "x", 100, is_foreign=True) == {"a": 2}
    assert parse(b'{"a": null, "b": [{"c": null}]}', "x", 100, is_foreign=True) == {"b": [{}]}
    assert parse(b'{"a": null}', "x", 100) == {"a": None}


def test_a_document_comes_back_as_it_was() -> None:
    data = FORM.encode(THING)
    assert FORM.decode(data, "x") == THING
    assert list(json.loads(data)) == ["kind", "version", "digest", "size_bytes", "paths",
                                      "checksum"]  # fmt: skip
    assert all(type(path) is bytes for path in FORM.decode(data, "x").paths)


@given(st.binary(max_size=20))
def test_any_path_comes_back(path: bytes) -> None:
    assert FORM.decode(FORM.encode(Thing(DIGEST, 0, (path,))), "x").paths == (path,)


def test_other_members_are_ignored_but_signed() -> None:
    later = {**json.loads(FORM.encode(THING)), "new": [1]}
    with pytest.raises(CorruptError, match="x does not match its checksum"):
        FORM.decode(json.dumps(later).encode(), "x")
    assert FORM.decode(unsigned(new={"a": None}), "x") == Thing(DIGEST)


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"digest": DIGEST + "\n"}, "digest: Expected str of another form"),
        ({"digest": 7}, "digest: Expected str, got int"),
        ({"size_bytes": -1}, "size_bytes: Expected int >= 0"),
        ({"size_bytes": 2**53 + 1}, "size_bytes: Expected int <= 9007199254740992"),
        ({"size_bytes": 10**30}, "size_bytes: Expected int <= 9007199254740992"),
        ({"size_bytes": True}, "size_bytes: Expected int, got bool"),
        ({"size_bytes": "\udc80"}, "text in the place of something else"),
        ({"size_bytes": 1.0}, "size_bytes: Expected int, got float"),
        ({"size_bytes": None}, "size_bytes: Expected int, got null"),
        ({"paths": ["a", 1]}, r"paths\[1\]: a path is no text"),
        ({"paths": ["\ud800"]}, r"paths\[0\]: a path has half a character"),
        ({"paths": ["a"] * 4}, "paths: Expected array of length <= 3"),
    ],
)
def test_what_is_wrong_is_named(members: dict[str, object], problem: str) -> None:
    with pytest.raises(CorruptError, match=f"^here is not a thing: {problem}$"):
        FORM.decode(unsigned(**members), "here")


def test_no_value_is_in_a_message() -> None:
    for members in ({"digest": "hunter2"}, {"size_bytes": "hunter2"}, {"paths": "hunter2"}):
        with pytest.raises(CorruptError) as caught:
            FORM.decode(unsigned(**members), "here")
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("data", [b"[]", b"7", b"null", unsigned(kind="other"), b"{}"])
def test_another_kind_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^here is not a thing$"):
        FORM.decode(data, "here")


@pytest.mark.parametrize("version", [2, 0, "1", True, 1.0, None, [1]])
def test_a_version_that_is_not_known_is_refused_by_name(version: object) -> None:
    with pytest.raises(UnknownFormatError, match=r"here has version .* reads 1;"):
        FORM.decode(unsigned(version=version), "here")


def test_damage_is_no_later_version() -> None:
    data = FORM.encode(THING).replace(b'"version": 1', b'"version": 2')
    with pytest.raises(CorruptError, match="does not match its checksum"):
        FORM.decode(data, "here")
    deep = b'{"kind": "thing", "version": 1, "checksum": "x", "a": %s}'
    with pytest.raises(CorruptError, match=r"here (does not match its checksum|is not valid JSON)"):
        FORM.decode(deep % (b"[" * 900 + b"]" * 900), "here")


_FIRST_USES = """
import threading
import msgspec
from bootseer.base.documents import from_builtins

def use(kind, barrier):
    barrier.wait()
    assert from_builtins({"one": [{"a": 1}], "two": {"x": {"a": 2}}}, kind).one[0].a == 1

for number in range(300):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", dict[str, int], {})])
    kind = msgspec.defstruct("Kind", [("one", list[inner]), ("two", dict[str, inner])])
    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=use, args=(kind, barrier)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_a_struct_that_several_threads_read_first_is_read() -> None:
    """`snapshot list` reads manifests in threads, and died by SIGSEGV in 11 of 582 runs."""
    command = [sys.executable, "-c", _FIRST_USES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
