"""Pipes that close, signals, odd locales and terminals, as in a user's shell."""

import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios

import pytest

from testbed.needs import require
from testbed.waiting import wait_for
from tests.bootseer.cli.conftest import World

_TIMEOUT_S = 60


def shell(world: World, script: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    """Run `script` in sh, where `bootseer` is the command."""
    command = f'bootseer() {{ "{sys.executable}" -m bootseer "$@"; }}\n{script}'
    return subprocess.run(
        ["sh", "-c", command],
        env={**world.environment, **world.variables, **variables},
        cwd=world.base,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments", ["image list --json", "image list", "image ls image:1", "config", "--help"]
)
def test_a_reader_that_goes_away(world: World, arguments: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)  # closed before the command starts, so that no output fits into the pipe
    with subprocess.Popen(
        [sys.executable, "-m", "bootseer", *arguments.split()],
        env=world.environment,
        cwd=world.base,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(theirs)
        _, error = process.communicate(timeout=_TIMEOUT_S)
    assert (process.returncode, error) == (141, b"")


@pytest.mark.parametrize("arguments", ["image list --json", "image list", "image ls image:1"])
def test_a_full_disk_behind_stdout(world: World, arguments: str) -> None:
    done = shell(world, f"bootseer {arguments} >/dev/full")
    assert done.returncode == 13
    assert done.stderr == b"bootseer: cannot write to stdout: No space left on device\n"


def test_closed_descriptors(own_world: World) -> None:
    for arguments in ("image list --json", "image list", "image ls image:1", "--version"):
        done = shell(own_world, f"bootseer {arguments} >&- <&-")
        assert (done.returncode, done.stderr) == (0, b""), arguments
    assert shell(own_world, "bootseer image show absent >&- 2>&- <&-").returncode == 10
    before = {path.name for path in own_world.path("store").rglob("*")}
    done = shell(own_world, "bootseer image index src --name image:1 >&- 2>&- <&-")
    assert done.returncode == 0
    assert {path.name for path in own_world.path("store").rglob("*")} == before
    # The job, too, must not find a lock of ours in the place of its stdout.
    done = shell(own_world, "bootseer run -- sh -c 'readlink /proc/self/fd/1 >seen' >&- 2>&- <&-")
    assert done.returncode == 0


@pytest.mark.needs("fuse")
def test_mounting_with_closed_descriptors(own_world: World) -> None:
    require("root", "fuse")
    for mount, unmount in (
        ("image mount image:1 mnt", "unmount mnt"),
        ("checkpoint mount checkpoints mnt", "unmount mnt"),
    ):
        try:
            assert shell(own_world, f"bootseer {mount} >&- 2>&- <&-").returncode == 0
            assert own_world.path("mnt").is_mount()
        finally:
            assert shell(own_world, f"bootseer {unmount} >&- 2>&- <&-").returncode == 0
        assert not own_world.path("mnt").is_mount()


@pytest.mark.parametrize("command", ["image index src/lib --name big", "snapshot create"])
def test_interrupting_leaves_nothing(own_world: World, command: str) -> None:
    world = own_world
    world.path("src/lib/data").write_bytes(os.urandom(3_000_000))
    if command.startswith("snapshot"):
        command += f" --target {world.path('src/lib')}"
    temporaries = world.path("store/.tmp")
    shutil.rmtree(temporaries, ignore_errors=True)  # of commands that were killed
    before = {str(path) for path in world.path("store").rglob("*") if path.is_file()}
    # So slow that it is sure to be under way when the signal comes.
    slow = f"limit+file://{world.path('store')}?stream_bytes_per_s=100000"
    with subprocess.Popen(
        [sys.executable, "-m", "bootseer", "--store", slow, *command.split()],
        env=world.environment,
        cwd=world.base,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            wait_for(
                lambda: temporaries.is_dir() and any(temporaries.iterdir()), "a temporary file"
            )
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=_TIMEOUT_S)
        finally:
            process.kill()
    # On a terminal "^C" stands before it, so click begins a new line.
    assert (process.returncode, out, error.strip()) == (130, b"", b"bootseer: interrupted")
    assert {str(path) for path in world.path("store").rglob("*") if path.is_file()} == before
    assert not [path for path in world.path("cache/tmp").glob("*") if path.is_file()]


_PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("variables", [{}, {"LC_ALL": "C"}, _PLAIN_C], ids=["", "C", "ascii"])
def test_names_that_are_no_text(own_world: World, variables: dict[str, str]) -> None:
    world = own_world
    folder = os.fsdecode(b"f\xff\xe9\n")
    world.path(folder).mkdir()
    world.path(folder).joinpath(os.fsdecode(b"n\xfe \x1b[31m")).write_text("x")
    world.variables.update(variables)
    assert shell(world, "bootseer image index f* --name odd:1").returncode == 0
    # A pipe gets the bytes, a program escapes.
    assert b"n\xfe \x1b[31m\n" in shell(world, "bootseer image ls odd:1").stdout
    (entry,) = world("image", "ls", "odd:1", "--json").json
    assert os.fsencode(entry["name"]) == b"n\xfe \x1b[31m"
    assert shell(world, "bootseer snapshot create --target f* --name odd").returncode == 0
    for command in ("snapshot list", "snapshot show odd --files", "snapshot show odd"):
        done = shell(world, f"bootseer {command}")
        assert done.returncode == 0, done.stderr
        assert b"\\xff" in done.stdout
        assert b"\x1b" not in done.stdout
        assert done.stderr == b""
    for command, code in (
        ("image show $(printf 'a\\377')", 2),
        ("image index absent$(printf '\\377\\033[1m')", 10),
        ("--job $(printf '\\377') report", 2),
        ('image index "a\nb"', 10),
        ("snapshot restore odd", 11),
    ):
        done = shell(world, f"bootseer {command}")
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith(b"bootseer: ")
        # A restore says first where it goes.
        assert done.stderr.count(b"\n") == 1 + command.startswith("snapshot restore")
        assert b"\x1b" not in done.stderr
    done = shell(world, "bootseer run -- printf '%s' f*")
    assert done.stdout == b"f\xff\xe9\n"


def on_terminal(world: World, columns: int, *arguments: str, **variables: str) -> bytes:
    """Return the output on a terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "bootseer", *arguments],
        env={**world.environment, "TERM": "xterm-256color", **variables},
        cwd=world.base,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 65536):
                text += piece
        except OSError:  # EIO: the last writer is gone
            pass
        assert process.wait(_TIMEOUT_S) == 0, text
    os.close(ours)
    return text


@pytest.mark.parametrize("columns", [1, 20, 500])
def test_narrow_and_wide_terminals(world: World, columns: int) -> None:
    for arguments in (("image", "list"), ("--help",), ("config",)):
        lines = on_terminal(world, columns, *arguments).decode().splitlines()
        assert lines
        if columns == 20 and arguments[0] != "--help":
            plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
            assert max(map(len, plain)) <= columns


def test_colour_only_where_it_is_wanted(world: World) -> None:
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        for arguments in (("image", "list"), ("image", "index", "src", "--name", "image:1")):
            text = on_terminal(world, 80, *arguments, **variables)
            assert b"\x1b[3" not in text
    # Not on a terminal: none at all.
    assert b"\x1b" not in shell(world, "bootseer image list").stdout


def test_a_terminal_gets_no_control_codes_of_an_image(own_world: World) -> None:
    own_world.path("evil").mkdir()
    own_world.path("evil").joinpath("\x1b]0;title\x07name").write_text("x")
    assert own_world("image", "index", "evil", "--name", "evil:1").code == 0
    text = on_terminal(own_world, 200, "image", "ls", "evil:1")
    assert b"\x1b]" not in text
    assert b"name" in text
