"""`bootseer checkpoint`: output, exit codes, and the form of `--json`."""

import os
import random
import stat
from pathlib import Path

import pytest

from bootseer.fuse.striped.layout import PARTS_FOLDER
from testbed.needs import require
from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.json_page import agree

DATA = random.Random(11).randbytes(300_000)
SMALL = ("--stripe-unit", "64KiB", "--stripe-count", "3")


@pytest.fixture
def tree(own_world: World) -> World:
    """Return a world with a checkpoint in a striped tree, and the local one it was copied from."""
    world = own_world
    (world.path("ck/sub")).mkdir(parents=True)
    world.path("ck/model").write_bytes(DATA)
    world.path("ck/sub/note").write_bytes(b"hello")
    url = world.path("tree").as_uri()
    copied = world("checkpoint", "cp", "-r", "ck", f"{url}/step-1", *SMALL, "--json")
    assert copied.code == 0, copied
    agree("checkpoint cp", copied.json)
    assert (copied.json["files"], copied.json["bytes"]) == (2, len(DATA) + 5)
    return world


def part(world: World, name: str) -> Path:
    (found,) = world.path("tree/step-1").glob(f"{PARTS_FOLDER}/*/{name}")
    return found


def test_ls_and_stat_show_what_is_stored(tree: World) -> None:
    url = tree.path("tree").as_uri()
    listed = tree("checkpoint", "ls", f"{url}/step-1", "--json").json
    agree("checkpoint ls", listed)
    assert [one["name"] for one in listed] == ["model", "sub"]
    assert tree("checkpoint", "ls", f"{url}/step-1").out.splitlines() == ["model", "sub"]
    assert "striped over 3" in tree("checkpoint", "ls", "-l", f"{url}/step-1").out
    assert tree("checkpoint", "ls", f"{url}/step-1/sub/note").out == "note\n"
    shown = tree("checkpoint", "stat", f"{url}/step-1/model", "--json").json
    agree("checkpoint stat", shown)
    assert sum(one["bytes"] for one in shown["segments"][0]["parts"]) == len(DATA)
    assert shown["generation"] in tree("checkpoint", "stat", f"{url}/step-1/model").out
    agree("checkpoint stat", tree("checkpoint", "stat", f"{url}/step-1/sub/note", "--json").json)


def test_cp_to_a_pipe_is_refused(tree: World) -> None:
    os.mkfifo(tree.path("pipe"))
    source = f"{tree.path('tree').as_uri()}/step-1/model"
    refused = tree("checkpoint", "cp", source, "pipe")
    assert refused.code == 2
    assert "pipe is a pipe or socket" in refused.err
    assert tree.path("pipe").is_fifo()


def test_cp_to_a_device_does_not_replace_it(tree: World) -> None:
    require("root")
    os.mknod(tree.path("null"), 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    source = f"{tree.path('tree').as_uri()}/step-1/model"
    assert tree("checkpoint", "cp", source, "null").code == 0
    assert tree.path("null").is_char_device()


def test_cp_in_out_and_across(tree: World) -> None:
    url = tree.path("tree").as_uri()
    tree.path("into").mkdir()
    assert tree("checkpoint", "cp", f"{url}/step-1/model", "into").code == 0
    assert tree.path("into/model").read_bytes() == DATA
    assert tree("checkpoint", "cp", f"{url}/step-1/model", "as").code == 0
    assert tree.path("as").read_bytes() == DATA
    # Across, with another form; and into a directory that is there.
    other = tree.path("other").as_uri()
    assert tree("checkpoint", "cp", "-r", f"{url}/step-1", other, "--layout", "plain").code == 0
    assert tree.path("other/model").read_bytes() == DATA
    assert tree("checkpoint", "cp", "ck/model", "ck/sub/note", f"{other}/").code == 0
    assert tree.path("other/note").read_bytes() == b"hello"
    assert tree("checkpoint", "cp", "-r", f"{url}/step-1", "into").code == 0
    assert tree.path("into/step-1/sub/note").read_bytes() == b"hello"


def test_names_with_control_codes_do_not_reach_the_terminal(tree: World) -> None:
    tree.path("ck/a\nb\x1b[31m").write_bytes(b"x")
    url = tree.path("tree").as_uri()
    assert tree("checkpoint", "cp", "-r", "ck", f"{url}/odd").code == 0
    result = tree("checkpoint", "ls", "-l", f"{url}/odd")
    assert "a\\nb\\x1b[31m" in result.out
    assert "\x1b" not in result.out
    assert "a\nb\x1b[31m" in [
        one["name"] for one in tree("checkpoint", "ls", f"{url}/odd", "--json").json
    ]


ERRORS = [
    (("cp", "ck/model", "copy"), 2, "use cp"),
    (("cp", "ck", "{url}/x"), 2, "give -r"),
    (("cp", "none", "{url}/x"), 10, "does not exist"),
    (("cp", "ck/model", "ck/sub/note", "{url}/step-1/model"), 2, "is not a directory"),
    (("cp", "-r", "ck", "{url}/step-1/model"), 11, "is not a directory"),
    (("cp", "ck/model", "{url}/x", "--stripe-unit", "5"), 2, "cannot be used"),
    (("ls", "{url}/none"), 10, "No such file"),
    (("ls", "ck"), 2, "is no URL"),
    (("stat", "{url}/step-1"), 2, "use ls"),
    (("verify", "{url}/none"), 10, "No such file"),
    (("fsck", "{url}/step-1/model"), 2, "the directory"),
    (("fsck", "--delete", "--age", "5m", "{url}"), 2, "at least 1h"),
    (("convert", "{url}/step-1"), 2, "give -r"),
]


def test_each_error_has_its_exit_code_and_names_what(tree: World) -> None:
    url = tree.path("tree").as_uri()
    for arguments, code, says in ERRORS:
        result = tree("checkpoint", *(text.format(url=url) for text in arguments))
        assert (result.code, result.out) == (code, ""), arguments
        assert says in result.err
        assert result.err.startswith("bootseer: ")
        assert len(result.err.splitlines()) == 1


def test_verify_and_fsck(tree: World) -> None:
    url = tree.path("tree").as_uri()
    whole = tree("checkpoint", "verify", url, "--json")
    agree("checkpoint verify", whole.json)
    assert (whole.code, whole.json["files"], whole.json["striped_files"]) == (0, 2, 1)
    clean = tree("checkpoint", "fsck", url, "--json")
    agree("checkpoint fsck", clean.json)
    assert clean.code == 0
    content = bytearray(part(tree, "01").read_bytes())
    content[7] ^= 4
    part(tree, "01").write_bytes(content)
    found = tree("checkpoint", "verify", f"{url}/step-1", "--json")
    agree("checkpoint verify", found.json)
    assert found.code == 15
    (one,) = found.json["damaged"]
    assert (one["path"], one["offset"], one["part_offset"]) == ("step-1/model", 65536, 0)
    assert part(tree, "01").name in tree("checkpoint", "verify", url).out
    part(tree, "02").unlink()
    left = tree.path(f"tree/step-1/{PARTS_FOLDER}/{'0' * 32}")
    left.mkdir()
    (left / "00").write_bytes(b"1234")
    troubled = tree("checkpoint", "fsck", "--delete", "--grace", "0", url, "--json")
    agree("checkpoint fsck", troubled.json)
    assert troubled.code == 15
    assert [one["reason"] for one in troubled.json["troubles"]] == ["missing"]
    assert [one["deleted"] for one in troubled.json["garbage"]] == [False]
    for path in (left / "00", left):
        os.utime(path, (1, 1))
    emptied = tree("checkpoint", "fsck", "--delete", "--grace", "0", url, "--json").json
    assert [one["deleted"] for one in emptied["garbage"]] == [True]
    assert not left.exists()


def test_a_damaged_layout_does_not_hide_the_other_files(tree: World) -> None:
    url = tree.path("tree").as_uri()
    with tree.path("tree/step-1/model").open("r+b") as file:
        file.seek(140)
        file.write(b"????")
    found = tree("checkpoint", "verify", f"{url}/step-1", "--json")
    assert (found.code, found.json["files"]) == (15, 1)
    assert found.json["damaged"][0]["path"] == "step-1/model"
    listed = tree("checkpoint", "ls", f"{url}/step-1", "--json").json
    agree("checkpoint ls", listed)
    assert [one["layout"] for one in listed] == ["damaged", None]
    tree.path("large").write_bytes(DATA)
    assert tree("checkpoint", "cp", "large", f"{url}/step-1/sub/", *SMALL).code == 0
    found = tree("checkpoint", "convert", "-r", url, "--layout", "plain", "--grace", "0", "--json")
    assert (found.code, found.json["files"], found.json["unchanged"]) == (15, 1, 1)
    assert [one["path"] for one in found.json["failed"]] == ["tree/step-1/model"]
    assert tree("checkpoint", "fsck", f"{url}/step-1").code == 15


def test_convert_stores_in_another_form_once(tree: World) -> None:
    url = tree.path("tree").as_uri()
    there = tree("checkpoint", "convert", "-r", url, "--layout", "plain", "--grace", "0", "--json")
    agree("checkpoint convert", there.json)
    assert (there.code, there.json["files"]) == (0, 1)
    assert tree.path("tree/step-1/model").read_bytes() == DATA
    again = tree("checkpoint", "convert", "-r", url, "--layout", "plain", "--json").json
    assert (again["files"], again["unchanged"]) == (0, 2)
    assert tree("checkpoint", "convert", f"{url}/step-1/model", *SMALL, "--grace", "0").code == 0
    shown = tree("checkpoint", "stat", f"{url}/step-1/model", "--json").json
    assert [one["stripe_unit_bytes"] for one in shown["segments"]] == [65536]
    assert tree("checkpoint", "fsck", url, "--json").json["garbage"] == []
