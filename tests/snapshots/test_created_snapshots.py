"""Command line of snapshots: output and exit codes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bootseer.cli.main import main
from bootseer.launch.job import setup_command
from bootseer.snapshots import catalogue
from bootseer.snapshots.manifest import Outside
from bootseer.store import open_store
from testbed.waiting import wait_for


class _Cli:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Run `bootseer snapshot WORDS`; return its exit code and stdout."""
        with pytest.raises(SystemExit) as ended:
            main(["snapshot", *arguments])
        captured = self._capsys.readouterr()
        self.err = captured.err
        assert isinstance(ended.value.code, int)
        return ended.value.code, captured.out

    def json(self, *arguments: str) -> Any:
        code, out = self(*arguments, "--json")
        assert code == 0, self.err
        return json.loads(out)


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> _Cli:
    monkeypatch.setenv("BOOTSEER_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("BOOTSEER_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("BOOTSEER_IMAGE", raising=False)
    monkeypatch.chdir(tmp_path)
    return _Cli(capsys)


def test_a_name_that_moves_is_said(
    tmp_path: Path, cli: _Cli, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: a name moved to another snapshot without a message."""
    (tmp_path / "t").mkdir()
    keys = []
    for text in ("1", "2", "2"):
        (tmp_path / "t/file").write_text(text)
        os.utime(tmp_path / "t/file", (1, 1))
        os.utime(tmp_path / "t", (1, 1))
        code, key = cli("create", "--target", "t", "--name", "mine")
        assert code == 0
        keys.append(key.strip())
    (warning,) = caplog.messages
    assert f"the name mine stood for snapshot {keys[0][:12]} until now" in warning
    assert keys[1] == keys[2] != keys[0]


def test_create_list_show_restore(tmp_path: Path, cli: _Cli) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t/file").write_text("hello")
    (tmp_path / "t/link").symlink_to("file")
    code, key = cli("create", "--target", "t", "--name", "mine")
    assert (code, len(key.strip())) == (0, 64)
    (listed,) = cli.json("list")
    assert listed["fingerprint"] == key.strip()
    assert listed["name"] == "mine"
    assert key[:12] in cli("list")[1]
    shown = cli.json("show", "mine", "--files")
    assert {row["path"] for row in shown["files"]} == {
        str(tmp_path / "t"),
        str(tmp_path / "t/file"),
        str(tmp_path / "t/link"),
    }
    assert "link -> file" in cli("show", key[:6], "--files")[1]
    assert cli("restore", "mine")[0] == 11
    assert "not empty" in cli.err
    (tmp_path / "t").rename(tmp_path / "old")
    assert cli("restore", "mine") == (0, "")
    assert (tmp_path / "t/file").read_text() == "hello"
    # Regression: it was extracted without a message.
    assert cli("restore", "mine", "--to", "elsewhere", "--mode", "mount")[0] == 2
    assert "--to extracts" in cli.err
    assert cli.json("restore", "mine", "--to", "elsewhere")["name"] == "mine"
    assert (tmp_path / "elsewhere/link").readlink() == Path("file")


def test_a_manifest_brings_no_control_codes(
    tmp_path: Path, cli: _Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: paths that a set-up had changed were printed with their control codes."""
    command = ["--target", "t", "--", "sh", "-c", "mkdir t"]
    cli("run", *command)
    with open_store((tmp_path / "store").as_uri()) as store:
        (manifest,) = catalogue.list_all(store)
        outside = Outside(paths=("/usr/\x1b]0;title\x07", "/usr/\n2"))
        evil = replace(manifest, node="\x1b[2J", outside=outside)
        assert catalogue.publish(store, evil, replace=True)
    (tmp_path / "t").rmdir()
    monkeypatch.setenv("BOOTSEER_CACHE_DIR", str(tmp_path / "other"))
    code, out = cli("explain", *command, "x")
    assert code == 0
    assert r"made by \x1b[2J" in out
    assert cli("run", *command)[0] == 0
    assert r"changed on \x1b[2J" in cli.err
    assert "\x1b" not in out + cli.err


def test_a_line_in_quotes_is_read_like_that_of_a_start(tmp_path: Path, cli: _Cli) -> None:
    """Regression: the line was taken for the name of one program, whose directories are unknown."""
    (tmp_path / "r.txt").write_text("a==1\n")
    for line in ("pip install -r r.txt --target lib", "mkdir -p lib; echo x > lib/x"):
        words = ["--target", "lib", "--"]
        keys = set()
        for command in ([line], setup_command(line)):
            code, out = cli("explain", "--json", *words, *command)
            assert code == 0, cli.err
            keys.add(json.loads(out)["fingerprint"])
        assert len(keys) == 1
    assert cli("run", *words, line)[0] == 0
    assert (tmp_path / "lib/x").read_text() == "x\n"
    # A program's path may contain blanks.
    (tmp_path / "my tool").write_text("#!/bin/sh\nmkdir tools\n")
    (tmp_path / "my tool").chmod(0o755)
    assert cli("run", "--target", "tools", "--", "./my tool")[0] == 0
    assert cli("explain", "--", "pip install 'x")[0] == 2


def test_run_and_exit_codes(tmp_path: Path, cli: _Cli) -> None:
    script = "mkdir -p env && echo x > env/x && echo noise"
    command = ["--target", "env", "--", "sh", "-c", script]
    code, out = cli("run", *command)
    assert (code, out) == (0, "")
    assert "running the set-up" in cli.err
    assert cli("run", *command)[0] == 0
    assert "in place" in cli.err
    code, out = cli("run", "--json", *command)
    assert json.loads(out)["hit"] is True
    assert cli("run", "--target", "env3", "mkdir", "-p", "env3")[0] == 0
    assert cli("run", "--target", "env2", "--", "sh", "-c", "exit 42")[0] == 42
    assert cli("run", "--target", "/", "--", "true")[0] == 2
    assert cli("run", "--target", "e", "--input", "missing", "--", "true")[0] == 10


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("restore", "nobody"), 10, "no snapshot called"),
        (("show", "abcdef"), 10, "no snapshot"),
        (("show", "../x"), 2, "neither"),
        (("create", "--target", "missing"), 10, "does not exist"),
        (("create", "--target", "store.txt"), 2, "not a directory"),
        (("create", "--target", ".", "--name", "a/b"), 2, "not a usable name"),
        (("create",), 2, "--target"),
        (("run",), 2, "COMMAND"),
        (("export", "abcdef", "-"), 2, "stdout"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, cli: _Cli, arguments: tuple[str, ...], code: int, words: str
) -> None:
    (tmp_path / "store.txt").write_text("x")
    assert cli(*arguments)[0] == code
    assert words in cli.err
    assert "Traceback" not in cli.err


def test_a_corrupt_manifest_has_its_code(tmp_path: Path, cli: _Cli) -> None:
    (tmp_path / "t").mkdir()
    key = cli("create", "--target", "t")[1].strip()
    file = tmp_path / f"store/snapshots/{key}.json"
    file.chmod(0o600)
    text = file.read_text()
    file.write_text(text[:50])
    assert cli("show", key)[0] == 15
    later = {**json.loads(text), "version": 7}
    # A missing digest may be from another release; a wrong digest is damage.
    del later["digest"]
    file.write_text(json.dumps(later))
    assert cli("restore", key)[0] == 16
    assert "or a newer one" in cli.err


def test_a_terminated_setup_ends_and_gives_its_lease_back(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "BOOTSEER_STORE": str(tmp_path / "store"),
        "BOOTSEER_CACHE_DIR": str(tmp_path / "cache"),
        "BOOTSEER_RUN_DIR": str(tmp_path / "run"),
    }
    script = f"echo $$ > {tmp_path}/pid; exec sleep 60"
    command = ["snapshot", "run", "--target", str(tmp_path / "env"), "--", "sh", "-c", script]
    process = subprocess.Popen([sys.executable, "-m", "bootseer", *command], env=environ)
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        child = int((tmp_path / "pid").read_text())
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), "the end of what was killed")
    assert [path for path in (tmp_path / "store/leases").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("command", ["run", "create", "restore", "list", "show"])
def test_help_has_an_example(cli: _Cli, command: str) -> None:
    code, out = cli(command, "--help")
    assert code == 0
    assert f"Example: bootseer snapshot {command}" in " ".join(out.split())
    assert "--json" in out


_RUN = ("-m", "bootseer", "snapshot", "run")


def _session(number: int) -> list[str]:
    """Return the command lines of the living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == number and state != "Z":
                found.append((path.parent / "cmdline").read_text())
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_that_the_set_up_has_started(
    tmp_path: Path, cli: _Cli, number: signal.Signals
) -> None:
    """Regression: the set-up's children went on writing to a target that was not locked any
    more."""
    script = "mkdir env; (: > up; sleep 300; : > env/late) & wait; true"
    with subprocess.Popen(
        [sys.executable, *_RUN, "--target", "env", "--", "sh", "-c", script],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        wait_for((tmp_path / "up").exists, "the set-up")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -number
    assert f"ended by {number.name}; nothing was stored" in err
    assert _session(process.pid) == []
    assert cli.json("list") == []


def test_an_empty_target_is_refused(cli: _Cli) -> None:
    """Regression: an empty target, as from an unset variable, was the working directory."""
    assert cli("run", "--target", "", "--", "true")[0] == 2
    assert "a target is empty" in cli.err


def test_a_script_that_names_no_interpreter_is_for_sh(tmp_path: Path, cli: _Cli) -> None:
    """Every shell does so; for the kernel the script is no program."""
    script = tmp_path / "make.sh"
    script.write_text('mkdir -p "$1" && echo x > "$1/file"\n')
    script.chmod(0o755)
    assert cli("run", "--target", "env", "--", "./make.sh", "env")[0] == 0
    assert (tmp_path / "env/file").read_text() == "x\n"
    script.write_bytes(b"\x7fELF\0\0of another machine")
    assert cli("run", "--target", "other", "--", "./make.sh", "other")[0] == 126
    assert "Exec format error" in cli.err
