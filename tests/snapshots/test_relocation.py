"""Relocation of single files: boundaries of paths, first lines, binaries, links, records."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.snapshots.relocation import (
    Brought,
    Placeholder,
    Prefix,
    new_content_of,
    placeholders_of,
    prefix_of,
    relocate_file,
    relocated_conda_record,
    relocated_record,
    stale_bytecode,
)
from testbed.paths import REPOSITORY

PREFIX = Prefix(b"/opt/env", b"/data/new")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"/opt/env", b"/data/new"),
        (b"VIRTUAL_ENV='/opt/env'\n", b"VIRTUAL_ENV='/data/new'\n"),
        (b"/opt/env/bin:/opt/env/sbin", b"/data/new/bin:/data/new/sbin"),
        (b"file:///opt/env/src", b"file:///data/new/src"),
        (b"-L/opt/env/lib -isystem/opt/env/include", b"-L/data/new/lib -isystem/data/new/include"),
        (b"It is in /opt/env.\n", b"It is in /data/new.\n"),
        (b"/opt/env2 /opt/env-old /opt/env.bak /opt/env_", None),
        (b"/data/opt/env ../opt/env /opt/environment", None),
        ("/opt/envé".encode(), None),
    ],
)
def test_a_prefix_is_not_a_part_of_another_path(before: bytes, after: bytes | None) -> None:
    assert PREFIX.text(before) == (before if after is None else after)
    assert PREFIX.is_in(before) == (after is not None)


def test_a_short_prefix_does_not_break_usr_bin_env() -> None:
    text = b"#!/usr/bin/env python\nexec /env/bin/python\n"
    moved = Prefix(b"/env", b"/venv").script(text)
    assert moved == b"#!/usr/bin/env python\nexec /venv/bin/python\n"


def test_a_prefix_with_odd_characters_is_found_in_urls_and_json() -> None:
    prefix = Prefix("/opt/my é".encode(), b"/data/new")
    text = b'"file:///opt/my%20%C3%A9/src" "/opt/my \\u00e9/bin" "/opt/my \xc3\xa9/lib"'
    assert prefix.text(text) == b'"file:///data/new/src" "/data/new/bin" "/data/new/lib"'


LONG = b"/" + b"x" * 130


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"#!/opt/env/bin/python3\n", b"#!/bin/sh\n'''exec' %s/bin/python3 \"$0\" \"$@\"\n' '''\n"),
        (
            b"#!/opt/env/bin/python3.11 -I\n",
            b"#!/bin/sh\n'''exec' %s/bin/python3.11 -I \"$0\" \"$@\"\n' '''\n",
        ),
        (b"#!/opt/env/bin/perl\n", b"#!/usr/bin/env perl\n"),
        (b"#!/opt/env/bin/perl -w\n", b"#!/usr/bin/env -S perl -w\n"),
        (
            b"#!/bin/sh\n'''exec' /opt/env/bin/python \"$0\" \"$@\"\n' '''\n",
            b"#!/bin/sh\n'''exec' %s/bin/python \"$0\" \"$@\"\n' '''\n",
        ),
    ],
)
def test_a_first_line_that_would_be_too_long(first: bytes, expected: bytes) -> None:
    prefix = Prefix(b"/opt/env", LONG)
    assert prefix.script(first + b"rest\n") == expected.replace(b"%s", LONG) + b"rest\n"


def test_binaries_keep_their_size_and_every_other_string() -> None:
    prefix = Prefix(b"/opt/env", b"/new")
    data = b"\x7fELF\0/opt/env/lib:/opt/env/lib64\0next\0/opt/env\0\x01\x02"
    moved = prefix.binary(data, len(b"/opt/env"))
    assert (
        moved == b"\x7fELF\0/new/lib:/new/lib64" + bytes(9) + b"next\0/new" + bytes(5) + b"\x01\x02"
    )


def test_a_longer_prefix_fits_where_conda_has_left_room() -> None:
    built = 20
    short, long = b"/opt/env", b"/opt/much/longer"
    pad = bytes(built - len(short))
    data = b"A\0" + short + b"/a:" + short + b"/b\0" + 2 * pad + b"B\0"
    moved = Prefix(short, long).binary(data, built)
    assert moved is not None
    assert len(moved) == len(data)
    assert moved.startswith(b"A\0" + long + b"/a:" + long + b"/b\0")
    assert moved.endswith(b"\0B\0")
    # And back to the old path.
    assert Prefix(long, short).binary(moved, built) == data
    assert Prefix(short, b"/" + 20 * b"x").binary(data, built) is None
    # Bytes behind the string must not be overwritten.
    assert Prefix(short, long).binary(short + b"/a\0B\0", built) is None


def test_a_binary_without_room_is_refused_by_name() -> None:
    brought = Brought(frozenset(), {b"lib/libx.so": Placeholder(True, 8)})
    with pytest.raises(InvalidInputError, match=r"lib/libx\.so has room for a prefix of 8 bytes"):
        relocate_file(b"lib/libx.so", b"\0/opt/env/lib\0", PREFIX, brought)


def test_what_is_changed_and_what_is_left() -> None:
    brought = Brought(
        {b"lib/p/a.py", b"bin/tool", b"lib/p/run", b"lib/p/__editable___x_finder.py"},
        {b"lib/recorded.txt": Placeholder(False, 255), b"share/plain": None},
    )

    def moved(path: bytes, data: bytes) -> bytes | None:
        return relocate_file(path, data, PREFIX, brought)

    assert moved(b"lib/recorded.txt", b"p=/opt/env") == b"p=/data/new"
    assert moved(b"bin/tool", b"#!/opt/env/bin/python\n") == b"#!/data/new/bin/python\n"
    assert moved(b"lib/p/__editable___x_finder.py", b"'/opt/env/x'") == b"'/data/new/x'"
    assert moved(b"pyvenv.cfg", b"home = /usr\ncommand = /opt/env\n") is not None
    assert moved(b"lib/pkgconfig/x.pc", b"prefix=/opt/env\n") == b"prefix=/data/new\n"
    # As installed by their packages, or in an unknown format.
    assert moved(b"lib/p/a.py", b"X = '/opt/env'\n") is None
    assert moved(b"share/plain", b"/opt/env\n") is None
    assert moved(b"lib/unknown.bin", b"\0/opt/env\0") is None
    assert moved(b"lib/p/run", b"#!/opt/env/bin/python\nx\n") == b"#!/data/new/bin/python\nx\n"


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        (b"bin/a", b"/opt/env/bin/b", b"/data/deep/new/bin/b"),
        (b"bin/a", b"/opt/env2/b", b"/opt/env2/b"),
        (b"bin/a", b"b", b"b"),
        (b"bin/a", b"../lib/b", b"../lib/b"),
        (b"bin/a", b"../../base/bin/python", b"../../../../opt/base/bin/python"),
        (b"bin/a", b"../../env/lib/b", b"../lib/b"),
        (b"bin/a", b"/usr/bin/python3", b"/usr/bin/python3"),
    ],
)
def test_links_into_the_environment_move_with_it(
    path: bytes, target: bytes, expected: bytes
) -> None:
    assert Prefix(b"/opt/env", b"/data/deep/new").link(path, target) == expected


@pytest.mark.parametrize("place", ["/with blank", "/a'b", "/a$b", "/a:b", "/", "/é", "/a\nb"])
def test_places_that_scripts_cannot_name_are_refused(place: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot be moved"):
        prefix_of(b"/opt/env", place)


def test_records_follow_what_has_changed() -> None:
    record = b"lib/python3/site-packages/x-1.dist-info/RECORD"
    data = (
        b"x/__init__.py,sha256=abc,1\r\n"
        b'"x/with,comma.py",sha256=def,2\r\n'
        b"../../../bin/x,sha256=ghi,3\r\n"
        b"x/__pycache__/y.cpython-311.pyc,,\r\n"
        b"x-1.dist-info/RECORD,,\r\n"
        b"malformed\r\n"
    )
    new = new_content_of(b"new")
    folder = b"lib/python3/site-packages/"
    changed = {b"bin/x": new, folder + b"x/with,comma.py": new}
    removed = {folder + b"x/__pycache__/y.cpython-311.pyc"}
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"new").digest()).rstrip(b"=")
    assert relocated_record(record, data, changed, removed) == (
        b"x/__init__.py,sha256=abc,1\r\n"
        b'"x/with,comma.py",sha256=' + digest + b",3\r\n"
        b"../../../bin/x,sha256=" + digest + b",3\r\n"
        b"x-1.dist-info/RECORD,,\r\n"
        b"malformed\r\n"
    )


def test_conda_records_follow_and_malformed_ones_say_nothing() -> None:
    entries = [
        {"_path": "bin/x", "prefix_placeholder": "/long", "file_mode": "binary"},
        {"_path": "lib/y", "sha256_in_prefix": "old"},
        {"_path": "lib/z.pyc"},
    ]
    data = json.dumps({"name": "x", "paths_data": {"paths": entries}}).encode()
    assert placeholders_of(data) == {
        b"bin/x": Placeholder(True, 5),
        b"lib/y": None,
        b"lib/z.pyc": None,
    }
    moved = json.loads(
        relocated_conda_record(data, {b"lib/y": new_content_of(b"new")}, {b"lib/z.pyc"})
    )
    assert moved["paths_data"]["paths"] == [
        entries[0],
        {"_path": "lib/y", "sha256_in_prefix": hashlib.sha256(b"new").hexdigest()},
    ]
    for broken in (
        b"",
        b"[]",
        b'{"paths_data": 3}',
        b'{"paths_data": {"paths": [1]}}',
        b"[" * 9999,
    ):
        assert placeholders_of(broken) == {}
        assert relocated_conda_record(broken, {}, {b"x"}) == broken


def test_odd_records_stop_nothing() -> None:
    new = new_content_of(b"new")
    odd = b'x,"a""b=c",1\nx,,\nx,sha256=abc,1'
    moved = relocated_record(b"p/x-1.dist-info/RECORD", odd, {b"p/x": new}, frozenset())
    assert moved.startswith(b'x,"a""b=c",1\nx,,\nx,sha256=')
    assert moved.endswith(b",3")
    half_a_pair = b'{"paths_data": {"paths": [{"_path": "\\ud800", "sha256_in_prefix": "x"}]}}'
    assert relocated_conda_record(half_a_pair, {b"x": new}, frozenset()) == half_a_pair
    assert len(placeholders_of(half_a_pair)) == 1


def test_a_string_that_nothing_ends() -> None:
    assert Prefix(b"/opt/env", b"/new").binary(b"\0/opt/env/x", 8) == b"\0/new/x\0\0\0\0"
    assert Prefix(b"/opt/env", b"/opt/envs").binary(b"\0/opt/env/x", 99) is None
    many = b"\0" + b"/opt/env/" * 100_000
    assert Prefix(b"/opt/env", b"/new").binary(many, 8) is not None


def test_bytecode_of_changed_sources_goes() -> None:
    paths = {
        b"lib/a.py",
        b"lib/__pycache__/a.cpython-311.pyc",
        b"lib/__pycache__/a.cpython-311.opt-1.pyc",
        b"lib/__pycache__/ab.cpython-311.pyc",
        b"other/__pycache__/a.cpython-311.pyc",
        b"__pycache__/top.cpython-311.pyc",
    }
    assert stale_bytecode([b"lib/a.py", b"bin/x"], paths) == {
        b"lib/__pycache__/a.cpython-311.pyc",
        b"lib/__pycache__/a.cpython-311.opt-1.pyc",
    }
    assert stale_bytecode([b"top.py"], paths) == {b"__pycache__/top.cpython-311.pyc"}


def test_killed_at_many_steps(tmp_path: Path) -> None:
    root = REPOSITORY
    driver = root / "tests/snapshots/support/relocate_crash_driver.py"
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), "20"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 19
    assert sum(line.endswith("killed") for line in lines) >= len(lines) // 2
