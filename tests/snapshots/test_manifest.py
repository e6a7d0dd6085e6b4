import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import BootseerError, CorruptError, InvalidInputError, UnknownFormatError
from bootseer.snapshots.manifest import Manifest, Stored, Target, target_path
from bootseer.snapshots.manifest_codec import decode, encode
from bootseer.snapshots.setup.fingerprint import Part, fingerprint

_PARTS = (Part("command", '["x"]'), Part("salt", ""))
_MANIFEST = Manifest(
    fingerprint=fingerprint(_PARTS),
    parts=_PARTS,
    targets=(
        Target(
            path=b"/opt/env-\xff",
            whole=False,
            blob=Stored("sha256:" + "ab" * 32, 1000),
            index=Stored("sha256:" + "cd" * 32, 100),
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
)


def test_a_manifest_survives_encoding() -> None:
    data = encode(_MANIFEST)
    assert decode(data, _MANIFEST.fingerprint) == _MANIFEST
    assert encode(decode(data)) == data


def _changed(path: tuple[Any, ...], value: Any) -> bytes:
    document = json.loads(encode(_MANIFEST))
    at = document
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return json.dumps(document).encode()


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
        (("targets", 0, "blob", "size_bytes"), -1),
        (("targets", 0, "blob", "size_bytes"), 1 << 60),
        (("targets", 0, "index", "size_bytes"), 1e9),
        (("targets", 0, "index"), None),
        (("name",), "../x"),
        (("created_ns",), True),
        (("format",), "tar"),
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
        manifest = decode(json.dumps(document).encode(), _MANIFEST.fingerprint)
    except BootseerError:
        return
    assert all(b".." not in path.split(b"/") for t in manifest.targets for path in t.deletions)


def test_target_paths_that_users_write() -> None:
    assert target_path("env", "/job") == b"/job/env"
    assert target_path("//opt/./x/../env/", "/job") == b"/opt/env"
    for text in ("/", "..", "a\0b"):
        with pytest.raises(InvalidInputError):
            target_path(text, "/job")
