"""`--json` prints one document with exactly the keys of docs/json.md, as in the table."""

import os
import sys

import pytest

from testbed.needs import require
from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.json_page import agree, documented, keys

_FIGURES = "figures of a mount"


def test_every_command_that_has_it_is_documented() -> None:
    from bootseer.cli.command_tree import cli
    from tests.support.cli_reference import commands, root_context

    with_json = {
        context.command_path.removeprefix("bootseer ")
        for command, context in commands(cli, root_context())
        if any(parameter.name == "as_json" for parameter in command.params)
    }
    assert with_json == set(documented()) - {_FIGURES}


def test_images(own_world: World) -> None:
    world = own_world
    agree("image index", world("image", "index", "src", "--json").json)
    listed = world("image", "list", "--json").json
    for image in listed:
        agree("image show", image)
    table = world("image", "list").out
    assert [row.split()[0] for row in table.splitlines()[1:]] == [
        image["reference"] for image in listed
    ]
    shown = world("image", "show", "image:1", "--json").json
    assert shown in listed
    assert shown["index_digest"] in world("image", "show", "image:1").out
    entries = world("image", "ls", "image:1", "lib", "--json").json
    agree("image ls", entries)
    assert world("image", "ls", "image:1", "lib").out.split()[-1] == entries[0]["name"] == "data"
    assert world("image", "trace", "list", "image:1", "--json").json == []


def test_hints(own_world: World) -> None:
    world = own_world
    (world.path("list.txt")).write_text("/lib/data\nnowhere\n")
    agree(
        "image trace import",
        world("image", "trace", "import", "image:1", "list.txt", "--json").json,
    )
    missing = world("image", "trace", "import", "image:1", "no.txt")
    assert (missing.code, "read the list no.txt" in missing.err) == (10, True)
    exported = world("image", "trace", "export", "image:1", "--json").json
    agree("image trace export", exported)
    assert [one["path"] for one in exported["ranges"]] == ["lib/data"]
    assert world("image", "trace", "export", "image:1").out == "/lib/data\t0\t200704\n"


@pytest.mark.needs("fuse")
def test_mounted_images_and_traces(own_world: World) -> None:
    require("root", "fuse")
    world = own_world
    mounted = world("image", "mount", "image:1", "mnt", "--json").json
    agree("image mount", mounted)
    try:
        status = world("status", "mnt", "--json").json
        agree("status", status, more=_FIGURES)
        assert status["served"][0]["where"][0] in world("status").out
        at_length = world("status", "mnt").out
        assert status["served"][0]["where"][0] in at_length
        assert "from readahead" in at_length
        os.waitpid(os.spawnlp(os.P_NOWAIT, "cat", "cat", str(world.path("mnt/bin/program"))), 0)
    finally:
        unmounted = world("unmount", "mnt", "--json").json
        agree("unmount", unmounted)
    assert unmounted["directory"] == mounted["directory"] == str(world.path("mnt"))
    warmed = world("image", "fetch", "image:1", "--json").json
    agree("image fetch", warmed)
    assert warmed["index_digest"] == mounted["index_digest"]
    served = world("status", "--wait", "20", "--json").json["served"]
    # Besides what others on this machine have mounted.
    assert [one for one in served if one["pid"]] == []
    cached = world("image", "cache", "--verify", "--json").json
    agree("image cache", cached, free=("folders",))
    assert cached["damaged_bytes"] == 0
    assert cached["streams"][0]["digest"][:19] in world("image", "cache").out
    assert world("image", "cache", "--trim", "0", "--json").json["streams"] == []
    traces = world("image", "trace", "list", "image:1", "--json").json
    agree("image trace list", traces)
    assert traces[0]["id"][:12] in world("image", "trace", "list", "image:1").out
    trace = world("image", "trace", "show", "image:1", "--json").json
    agree("image trace show", trace)
    table = world("image", "trace", "show", "image:1").out
    assert [row.split()[0] for row in table.splitlines()[1:]] == [
        access["path"] for access in trace["accesses"]
    ]


def test_snapshots(own_world: World) -> None:
    world = own_world
    created = world("snapshot", "create", "--target", "src", "--name", "x", "--json").json
    agree("snapshot create", created)
    for snapshot in world("snapshot", "list", "--json").json:
        agree("snapshot create", snapshot)
        assert snapshot["fingerprint"][:12] in world("snapshot", "list").out
    for arguments in (("--files",), ()):
        shown = world("snapshot", "show", "x", "--json", *arguments).json
        agree("snapshot show", shown, free=("parts",))
        assert ("files" in shown) == bool(arguments)
    restored = world("snapshot", "restore", "x", "--to", "to", "--json").json
    agree("snapshot create", restored)
    agree("snapshot create", world("snapshot", "fetch", "x", "--json").json)
    cached = world("image", "cache", "--json").json["streams"]
    assert cached
    assert all(one["present_bytes"] == one["stream_bytes"] for one in cached)
    (world.path("src/bin/program")).write_bytes(b"other\n")
    for other, equal in (((), False), (("src/",), False), (("x",), True)):
        compared = world("snapshot", "diff", "x", *other, "--json").json
        agree("snapshot diff", compared)
        assert compared["equal"] is equal
    checked = world("snapshot", "verify", "--all", "--json").json
    agree("snapshot verify", checked)
    assert all(one["ok"] for one in checked)
    exported = world("snapshot", "export", "x", "x.tar.zst", "--json").json
    agree("snapshot export", exported)
    imported = world("snapshot", "import", "x.tar.zst", "--target", "src", "--json").json
    agree("snapshot create", imported)
    for removal in ((), ("--snapshot", "x", "--delete", "--age", "0")):
        collected = world("gc", "--json", *removal).json
        agree("gc", collected)
        assert collected["done"] == bool(removal)
        assert bool(collected["deletions"]) == bool(removal)
    assert world("snapshot", "show", "x").code == 10
    target = world.path("made")
    for hit in (False, True):
        ran = world("snapshot", "run", "--target", target, "--json", "--", "mkdir", target).json
        agree("snapshot run", ran)
        assert ran["hit"] is hit
        target.rmdir()
    for flavour in (False, True):
        declared = ("--input-env", "HOME") if flavour else ()
        explained = world(
            *("snapshot", "explain", *declared, "--target", target, "--json"),
            *("--", "mkdir", target),
        ).json
        agree("snapshot explain", explained, free=("parts",))
        assert bool(explained["differences"]) is flavour


@pytest.mark.needs("fuse")
def test_checkpoint_mounts(own_world: World) -> None:
    require("root", "fuse")
    try:
        agree(
            "checkpoint mount",
            own_world("checkpoint", "mount", "checkpoints", "mnt", "--json").json,
        )
        (shown,) = own_world("status", "mnt", "--json").json["served"]
        assert shown["figures"]["throughput"]
        here = own_world("status", "--json").json
        agree("status", here, more=_FIGURES)
        assert shown["pid"] in [one["pid"] for one in here["served"]]
    finally:
        unmounted = own_world("unmount", "mnt", "--json")
    agree("unmount", unmounted.json)
    # A relative URL is the caller's, wherever the server runs.
    assert own_world.path("checkpoints").is_dir()


def test_report(own_world: World) -> None:
    world = own_world
    program = "import bootseer; bootseer.ready()"
    assert world("run", "--setup", "true", "--", sys.executable, "-c", program).code == 0
    result = world("report", "--json").json
    for row in ("total", "ready"):
        assert set(result.pop(row)) == set(result["stages"][0])
    page = documented()["report"]
    page.remove("total.*`, `ready.*`, `stages[].*")
    found = set(keys(result, "", frozenset(("shift_s",))))
    # A start of one process has no barriers and no peers, and a folder is no server.
    names = ("blame", "missed_barriers", "requests", "stragglers")
    empty = {f"analysis.{name}[]" for name in names}
    assert found - empty <= set(page)
    table = world("report").out
    assert all(stage["name"] in table for stage in result["stages"])


@pytest.mark.needs("fuse")
def test_mounted_snapshots(own_world: World) -> None:
    require("root", "fuse")
    world, target = own_world, own_world.path("made")
    command = ("snapshot", "run", "--mode", "mount", "--target", target, "--", "mkdir", target)
    assert world(*command).code == 0
    target.rmdir()
    restored = world(*command)
    assert restored.code == 0, restored.err
    unmounted = world("unmount", "made", "--json").json
    agree("unmount", unmounted)
    assert unmounted == {"directory": str(target), "still_mounted": False}


def test_settings_and_doctor(own_world: World) -> None:
    settings = own_world("config", "--json").json
    agree("config", settings, free=("",))
    table = own_world("config").out
    assert all(name in table and str(one["value"]) in table for name, one in settings.items())
    findings = own_world("doctor", "--json").json
    agree("doctor", findings)
    assert all(finding["name"] in own_world("doctor").out for finding in findings[:3])


def test_errors_print_no_document(world: World) -> None:
    for arguments in (
        ("image", "show", "absent"),
        ("snapshot", "show", "absent"),
        ("report", "absent"),
    ):
        result = world(*arguments, "--json")
        assert result.code == 10
        assert result.out == ""
