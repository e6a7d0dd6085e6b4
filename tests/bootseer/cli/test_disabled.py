"""The kill switch: BOOTSEER_DISABLE=1 makes a wrapper the command that it was given."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from bootseer.cli import cli
from bootseer.settings.disabled import FLAGS, WRAPPERS, Wrapped, is_disabled, wrapped


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
        "bootseer: BOOTSEER_DISABLE is set: starting the command without a set-up, a set-up, "
        f"the checkpoints on {tmp_path}/mnt\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["bootseer.toml"]


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
    settings = {"bootseer.settings", "bootseer.settings.disabled"}
    assert ours == {"bootseer", "bootseer.__main__"} | settings
    assert not {"click", "msgspec"} & set(done.stdout.split())


def test_a_command_for_an_image_does_not_run_elsewhere_unasked(tmp_path: Path) -> None:
    done = run(tmp_path, "run", "--image", "train:v1", "--", "touch", "ran")
    assert done.returncode == 2
    assert "the command is for the image train:v1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    done = run(tmp_path, "run", "--image", "train:v1", "--", "touch", "ran", value="node")
    assert done.returncode == 0
    assert "without the image" in done.stderr
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("./bootseer.toml", 126), ("./script", 3)]
)
def test_it_ends_as_a_shell_would(tmp_path: Path, program: str, code: int) -> None:
    script = tmp_path / "script"
    script.write_text("exit 3\n")  # For sh, as it names no interpreter.
    script.chmod(0o755)
    assert run(tmp_path, "run", program).returncode == code


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
    for words in (["--version"], ["run", "--help"], ["warm", "--help"], ["config", "show"]):
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
    ("line", "command", "options"),
    [
        ("run -- a -- b", "a -- b", ()),
        ("run a b", "a b", ()),
        ("run --no-index --setup=x a", "a", (("--no-index", ""), ("--setup", "x"))),
        ("-vv --job=j run --env A a", "a", (("--env", "A"),)),
        ("warm /d -- a", "a", ()),
        ("warm --record /d --threads 2 -- a -b", "a -b", (("--record", ""), ("--threads", "2"))),
    ],
)
def test_the_command_of_a_line(
    line: str, command: str, options: tuple[tuple[str, str], ...]
) -> None:
    assert wrapped(line.split()) == Wrapped(tuple(command.split()), options)


@pytest.mark.parametrize("line", ["", "run", "run --", "warm /d", "doctor", "--help run a"])
def test_lines_without_a_command(line: str) -> None:
    assert wrapped(line.split()) is None


def test_the_options_are_those_of_the_command_line() -> None:
    context = click.Context(cli)
    for name in ("", *WRAPPERS):
        command = cli.get_command(context, name) if name else cli
        assert command is not None
        flags = {
            text
            for option in command.params
            if isinstance(option, click.Option) and (option.is_flag or option.count)
            for text in (*option.opts, *option.secondary_opts)
        }
        assert flags - {"--version"} == FLAGS[name]


def test_what_throws_the_switch() -> None:
    assert all(map(is_disabled, ("1", "on", "yes", "true", "node", "please")))
    assert not any(map(is_disabled, (None, "", "0", "off", "No", "false")))
