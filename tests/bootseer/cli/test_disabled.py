"""BOOTSEER_DISABLE=1 turns a wrapper into the command that it was given."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from bootseer.cli.command_tree import cli
from bootseer.cli.disabled import is_disabled
from bootseer.cli.grammar import behind_settings


def run(
    tmp_path: Path, *words: str, value: str = "1", **options: object
) -> "subprocess.CompletedProcess[str]":
    # Nothing of this can be used; nobody looks at it.
    (tmp_path / "bootseer.toml").write_text("= broken")
    environ = {**os.environ, "BOOTSEER_DISABLE": value, "BOOTSEER_RANK": "x", "HOME": "/proc/none"}
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-m", "bootseer", *words],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


def test_the_command_is_started_at_once(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        *("--store", "hdfs://127.0.0.1:1/x", "-v", "run", "--setup", "touch was-set-up"),
        *("--setup=false", "--checkpoint", f"hdfs://127.0.0.1:1/c:{tmp_path}/mnt", "--"),
        *("sh", "-c", 'echo "$0 $1"; exit 7', "a b", "--image"),
    )
    assert (done.returncode, done.stdout) == (7, "a b --image\n")
    assert done.stderr == (
        "bootseer: BOOTSEER_DISABLE is set: starting the command without --setup, --checkpoint\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bootseer.toml"]


@pytest.mark.usefixtures("fresh_interpreters")
def test_nothing_is_loaded_that_could_be_broken(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "def tell(*ignored): os.write(1, ' '.join(sys.modules).encode()); os._exit(0)\n"
        "os.execvp = tell; sys.argv[1:] = ['run', '--', 'true']\n"
        "from bootseer.__main__ import main; main()"
    )
    environ = {**os.environ, "BOOTSEER_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100
    )
    ours = {name for name in done.stdout.split() if name.partition(".")[0] == "bootseer"}
    switch = {"bootseer.cli", "bootseer.cli.disabled", "bootseer.cli.grammar"}
    assert ours == {"bootseer", "bootseer.__main__"} | switch
    assert not {"click", "msgspec"} & set(done.stdout.split())


def test_a_command_for_an_image_does_not_run_elsewhere_unasked(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--image", "train:v1", "--", "touch", "ran")
    assert done.returncode == 2
    assert "the command is for an image" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    done = run(tmp_path, "run", "--image", "train:v1", "--", "touch", "ran", value="node")
    assert done.returncode == 0
    assert "without --image" in done.stderr
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("./bootseer.toml", 126), ("./script", 3)]
)
def test_it_ends_as_a_shell_would(tmp_path: Path, program: str, code: int) -> None:
    script = tmp_path / "script"
    script.write_text("exit 3\n")  # For sh, as it names no interpreter.
    script.chmod(0o755)
    assert run(tmp_path, "run", "--", program).returncode == code


def test_signals_are_as_without_us(tmp_path: Path) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP))"
    done = run(
        tmp_path,
        *("run", "--", sys.executable, "-c", code),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert "default_int_handler" in done.stdout
    assert done.stdout.rstrip().endswith(str(signal.SIG_IGN))


def test_other_commands_are_not_concerned(tmp_path: Path) -> None:
    (tmp_path / "bootseer.toml").unlink(missing_ok=True)
    environ = {**os.environ, "BOOTSEER_DISABLE": "1"}
    for words in (["--version"], ["run", "--help"], ["warm", "--help"], ["config"]):
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", *words],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            timeout=100,
        )
        assert done.returncode == 0
        assert done.stdout


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("-vv --job=j --verbose run --setup run -- echo -- b", "-- b"),
        ("--workload warm --attempt 2 warm --record / -- echo a -b", "a -b"),
    ],
)
def test_the_command_is_what_follows_the_dashes(tmp_path: Path, line: str, command: str) -> None:
    done = run(tmp_path, *line.split())
    assert (done.returncode, done.stdout) == (0, f"{command}\n")


@pytest.mark.parametrize("line", ["run echo a", "warm / echo a", "run --", "run", "--job run -- a"])
def test_a_line_without_dashes_or_command_is_refused(tmp_path: Path, line: str) -> None:
    done = run(tmp_path, *line.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert "Error: " in done.stderr


def test_options_before_the_subcommand_have_values() -> None:
    """The exceptions are `-v`, which `behind_settings` knows, and options that end the program."""
    options = [one for one in cli.params if isinstance(one, click.Option)]
    flags = {name for one in options if one.is_flag or one.count for name in one.opts}
    assert flags == {"-v", "--verbose", "--version"}
    for one in options:
        if not flags.intersection(one.opts):
            assert behind_settings([one.opts[0], "run", "warm", "x"]) == ["warm", "x"]


def test_what_throws_the_switch() -> None:
    assert all(map(is_disabled, ("1", "on", "yes", "true", "node", "please")))
    assert not any(map(is_disabled, (None, "", "0", "off", "No", "false")))
