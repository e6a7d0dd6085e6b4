"""The control socket: commands, garbage, silence, a watched process, a long path."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import bootseer
from bootseer.errors import DeadlineError, NotFoundError, UnavailableError
from bootseer.linux.processes import ProcessId
from bootseer.served.control import Command, ControlServer, ask
from bootseer.served.ready_socket import new_ready_name
from testbed.waiting import wait_for


def refuse() -> dict[str, object]:
    raise NotFoundError("not today")


class Events:
    """Callbacks that the server has called."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.window = threading.Event()
        self.exited = threading.Event()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    # An address holds 107 bytes.
    deep = tmp_path.joinpath(*["a-rather-long-folder-name"] * 8)
    deep.mkdir(parents=True)
    return deep


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def server(directory: Path, events: Events) -> Iterator[str]:
    name = new_ready_name()
    commands: dict[str, Command] = {"status": lambda: {"answer": 42}, "refuse": refuse}
    opened = ControlServer(directory, commands, name)
    opened.start(events.ready.set, 0.1, events.window.set)
    yield name
    opened.close()
    opened.close()


def test_commands_are_answered_or_refused(directory: Path, server: str) -> None:
    assert ask(directory, "status") == {"answer": 42}
    with pytest.raises(UnavailableError, match="not today"):
        ask(directory, "refuse")
    with pytest.raises(UnavailableError, match="unknown command"):
        ask(directory, "other")
    assert (directory / "control").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("garbage", [b"", b"\n", b"[1]\n", b'{"command": []}\n', b"x" * 9000])
def test_garbage_does_not_disturb(directory: Path, server: str, garbage: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        fd = os.open(directory, os.O_PATH)
        client.connect(f"/proc/self/fd/{fd}/control")
        os.close(fd)
        client.sendall(garbage)
        client.shutdown(socket.SHUT_WR)
        client.recv(1000)
    assert ask(directory, "status") == {"answer": 42}


def test_a_silent_client_is_hung_up_on(directory: Path, server: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        fd = os.open(directory, os.O_PATH)
        client.connect(f"/proc/self/fd/{fd}/control")
        os.close(fd)
        assert ask(directory, "status", timeout_s=60) == {"answer": 42}


def test_ready_and_window(
    directory: Path, server: str, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        # The name is in /proc/net/unix: a process that has only that is a stranger.
        name, _, secret = server.partition(":")
        assert f"@{name}\n" in Path("/proc/net/unix").read_text()
        assert secret not in Path("/proc/net/unix").read_text()
        for message in (b"nonsense", b"ready", b"ready " + b"0" * 32, b"ready " + b"x" * 200):
            client.sendto(message, "\0" + name)
        # A client that is answered after them was read after them.
        assert ask(directory, "status") == {"answer": 42}
        assert not events.ready.is_set()
    monkeypatch.setenv("BOOTSEER_READY_SOCKETS", f"nobody-here:00,{server}")
    bootseer.ready()
    assert events.ready.wait(60)
    assert events.window.wait(60)


def test_a_watched_process(directory: Path, events: Events) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        opened = ControlServer(directory, {"status": dict}, new_ready_name())
        with pytest.raises(ProcessLookupError):
            # Another process has had the id before.
            opened.watch(ProcessId(process.pid, "1"), events.exited.set)
        opened.watch(ProcessId.of(process.pid), events.exited.set)
        opened.start(events.ready.set, 1000, events.window.set)
        assert ask(directory, "status") == {}
        assert not events.exited.is_set()
        process.kill()
        assert events.exited.wait(60)
        wait_for(lambda: ask(directory, "status") == {})
        opened.close()


def fail() -> NoReturn:
    raise ZeroDivisionError("a mistake of ours")


def test_a_mistake_of_ours_is_one_sentence_and_ends_nothing(
    directory: Path, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread once ended, and with it the only way to end the mount."""
    read, write = os.pipe()
    commands: dict[str, Command] = {
        "status": dict,
        "fail": fail,
        "unspeakable": lambda: {"answer": object()},
    }
    server = ControlServer(directory, commands, new_ready_name())
    server.watch_descriptor(read, fail)
    server.start(events.ready.set, 0.0, fail)
    try:
        os.close(write)
        for command, word in (("fail", "unexpected ZeroDivisionError"), ("unspeakable", "TypeErr")):
            with pytest.raises(UnavailableError, match=word):
                ask(directory, command, timeout_s=60)
        assert ask(directory, "status", timeout_s=60) == {}
        # Of the time, of the descriptor, and of the two commands.
        wait_for(lambda: caplog.text.count("Traceback") == 4, "the last traceback")
        assert caplog.text.count("ZeroDivisionError: a mistake") == 3
    finally:
        server.close()


def test_a_server_that_is_gone_or_silent(directory: Path) -> None:
    with pytest.raises(UnavailableError, match="does not answer"):
        ask(directory, "status")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        fd = os.open(directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{fd}/control")
        os.close(fd)
        listener.listen(1)
        with pytest.raises(DeadlineError, match="did not answer"):
            ask(directory, "status", timeout_s=0.2)


def test_a_name_that_somebody_has_taken_does_not_end_the_server(directory: Path) -> None:
    entry = new_ready_name()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as thief:
        thief.bind("\0" + entry.partition(":")[0])
        server = ControlServer(directory, {"status": lambda: {"answer": 42}}, entry)
        server.start(lambda: None, 1000, lambda: None)
        assert ask(directory, "status") == {"answer": 42}
        server.close()
