"""Credentials of a store's URL never show; our files on a node are for their user alone."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.base.redact import public_url, redact
from bootseer.linux.processes import start_time
from testbed.needs import require
from tests.bootseer.cli.conftest import World
from tests.snapshots.support.secret_commands import COMMANDS

SECRET = "s3kr1t"
URLS = [
    f"s3://KEYID:{SECRET}@bucket/x",
    f"s3://KEYID:a/b+{SECRET}@bucket/x",
    f"https://user:{SECRET}@127.0.0.1:1/x",
    f"ftp://user:{SECRET}@127.0.0.1:1/x",
    f"hdfs://{SECRET}@127.0.0.1:99999/x",
    f"hdfs://127.0.0.1:8020/x?token={SECRET}",
    f"nothing://user:{SECRET}@host/x",
    f"file://user:{SECRET}@host/x",
    f"limit+s3://KEYID:{SECRET}@bucket/x?latency_s=-1",
    f"http://user:{SECRET}@[::1/x",
    f"simplecache::s3://KEYID:{SECRET}@bucket/x",
    f"://user:{SECRET}@bucket/x",
]


# Each command opens the store by one function: with these, all are run, with the others a few.
_SERVED = [URLS[0], URLS[2], URLS[5]]


@pytest.mark.parametrize("url", URLS)
def test_no_command_shows_credentials(world: World, url: str) -> None:
    for arguments in (
        ("-vv", "image", "list"),
        ("config",),
        *(
            (
                ("image", "list"),
                ("config", "--json"),
                ("image", "index", "src"),
                ("snapshot", "show", "x"),
                ("run", "--image", "image:1", "--", "true"),
            )
            if url in _SERVED
            else ()
        ),
    ):
        result = world(*arguments, BOOTSEER_STORE=url, BOOTSEER_DEADLINE="1")
        assert SECRET not in result.out + result.err, result
        assert "KEYID" not in result.out + result.err, result
    starts: tuple[tuple[str, ...], ...] = (
        ("checkpoint", "mount", url, "mnt"),
        ("run", "--checkpoint", url, "--", "true"),
        ("run", "--checkpoint", url + ":" + str(world.path("mnt")), "--", "true"),
        ("image", "index", "oci:" + url),
    )
    for words in starts:
        result = world(*words, BOOTSEER_DEADLINE="1")
        assert result.code != 0, result
        assert SECRET not in result.out + result.err, result
    for folder in ("timeline", "run", "cache"):
        for path in world.path(folder).rglob("*"):
            if path.is_file() and not path.name.endswith(".lock"):
                text = path.read_text(errors="replace")
                # What a server is told may be in its state: private, and removed with it.
                assert SECRET not in text or stat.S_IMODE(path.stat().st_mode) == 0o600, path
                assert SECRET not in text or folder == "run", path


def test_set_ups_show_no_secrets_of_their_words(own_world: World) -> None:
    """Manifests, timelines and states have none, either."""
    world = own_world
    made = world.path("made")
    line = f"mkdir -p {made}; HF_TOKEN={SECRET} true --password '{SECRET}' https://h/x?t={SECRET}"
    line += f"; true wandb login {SECRET}; true aws configure set aws_secret_access_key {SECRET}"
    line += f"; true curl --oauth2-bearer {SECRET} -sSu me:{SECRET}; true || mysql -p{SECRET}"
    # All of an installer's script, which ends before them.
    ordinary = "\n".join(COMMANDS).replace("SECRET", SECRET)
    line += f"; touch {made}/x; exit 0\n{ordinary}"
    command = ("--target", made, "--input-env", "MY_TOKEN", "--", "sh", "-c", line)
    for arguments in (
        ("snapshot", "run", *command),
        ("-vv", "snapshot", "run", "--json", *command),
        ("snapshot", "explain", *command),
        ("snapshot", "explain", "--json", *command),
        ("snapshot", "explain", "--json", "--input-env", "NO_SUCH", *command),
        ("snapshot", "list", "--json"),
        ("run", "--target", made, "--setup", line, "--", "true"),
        ("run", "--setup", f"/no/such --token={SECRET}", "--target", made, "--", "true"),
        ("snapshot", "run", "--target", made, "--", f"FOO={SECRET} pip install x"),
        ("snapshot", "run", "--target", made, "--", f"tool-{SECRET}", "x"),
        ("snapshot", "explain", "--json", "--target", made, "--", f"no-{SECRET}", SECRET),
        ("report", "--json"),
    ):
        result = world(*arguments, MY_TOKEN=SECRET)
        assert SECRET not in result.out + result.err, result
    listed = world("snapshot", "list", "--json")
    assert listed.code == 0, listed
    key = listed.json[0]["fingerprint"]
    assert SECRET not in world("snapshot", "show", key).out
    for path in world.base.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.needs("fuse")
def test_servers_show_no_credentials(own_world: World) -> None:
    """Every user can read /proc/mounts and the list of processes."""
    require("root", "fuse")
    world = own_world
    # Of this test alone: other tests give theirs to commands meanwhile.
    secret = f"hidden-{os.urandom(6).hex()}"
    # A rate limit's URL is one that takes a query, and works.
    url = f"limit+file://{world.base}/checkpoints?latency_s=0.0001&account=/tmp/{secret}-account"
    try:
        result = world("checkpoint", "mount", url, "mnt", "--json")
        assert result.code == 0, result
        assert secret not in result.out + result.err
        store = f"limit+file://{world.base}/store?latency_s=0.0001&account=/tmp/{secret}-account"
        world.path("image").mkdir()
        result = world("image", "mount", "image:1", "image", BOOTSEER_STORE=store)
        assert result.code == 0, result
        assert secret not in Path("/proc/self/mounts").read_text()
        for process in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert secret.encode() not in process.read_bytes(), process
            except (FileNotFoundError, ProcessLookupError):
                continue
        status = world("status", "--json")
        assert secret not in status.out
    finally:
        world("unmount", "mnt")
        world("unmount", "image")
        world("status", "--wait", "20")
        Path(f"/tmp/{secret}-account").unlink(missing_ok=True)


@pytest.mark.needs("fuse")
def test_what_is_kept_is_private(own_world: World) -> None:
    require("root", "fuse")
    world = own_world
    for name in ("cache", "run", "timeline", "store"):
        subprocess.run(["rm", "-rf", str(world.path(name))], check=True)
    # A deeper place: parents that we make are ours, too.
    world.variables.update(
        BOOTSEER_CACHE_DIR=str(world.path("new/deep/cache")),
        BOOTSEER_RUN_DIR=str(world.path("other/deep/run")),
        BOOTSEER_TIMELINE_DIR=str(world.path("third/timeline")),
        BOOTSEER_STORE=str(world.path("fourth/store")),
    )
    previous = os.umask(0)
    os.umask(previous)
    target = world.path("made")
    for arguments in (
        ("image", "index", "src", "--name", "image:1"),
        ("image", "mount", "image:1", "mnt"),
        ("status",),
        ("snapshot", "run", "--target", target, "--", "mkdir", target),
        ("run", "--setup", "true", "--", "true"),
    ):
        result = world(*arguments)
        assert result.code == 0, result
    try:
        subprocess.run(["cat", str(world.path("mnt/lib/data"))], capture_output=True, check=True)
        _check_private(world)
    finally:
        world("unmount", "mnt")
    assert world("status", "--wait", "20").code == 0
    assert world("checkpoint", "mount", "checkpoints", "mnt").code == 0
    try:
        _check_private(world)
    finally:
        world("unmount", "mnt")
    _check_private(world)


def _check_private(world: World) -> None:
    seen = 0
    for name in ("new", "other", "third", "fourth/store"):
        top = world.path(name)
        for path in (top, *top.rglob("*")):
            try:
                mode = path.lstat().st_mode
            except FileNotFoundError:
                continue
            assert stat.S_IMODE(mode) & 0o077 == 0, f"{path}: {stat.filemode(mode)}"
            seen += 1
    assert seen > 10


@pytest.mark.needs("root")
def test_other_users_state_is_not_acted_upon(own_world: World) -> None:
    """A user who can write to the run directory must not make root remove or kill."""
    world = own_world
    precious = world.path("precious")
    precious.mkdir()
    planted = world.path("run/services/0123456789abcdef")
    planted.mkdir(parents=True)
    document = (
        '{"id": "0123456789abcdef", "reference": "x", "index_digest": "x", "workload": "x", '
        f'"directory": "{world.path("mnt")}", "pid": 1, "started_ns": 0, "purpose": "run", '
        f'"scratch": "{precious}"}}'
    )
    (planted / "state.json").write_text(document)
    (planted / "lock").touch()
    for path in (planted, *planted.iterdir()):
        os.chown(path, 65534, 65534)
    assert world("image", "mount", "image:1", "mnt").code == 0  # sweeps what dead servers left
    assert world("unmount", "mnt").code == 0
    assert precious.is_dir()
    served = world("status", "--wait", "20", "--json").json["served"]
    assert [one for one in served if one["pid"]] == []

    # The same for a checkpoint mount: its state names a process to be ended.
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        try:
            started = start_time(victim.pid)
            document = document.replace('"run"', f'"checkpoint", "pid_started": "{started}"')
            (planted / "state.json").write_text(
                document.replace('"pid": 1', f'"pid": {victim.pid}')
            )
            os.chown(planted / "state.json", 65534, 65534)
            with (planted / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                result = world("unmount", "mnt")
            assert result.code == 10, result
            assert victim.poll() is None
        finally:
            victim.kill()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/key", "s3://bucket/key"),
        ("s3://bucket/user@host/key", "s3://bucket/user@host/key"),
        ("hdfs://nn:8020/user@x/y", "hdfs://nn:8020/user@x/y"),
        ("s3://a:b@bucket/key?x=y#z", "s3://bucket/key"),
        ("s3://a:b/c@bucket/key", "s3://bucket/key"),
        ("hdfs://user@nn/x/", "hdfs://nn/x"),
        ("/plain/path", "/plain/path"),
        ("file:///", "file:///"),
    ],
)
def test_public_url(url: str, shown: str) -> None:
    assert public_url(url) == shown
    assert public_url(shown) == shown


@pytest.mark.parametrize(
    "text", ["denied: {}", "cannot open /x/{}/y", "{}", "Basic {}=", "https://host/{}", "a{}b"]
)
def test_known_secrets_are_hidden_in_every_message(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's error often repeats the request."""
    monkeypatch.setenv("DB_PASSWORD", "sesame-1")
    monkeypatch.setenv("TOKEN_FILE", "/run/secrets/token")
    monkeypatch.setenv("GIT_TOKEN", "bootseer")
    assert redact(text.format("sesame-1")) == text.format("***")
    # Where a secret lies is no secret, and an ordinary word is one alone only.
    said = "cannot read /run/secrets/token: see bootseer.io"
    assert redact(said) == said
    assert redact("denied: bootseer") == "denied: ***"


def test_the_working_directory_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shell sets PWD and OLDPWD, whose names are also those of a password."""
    monkeypatch.setenv("PWD", "/home/me/train")
    monkeypatch.setenv("OLDPWD", "/home/me/before")
    said = "targets: /home/me/train/env, /home/me/before/env"
    assert redact(said) == said


def test_redact_leaves_ordinary_text() -> None:
    text = "cannot read hdfs://nn:8020/a@b: mail admin@example.org, see https://x.org/a?page=2"
    assert redact(text) == text
    assert redact("GET https://x.org/a?X-Amz-Signature=abc&b=1") == (
        "GET https://x.org/a?X-Amz-Signature=***&b=1"
    )
