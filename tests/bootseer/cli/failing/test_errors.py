"""Every kind of bad input of every command: one sentence, its exit code, and no change."""

from dataclasses import replace

import pytest

from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.failing.promises import (
    CORRUPT,
    DEADLINE,
    EXISTS,
    INVALID,
    NOT_FOUND,
    STORE_COMMANDS,
    UNAVAILABLE,
    check,
    listing,
)

# (arguments, exit code, what the message names). Paths are relative to the world.
BAD_ARGUMENTS: list[tuple[tuple[str, ...], int, str]] = [
    # What does not exist at all.
    (("nothing",), INVALID, "nothing"),
    (("--nothing",), INVALID, "--nothing"),
    (("image", "nothing"), INVALID, "nothing"),
    (("image", "trace", "nothing"), INVALID, "nothing"),
    (("snapshot", "nothing"), INVALID, "nothing"),
    (("config", "nothing"), INVALID, "nothing"),
    *(((command, "--nothing"), INVALID, "--nothing") for command in ("report", "doctor")),
    # Missing arguments.
    *(
        ((*command, *rest), INVALID, "Missing")
        for command, rest in (
            (("run",), ()),
            (("image", "index"), ()),
            (("image", "show"), ()),
            (("image", "ls"), ()),
            (("image", "mount"), ("image:1",)),
            (("image", "fetch"), ()),
            (("image", "trace", "list"), ()),
            (("image", "trace", "show"), ()),
            (("snapshot", "create"), ()),
            (("snapshot", "restore"), ()),
            (("snapshot", "show"), ()),
            (("snapshot", "run"), ("--",)),
            (("checkpoint", "mount"), ("store",)),
            (("unmount",), ()),
        )
    ),
    # Settings.
    (("--attempt", "x", "config"), INVALID, "attempt"),
    (("--attempt", "-1", "config"), INVALID, "attempt"),
    (("--job", "../x", "report"), INVALID, "job"),
    (("--workload", "a b", "image", "list"), INVALID, "workload"),
    # image index: files that are not images.
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
            (("image", "fetch"), ()),
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
    (("--workload", "../..", "image", "trace", "show", "image:1"), INVALID, ".."),
    # Places to mount on.
    (("image", "mount", "image:1", "absent"), NOT_FOUND, "absent"),
    (("image", "mount", "image:1", "text"), INVALID, "text"),
    (("unmount", "mnt"), NOT_FOUND, "mnt"),
    (("unmount", "absent"), NOT_FOUND, "absent"),
    (("unmount", "text"), NOT_FOUND, "text"),
    (("unmount", "/"), NOT_FOUND, "/"),
    (("unmount", "mnt", "--timeout", "nan"), INVALID, "nan"),
    (("status", "mnt"), NOT_FOUND, "mnt"),
    (("status", "--wait", "-1"), INVALID, "--wait"),
    (("status", "--wait", "nan"), INVALID, "nan"),
    (("checkpoint", "mount", "store", "absent"), NOT_FOUND, "absent"),
    (("checkpoint", "mount", "store", "text"), INVALID, "text"),
    (("checkpoint", "mount", "text", "mnt"), INVALID, "text"),
    (("checkpoint", "mount", "absent", "mnt", "--read-only"), NOT_FOUND, "absent"),
    (("checkpoint", "mount", "store", "mnt", "--stripe-unit", "x"), INVALID, "'x'"),
    (("checkpoint", "mount", "store", "mnt", "--stripe-unit", "3"), INVALID, "3 bytes"),
    (("checkpoint", "mount", "store", "mnt", "--stripe-unit", "9999999TB"), INVALID, "9999999TB"),
    (("checkpoint", "mount", "store", "mnt", "--stripe-count", "0"), INVALID, "0"),
    (("checkpoint", "mount", "store", "mnt", "--memory", "1"), INVALID, "1 bytes"),
    (("checkpoint", "mount", "store", "mnt", "--lifetime-pid", "-1"), INVALID, "--lifetime-pid"),
    (("unmount", "/proc"), NOT_FOUND, "/proc"),
    (("unmount", "mnt", "--lazy"), INVALID, "--lazy"),
    # run --image.
    (("run", "--image", "image:1", "--runtime", "docker"), INVALID, "docker"),
    (("run", "--runtime", "runc", "--", "true"), INVALID, "--image"),
    (("run", "--user", "x", "--", "true"), INVALID, "--image"),
    (("run", "--image", "image:1", "--bind", "x", "--", "true"), INVALID, "'x'"),
    (("run", "--image", "image:1", "--bind", "absent:/x", "--", "true"), NOT_FOUND, "absent"),
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
    (("snapshot", "run", "--set", "snapshot_max_age=soon", "--", "true"), INVALID, "soon"),
    (("snapshot", "run", "--set", "snapshot_max_age=0", "--", "true"), INVALID, "write off"),
    (("snapshot", "explain", "--set", "snapshot_max_age=-1d", "--", "true"), INVALID, "-1d"),
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
    (("gc", "--image", "absent"), NOT_FOUND, "absent"),
    (("gc", "--snapshot", "absent", "--delete"), NOT_FOUND, "absent"),
    (("gc", "--keep-last", "-1"), INVALID, "-1"),
    (("gc", "--age", "nan"), INVALID, "nan"),
    # report, run, demo.
    (("--job", "never", "report"), NOT_FOUND, "never"),
    (("report", "absent"), NOT_FOUND, "absent"),
    (("report", "../../x"), NOT_FOUND, "../../x"),
    (("report", "--attempt", "-1"), INVALID, "--attempt"),
    (("report", "--trace", "src"), INVALID, "src"),
    *(
        (("run", "--checkpoint", text, "--", "true"), INVALID, "URL:DIR")
        for text in ("", "x", "x:", "/only", "hdfs://h/x", "hdfs://h/x:relative", ":/mnt")
    ),
    (("run", "--bind", "a:/b", "--", "true"), INVALID, "--image"),
    (("run", "--", "/absent/program"), 127, "/absent/program"),
    (("demo", "--dir", "text"), INVALID, "text"),
    (("demo", "--link-mbit", "0"), INVALID, "--link-mbit"),
    (("demo", "--file-mbyte", "9" * 20), INVALID, "--file-mbyte"),
]


def test_bad_arguments(world: World) -> None:
    before = listing(world.path("store"))
    for arguments, code, mention in BAD_ARGUMENTS:
        # A start that fails is a start, whose timeline is for `report`.
        check(world(*arguments, BOOTSEER_PUBLISH_TIMELINES="off"), code, mention)
    assert listing(world.path("store")) == before
    assert listing(world.path("src")).keys() == {"bin", "bin/program", "lib", "lib/data"}
    assert not list(world.path("mnt").iterdir())


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
    waiting, _, error = result.err.partition("\n")
    assert waiting.startswith("bootseer: waiting up to 1 s for a NameNode (127.0.0.1:1: ")
    check(replace(result, err=error), (DEADLINE, UNAVAILABLE), "hdfs://127.0.0.1:1/x")


def test_an_unreachable_checkpoint_folder_ends_by_the_deadline(world: World) -> None:
    result = world("checkpoint", "mount", "hdfs://127.0.0.1:1/x", "mnt", BOOTSEER_DEADLINE="1")
    check(result, (DEADLINE, UNAVAILABLE), "hdfs://127.0.0.1:1/x")
    assert not world.path("mnt").is_mount()


@pytest.mark.parametrize("content", [b"\x92\xff", b"store = [", b"nothing = 1", b"deadline = true"])
def test_bad_configuration_files(own_world: World, content: bytes) -> None:
    file = own_world.path("bootseer.toml")
    file.write_bytes(content)
    for arguments in (("config",), ("image", "list"), ("run", "--", "true")):
        check(own_world(*arguments), INVALID, "bootseer.toml")
    file.unlink()
    file.mkdir()
    check(own_world("config", BOOTSEER_CONFIG=str(file)), INVALID, "bootseer.toml")
    check(own_world("config", BOOTSEER_CONFIG="/absent"), NOT_FOUND, "/absent")


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
        check(world("config"), INVALID, variable)
    finally:
        del world.variables[variable]


def test_an_image_of_a_registry_is_called_by_its_whole_name(world: World) -> None:
    result = world("run", "--image", "debian:12", "--", "true")
    check(result, NOT_FOUND, "registry://debian:12")


@pytest.mark.needs("root", modules=["grpc"])
def test_a_snapshotter_says_where_its_shell_is_stronger(own_world: World) -> None:
    """The cache was once not where the configuration says, without a message."""
    file = own_world.path("bootseer.toml")
    file.write_text(f'cache_dir = "{own_world.path("configured")}"\n')
    # Ends at once: no mount option can hold this.
    result = own_world("snapshotter", "--root", f"{own_world.path('a:b')}")
    assert result.code != 0
    warning, _, rest = result.err.partition("\n")
    assert warning.startswith("bootseer: warning: BOOTSEER_CACHE_DIR is stronger than cache_dir = ")
    assert "configured" in warning
    assert "must not have ':'" in rest
