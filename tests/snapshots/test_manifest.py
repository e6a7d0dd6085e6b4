import copy
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, CorruptError, InvalidInputError, UnknownFormatError
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.manifest import (
    Manifest,
    Outside,
    Stored,
    StoredIndex,
    Target,
    decode,
    encode,
)
from bootseer.snapshots.scan import target_path

_PARTS = (Part("command", '["x"]'), Part("salt", ""))
_MANIFEST = Manifest(
    fingerprint=fingerprint(_PARTS),
    parts=_PARTS,
    targets=(
        Target(
            path=b"/opt/env-\xff",
            whole=False,
            blob=Stored("sha256:" + "ab" * 32, 1000),
            index=StoredIndex("sha256:" + "cd" * 32, 100),
            deletions=(b"lib/old.py", b"not-utf8-\xfe"),
            file_count=3,
            content_bytes=5000,
        ),
    ),
    created_ns=1,
    setup_ns=2,
    node="node-1",
    name="base",
    version="0.1.0",
    outside=Outside(paths=("/etc/x", "/usr/bin/y"), path_count=7),
)


def test_a_manifest_survives_encoding() -> None:
    data = encode(_MANIFEST)
    assert decode(data, _MANIFEST.fingerprint) == _MANIFEST
    assert encode(decode(data)) == data


def _sealed(document: dict[str, Any]) -> bytes:
    """Return the document with its digest, as docs/format/snapshot.md describes it."""
    document.pop("digest", None)
    data = json.dumps(document, sort_keys=True, separators=(",", ":"))
    digest = "sha256:" + hashlib.sha256(data.encode()).hexdigest()
    return json.dumps({**document, "digest": digest}).encode()


def _edited(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(encode(_MANIFEST))
    at: Any = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return document


def _changed(path: tuple[Any, ...], value: Any) -> bytes:
    return _sealed(_edited(path, value))


def test_the_digest_is_the_one_of_the_format() -> None:
    assert json.loads(_sealed(json.loads(encode(_MANIFEST)))) == json.loads(encode(_MANIFEST))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("targets", 0, "deletions", 0), "lib/another.py"),
        (("targets", 0, "deletions"), []),
        (("targets", 0, "path"), "/etc"),
        (("targets", 0, "whole"), True),
        (("targets", 0, "index", "digest"), "sha256:" + "ef" * 32),
        (("created_ns",), 5),
        (("name",), "another"),
        (("outside", "paths"), []),
        (("of a later release",), 1),
        (("digest",), "sha256:" + "0" * 64),
        (("digest",), None),
    ],
)
def test_nothing_can_change_without_being_noticed(path: tuple[Any, ...], value: Any) -> None:
    """Regression: a changed deletion deleted another file, and verify reported no damage."""
    data = json.dumps(_edited(path, value)).encode()
    with pytest.raises(CorruptError, match=f"manifest {_MANIFEST.fingerprint} does not match"):
        decode(data, _MANIFEST.fingerprint)


def test_a_manifest_without_a_digest_is_refused() -> None:
    document = json.loads(encode(_MANIFEST))
    del document["digest"]
    with pytest.raises(CorruptError, match="has no digest"):
        decode(json.dumps(document).encode(), _MANIFEST.fingerprint)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("fingerprint",), "0" * 64),
        (("parts", 0, 1), "another command"),
        (("parts",), [["\ud800", ""]]),
        (("targets",), []),
        (("targets", 0, "path"), "relative"),
        (("targets", 0, "path"), "/opt/../etc"),
        (("targets", 0, "path"), "/"),
        (("targets", 0, "path"), "/a\0b"),
        (("targets", 0, "whole"), 1),
        (("targets", 0, "deletions", 0), "../../etc/passwd"),
        (("targets", 0, "deletions", 0), "/etc/passwd"),
        (("targets", 0, "deletions", 0), "a//b"),
        (("targets", 0, "deletions", 0), "."),
        (("targets", 0, "deletions", 0), "\ud800"),
        (("targets", 0, "deletions"), "a"),
        (("targets", 0, "blob", "digest"), "sha256:../../x"),
        (("targets", 0, "blob", "digest"), "points:" + "0" * 64),
        (("targets", 0, "index", "digest"), "blake3:" + "0" * 64),
        (("targets", 0, "blob", "size_bytes"), -1),
        (("targets", 0, "blob", "size_bytes"), 1 << 60),
        (("targets", 0, "index", "size_bytes"), 1e9),
        (("targets", 0, "index"), None),
        (("name",), "../x"),
        (("created_ns",), True),
        (("format",), "tar"),
        (("outside",), []),
        (("outside", "paths"), [1]),
        (("outside", "paths"), ["x"] * 101),
        (("outside", "path_count"), -1),
    ],
)
def test_what_makes_no_sense_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(CorruptError):
        decode(_changed(path, value), _MANIFEST.fingerprint)


@pytest.mark.parametrize("version", [3, 0, "1", None, True])
def test_other_versions_are_named(version: object) -> None:
    with pytest.raises(UnknownFormatError, match="newer"):
        decode(_changed(("version",), version))


def test_another_snapshots_manifest_is_refused() -> None:
    with pytest.raises(CorruptError, match="fingerprint"):
        decode(encode(_MANIFEST), "0" * 64)


@given(
    st.binary(max_size=50)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    ).map(lambda value: json.dumps(value).encode())
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(data)


@given(st.data())
def test_any_one_change_is_refused_or_harmless(data: st.DataObject) -> None:
    document = copy.deepcopy(json.loads(encode(_MANIFEST)))
    at: Any = document
    while isinstance(at, dict | list) and at:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            at[key] = data.draw(st.none() | st.integers() | st.text(max_size=9) | st.just([]))
            break
        at = at[key]
    try:
        manifest = decode(_sealed(document), _MANIFEST.fingerprint)
    except BootseerError:
        return
    assert all(b".." not in path.split(b"/") for t in manifest.targets for path in t.deletions)


def test_target_paths_that_users_write() -> None:
    assert target_path("env", "/job") == b"/job/env"
    assert target_path("//opt/./x/../env/", "/job") == b"/opt/env"
    for text in ("/", "..", "a\0b"):
        with pytest.raises(InvalidInputError):
            target_path(text, "/job")
