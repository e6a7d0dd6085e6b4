"""Every command, every kind of bad input: one sentence, a documented exit code, nothing changed."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Result, World

INVALID, NOT_FOUND, EXISTS, DENIED, NO_SPACE = 2, 10, 11, 12, 13
DEADLINE, CORRUPT, UNKNOWN, UNAVAILABLE = 14, 15, 16, 17


def check(result: Result, code: int | tuple[int, ...], *mentions: str) -> None:
    """The promise about errors."""
    where = f"{result.arguments}: exit {result.code}\n{result.err}"
    assert result.in_time, where
    assert result.code in (code if isinstance(code, tuple) else (code,)), where
    assert "Traceback" not in result.err, where
    assert "internal error" not in result.err, where
    assert result.out == "", where
    lines = result.err.splitlines()
    if lines and lines[0].startswith("Usage: "):
        assert lines[-1].startswith("Error: "), where
        assert sum(line.startswith("Error: ") for line in lines) == 1, where
    else:
        # What is wrong, behind what was found on the way to it.
        assert all(line.startswith("bootseer: warning: ") for line in lines[:-1]), where
        assert lines, where
        assert not lines[-1].startswith("bootseer: warning: "), where
        assert lines[0].startswith("bootseer: "), where
        # The reason, not only that it failed.
        assert len(lines[0]) > 30, where
    for mention in mentions:
        assert mention in result.err, where


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every name below `folder`, with the contents of files; temporaries included."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


# (arguments, exit code, what the message names). Paths are relative to the world.
BAD_ARGUMENTS: list[tuple[tuple[str, ...], int, str]] = [
    # What does not exist at all.
    (("nothing",), INVALID, "nothing"),
    (("--nothing",), INVALID, "--nothing"),
    (("image", "nothing"), INVALID, "nothing"),
    (("image", "trace", "nothing"), INVALID, "nothing"),
    (("snapshot", "nothing"), INVALID, "nothing"),
    (("config", "nothing"), INVALID, "nothing"),
    *(((command, "--nothing"), INVALID, "--nothing") for command in ("mount", "report", "doctor")),
    # Missing arguments.
    *(
        ((*command, *rest), INVALID, "Missing")
        for command, rest in (
            (("run",), ()),
            (("image", "index"), ()),
            (("image", "show"), ()),
            (("image", "ls"), ()),
            (("image", "mount"), ("image:1",)),
            (("image", "run"), ()),
            (("image", "unmount"), ()),
            (("image", "warm"), ()),
            (("image", "trace", "list"), ()),
            (("image", "trace", "show"), ()),
            (("snapshot", "create"), ()),
            (("snapshot", "restore"), ()),
            (("snapshot", "show"), ()),
            (("snapshot", "run"), ("--",)),
            (("mount",), ("store",)),
            (("unmount",), ()),
        )
    ),
    # Settings.
    (("--attempt", "x", "config", "show"), INVALID, "attempt"),
    (("--attempt", "-1", "config", "show"), INVALID, "attempt"),
    (("--job", "../x", "report"), INVALID, "job"),
    (("--workload", "a b", "image", "list"), INVALID, "workload"),
    # image index: what is no image.
    (("image", "index", "absent"), NOT_FOUND, "absent"),
    (("image", "index", "text"), INVALID, "text"),
    (("image", "index", "random"), INVALID, "random"),
    (("image", "index", "empty"), INVALID, "empty"),
    (("image", "index", ""), INVALID, "empty"),
    (("image", "index", "oci:empty"), INVALID, "empty"),
    (("image", "index", "oci:src"), INVALID, "src"),
    (("image", "index", "oci:absent"), NOT_FOUND, "absent"),
    (("image", "index", "oci:text"), NOT_FOUND, "text"),
    (("image", "index", "docker-archive:text"), INVALID, "text"),
    (("image", "index", "docker-archive:src"), INVALID, "src"),
    (("image", "index", "docker-archive:absent"), NOT_FOUND, "absent"),
    (("image", "index", "ftp://host/image"), INVALID, "ftp://"),
    (("image", "index", "/dev/null"), INVALID, "/dev/null"),
    (("image", "index", "src", "--name", "../../x"), INVALID, "../../x"),
    (("image", "index", "src", "--name", ""), INVALID, "--name"),
    # Images that are not there.
    *(
        ((*command, "absent:1", *rest), NOT_FOUND, "absent:1")
        for command, rest in (
            (("image", "show"), ()),
            (("image", "ls"), ()),
            (("image", "mount"), ("mnt",)),
            (("image", "run"), ("--", "true")),
            (("image", "warm"), ()),
            (("image", "trace", "list"), ()),
            (("image", "trace", "show"), ()),
            (("run", "--image"), ("--", "true")),
        )
    ),
    (("image", "show", ""), INVALID, "image"),
    (("image", "show", "../x"), INVALID, "../x"),
    (("image", "show", "image\n:1"), INVALID, "image"),
    (("image", "ls", "image:1", "absent"), NOT_FOUND, "absent"),
    (("image", "ls", "image:1", "bin/program/x"), NOT_FOUND, "bin/program/x"),
    (("image", "trace", "show", "image:1"), NOT_FOUND, "image:1"),
    (("image", "trace", "show", "image:1", "--workload", "../.."), INVALID, ".."),
    # Places to mount on.
    (("image", "mount", "image:1", "absent"), NOT_FOUND, "absent"),
    (("image", "mount", "image:1", "text"), INVALID, "text"),
    (("image", "mount", "image:1", "mnt", "--window", "nan"), INVALID, "nan"),
    (("image", "mount", "image:1", "mnt", "--window", "0"), INVALID, "--window"),
    (("image", "unmount", "mnt"), NOT_FOUND, "mnt"),
    (("image", "unmount", "absent"), NOT_FOUND, "absent"),
    (("image", "unmount", "text"), NOT_FOUND, "text"),
    (("image", "unmount", "/"), NOT_FOUND, "/"),
    (("image", "unmount", "mnt", "--timeout", "nan"), INVALID, "nan"),
    (("image", "status", "mnt"), NOT_FOUND, "mnt"),
    (("image", "status", "--wait", "-1"), INVALID, "--wait"),
    (("image", "status", "--wait", "nan"), INVALID, "nan"),
    (("mount", "store", "absent"), NOT_FOUND, "absent"),
    (("mount", "store", "text"), INVALID, "text"),
    (("mount", "text", "mnt"), INVALID, "text"),
    (("mount", "absent", "mnt", "--read-only"), NOT_FOUND, "absent"),
    (("mount", "store", "mnt", "--stripe-unit", "x"), INVALID, "'x'"),
    (("mount", "store", "mnt", "--stripe-unit", "3"), INVALID, "3 bytes"),
    (("mount", "store", "mnt", "--stripe-unit", "9999999TB"), INVALID, "9999999TB"),
    (("mount", "store", "mnt", "--stripe-count", "0"), INVALID, "0"),
    (("mount", "store", "mnt", "--memory", "1"), INVALID, "1 bytes"),
    (("mount", "store", "mnt", "--lifetime-pid", "-1"), INVALID, "--lifetime-pid"),
    (("unmount", "mnt"), NOT_FOUND, "mnt"),
    (("unmount", "absent"), NOT_FOUND, "absent"),
    (("unmount", "/proc"), NOT_FOUND, "/proc"),
    (("unmount", "mnt", "--timeout", "nan"), INVALID, "nan"),
    # image run.
    (("image", "run", "--runtime", "docker", "image:1"), INVALID, "docker"),
    (("image", "run", "--bind", "x", "image:1", "--", "true"), INVALID, "'x'"),
    (("image", "run", "--bind", "absent:/x", "image:1", "--", "true"), NOT_FOUND, "absent"),
    (("image", "run", "--env", "=", "image:1"), INVALID, "'='"),
    # snapshots.
    (("snapshot", "create", "--target", "absent"), NOT_FOUND, "absent"),
    (("snapshot", "create", "--target", "text"), INVALID, "text"),
    (("snapshot", "create", "--target", "/"), INVALID, "root"),
    (("snapshot", "create", "--target", "src", "--name", "../x"), INVALID, "../x"),
    *(
        (("snapshot", command, *key), code, key[0])
        for command in ("show", "restore")
        for key, code in ((("absent",), NOT_FOUND), (("../../x",), INVALID), (("",), INVALID))
    ),
    (("snapshot", "restore", "env"), EXISTS, "src"),
    (("snapshot", "restore", "env", "--to", "text"), EXISTS, "text"),
    (("snapshot", "restore", "env", "--to", "text/below"), EXISTS, "text"),
    (("snapshot", "run", "--wait", "nan", "--", "true"), INVALID, "nan"),
    (("snapshot", "run", "--wait", "-1", "--", "true"), INVALID, "--wait"),
    (("snapshot", "run", "--target", "t", "--input", "absent", "--", "true"), NOT_FOUND, "absent"),
    (("snapshot", "run", "--max-age", "soon", "--", "true"), INVALID, "soon"),
    (("snapshot", "explain", "--max-age", "-1d", "--", "true"), INVALID, "-1d"),
    (("snapshot", "verify"), INVALID, "--all"),
    (("snapshot", "verify", "--all", "env"), INVALID, "--all"),
    (("snapshot", "verify", "absent"), NOT_FOUND, "absent"),
    (("snapshot", "diff", "absent", "env"), NOT_FOUND, "absent"),
    (("snapshot", "diff", "env", "absent/"), NOT_FOUND, "absent"),
    (("snapshot", "export", "env", "text"), EXISTS, "text"),
    (("snapshot", "export", "env", "absent/x"), NOT_FOUND, "absent"),
    (("snapshot", "import", "random", "--target", "t"), CORRUPT, "random"),
    (("snapshot", "import", "absent", "--target", "t"), NOT_FOUND, "absent"),
    (("snapshot", "import", "random", "--target", "/"), INVALID, "root"),
    # the store.
    (("store", "gc", "--image", "absent"), NOT_FOUND, "absent"),
    (("store", "gc", "--snapshot", "absent", "--yes"), NOT_FOUND, "absent"),
    (("store", "gc", "--keep-last", "-1"), INVALID, "-1"),
    (("store", "gc", "--grace", "nan"), INVALID, "nan"),
    # report, run, demo.
    (("--job", "never", "report"), NOT_FOUND, "never"),
    (("report", "absent"), NOT_FOUND, "absent"),
    (("report", "../../x"), NOT_FOUND, "../../x"),
    (("report", "--attempt", "-1"), INVALID, "--attempt"),
    (("report", "--trace", "src"), INVALID, "src"),
    (("run", "--checkpoint", "x", "--", "true"), INVALID, "URL:DIR"),
    (("run", "--checkpoint", "x:", "--", "true"), INVALID, "URL:DIR"),
    (("run", "--bind", "a:/b", "--", "true"), INVALID, "--image"),
    (("run", "--", "/absent/program"), 127, "/absent/program"),
    (("demo", "--dir", "text"), INVALID, "text"),
    (("demo", "--link-mbit", "0"), INVALID, "--link-mbit"),
    (("demo", "--file-mbyte", "9" * 20), INVALID, "--file-mbyte"),
]


def test_bad_arguments(world: World) -> None:
    before = listing(world.path("store"))
    for arguments, code, mention in BAD_ARGUMENTS:
        check(world(*arguments), code, mention)
    assert listing(world.path("store")) == before
    assert listing(world.path("src")).keys() == {"bin", "bin/program", "lib", "lib/data"}
    assert not list(world.path("mnt").iterdir())


STORE_COMMANDS: list[tuple[str, ...]] = [
    ("image", "list"),
    ("image", "index", "src"),
    ("image", "show", "image:1"),
    ("image", "ls", "image:1"),
    ("image", "mount", "image:1", "mnt"),
    ("image", "run", "image:1", "--", "true"),
    ("image", "warm", "image:1"),
    ("image", "trace", "list", "image:1"),
    ("image", "trace", "show", "image:1"),
    ("snapshot", "create", "--target", "src"),
    ("snapshot", "list"),
    ("snapshot", "show", "env"),
    ("snapshot", "restore", "env"),
    ("run", "--image", "image:1", "--", "true"),
]
BAD_URLS = [
    ("nothing://x", INVALID),
    ("http://[::1", INVALID),
    ("hdfs://[::1", INVALID),
    ("hdfs://127.0.0.1:99999/x", INVALID),
    ("hdfs://127.0.0.1:1/x?deadline_s=0", INVALID),
    ("://x", INVALID),
    ("file://elsewhere/x", INVALID),
    ("ftp://127.0.0.1:1/x", UNAVAILABLE),
    ("text", INVALID),
    ("limit+file:///x?latency_s=-1", INVALID),
]


@pytest.mark.parametrize(("url", "code"), BAD_URLS)
def test_bad_store_urls(own_world: World, url: str, code: int) -> None:
    own_world.forget()
    for arguments in STORE_COMMANDS if url in ("text", "nothing://x") else STORE_COMMANDS[:2]:
        check(own_world("--store", url, *arguments), code, url.partition("?")[0])
    assert not own_world.path("mnt").is_mount()


@pytest.mark.parametrize("command", [STORE_COMMANDS[0], STORE_COMMANDS[10]])
def test_an_unreachable_store_ends_by_the_deadline(world: World, command: tuple[str, ...]) -> None:
    result = world("--store", "hdfs://127.0.0.1:1/x", *command, BOOTSEER_DEADLINE="1")
    check(result, (DEADLINE, UNAVAILABLE), "hdfs://127.0.0.1:1/x")


def test_an_unreachable_checkpoint_folder_ends_by_the_deadline(world: World) -> None:
    result = world("mount", "hdfs://127.0.0.1:1/x", "mnt", BOOTSEER_DEADLINE="1")
    check(result, (DEADLINE, UNAVAILABLE), "hdfs://127.0.0.1:1/x")
    assert not world.path("mnt").is_mount()


# ---- a damaged store -----------------------------------------------------------------------------

IMAGE_READERS: list[tuple[str, ...]] = [
    ("image", "ls", "image:1"),
    ("image", "warm", "image:1"),
    ("image", "mount", "image:1", "mnt"),
]
SNAPSHOT_READERS: list[tuple[str, ...]] = [
    ("snapshot", "show", "env", "--files"),
    ("snapshot", "restore", "env", "--to", "restored"),
]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 0x40
    elif how == "truncate":
        del data[len(data) // 2 :]
    elif how == "empty":
        data.clear()
    elif how == "noise":
        data[:] = os.urandom(len(data))
    elif how == "nul":
        data[:] = bytes(len(data))
    elif how == "deep":
        data[:] = b"[" * 200_000
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "noise", "nul"])
@pytest.mark.parametrize("what", ["indexes", "blobs"])
def test_damaged_objects(own_world: World, what: str, how: str) -> None:
    own_world.forget()
    for path in own_world.path("store").glob(f"{what}/*/*"):
        damage(path, how)
    before = listing(own_world.path("store"))
    readers = [*IMAGE_READERS, *SNAPSHOT_READERS]
    if what == "blobs":
        # Names come from the index; only what reads contents finds a bad blob.
        readers = [IMAGE_READERS[1], SNAPSHOT_READERS[1]]
    for arguments in readers:
        check(own_world(*arguments), CORRUPT)
    assert listing(own_world.path("store")) == before
    assert not own_world.path("restored").exists()
    assert not own_world.path("mnt").is_mount()
    assert not list(own_world.base.glob(".bootseer-*"))


def test_objects_that_were_exchanged(own_world: World) -> None:
    """Each is a whole object, of the wrong name."""
    assert own_world("image", "index", "src/lib", "--name", "other:1").code == 0
    for what in ("indexes", "blobs"):
        own_world.forget()
        one, two, *_ = sorted(own_world.path("store").glob(f"{what}/*/*"))
        data = one.read_bytes(), two.read_bytes()
        one.write_bytes(data[1])
        two.write_bytes(data[0])
        check(own_world("image", "warm", "image:1"), CORRUPT)
        check(own_world("snapshot", "restore", "env", "--to", "restored"), CORRUPT)
        one.write_bytes(data[0])
        two.write_bytes(data[1])
    assert not own_world.path("restored").exists()


@pytest.mark.parametrize("how", ["truncate", "empty", "noise", "nul", "deep"])
def test_damaged_records(own_world: World, how: str) -> None:
    own_world.forget()
    store = own_world.path("store")
    for path in (*store.glob("images/*.json"), *store.glob("snapshots/*.json")):
        damage(path, how)
    for arguments in (*IMAGE_READERS, ("image", "show", "image:1"), *SNAPSHOT_READERS):
        check(own_world(*arguments), CORRUPT)
    # One bad record does not hide the others from a list: it is left out, with a warning or not.
    for arguments in (("image", "list"), ("snapshot", "list")):
        result = own_world(*arguments)
        assert result.code in (0, CORRUPT), result
        assert "Traceback" not in result.err


def test_missing_objects(own_world: World) -> None:
    own_world.forget()
    shutil.rmtree(own_world.path("store/blobs"))
    check(own_world("image", "warm", "image:1"), NOT_FOUND, "blobs")
    check(own_world("snapshot", "restore", "env", "--to", "restored"), NOT_FOUND, "blobs")
    shutil.rmtree(own_world.path("store/indexes"))
    own_world.forget()
    check(own_world("image", "ls", "image:1"), CORRUPT, "index it again")
    check(own_world("image", "mount", "image:1", "mnt"), CORRUPT, "index it again")
    assert not own_world.path("restored").exists()


def test_unknown_format_versions(own_world: World) -> None:
    own_world.forget()
    store = own_world.path("store")
    for path in (*store.glob("images/*.json"), *store.glob("snapshots/*.json")):
        text = path.read_text()
        assert '"version": 1' in text
        path.write_text(text.replace('"version": 1', '"version": 99'))
    for arguments in (*IMAGE_READERS, ("image", "show", "image:1"), *SNAPSHOT_READERS):
        check(own_world(*arguments), UNKNOWN, "99")
    assert not own_world.path("restored").exists()


# ---- permissions and space -----------------------------------------------------------------------


@pytest.fixture
def root_only() -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user, and mounting a small tmpfs, needs root")


@pytest.mark.usefixtures("root_only")
def test_no_permission(own_world: World) -> None:
    """The store, the cache and the run directory belong to root, and are private."""
    world = own_world
    # What nobody may enter down to the world; the world's own folders are what is refused.
    for folder in (world.base, *world.base.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o055)
    world.path("locked").mkdir(mode=0o700)
    world.path("secret").write_text("x")
    world.path("secret").chmod(0o600)
    for arguments in STORE_COMMANDS:
        if arguments[0] == "run":
            continue
        check(world(*arguments, nobody=True), DENIED, "ermission")
    cases: list[tuple[tuple[str, ...], dict[str, str]]] = [
        (("image", "index", "locked"), {}),
        (("image", "index", "secret"), {}),
        (("snapshot", "create", "--target", "locked"), {}),
        (("mount", "locked", "mnt"), {}),
        (("report",), {"BOOTSEER_TIMELINE_DIR": str(world.path("locked/x"))}),
        (("config", "show"), {"BOOTSEER_CONFIG": str(world.path("secret"))}),
    ]
    for case, variables in cases:
        check(world(*case, nobody=True, **variables), (DENIED, 18), "")


@pytest.fixture
def tiny(own_world: World) -> Iterator[Path]:
    """A file system of 128 KiB."""
    folder = own_world.path("tiny")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.usefixtures("root_only")
def test_no_space(own_world: World, tiny: Path) -> None:
    world = own_world
    for arguments in (("image", "index", "src"), ("snapshot", "create", "--target", "src")):
        result = world("--store", (tiny / "store").as_uri(), *arguments)
        check(result, NO_SPACE, str(tiny))
        left = [path for path in (tiny / "store").rglob("*") if path.is_file()]
        assert not left, left
        shutil.rmtree(tiny / "store")
    check(world("snapshot", "restore", "env", "--to", tiny / "restored"), NO_SPACE, str(tiny))
    assert not list(tiny.iterdir())
    (tiny / "fill").write_bytes(bytes(120_000))
    world.path("cache").rename(world.path("old-cache"))
    result = world("--cache-dir", tiny / "cache", "image", "warm", "image:1")
    # The cache has warned by itself before.
    assert result.err.count("\n") == 2
    check(replace(result, err=result.err.splitlines()[-1]), NO_SPACE, str(tiny))


@pytest.mark.parametrize("setting", ["--cache-dir", "--run-dir"])
def test_a_folder_of_the_node_that_cannot_be_made(world: World, setting: str) -> None:
    for below in ("text", "text/below", "/proc/nothing"):
        result = world(setting, below, "image", "mount", "image:1", "mnt")
        check(result, (NOT_FOUND, EXISTS, INVALID, DENIED), below.partition("/")[0])
        assert not world.path("mnt").is_mount()


@pytest.mark.parametrize("content", [b"\x92\xff", b"store = [", b"nothing = 1", b"deadline = true"])
def test_bad_configuration_files(own_world: World, content: bytes) -> None:
    file = own_world.path("bootseer.toml")
    file.write_bytes(content)
    for arguments in (("config", "show"), ("image", "list"), ("run", "--", "true")):
        check(own_world(*arguments), INVALID, "bootseer.toml")
    file.unlink()
    file.mkdir()
    check(own_world("config", "show", BOOTSEER_CONFIG=str(file)), INVALID, "bootseer.toml")
    check(own_world("config", "show", BOOTSEER_CONFIG="/absent"), NOT_FOUND, "/absent")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("BOOTSEER_DEADLINE", "nan"),
        ("BOOTSEER_DEADLINE", "0"),
        ("BOOTSEER_MEMORY", "lots"),
        ("BOOTSEER_MEMORY", "9" * 60),
        ("BOOTSEER_ATTEMPT", "1.5"),
        ("BOOTSEER_JOB", "a/b"),
        ("BOOTSEER_RANK", "x"),
    ],
)
def test_bad_variables(world: World, variable: str, value: str) -> None:
    world.variables[variable] = value
    try:
        check(world("config", "show"), INVALID, variable)
    finally:
        del world.variables[variable]
