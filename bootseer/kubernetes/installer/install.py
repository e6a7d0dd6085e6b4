"""Puts our lines into containerd's configuration, has them loaded, and takes them out again.

At every moment the file is the old one or the new one, whole. containerd is restarted only where
what it runs with differs, and only after it has said what it would load from the very text.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bootseer.errors import BootseerError, DeadlineError, UnavailableError
from bootseer.kubernetes.installer.block import (
    Table,
    check_change,
    lines_for,
    new_file,
    parse,
    runtime_in,
    with_block,
    without_block,
)
from bootseer.kubernetes.installer.daemon import TEMPORARY_PREFIX, Daemon
from bootseer.linux.locks import lock_within

RESTART_S = 60.0
_LOCK_S = 120.0
_K3S_TEMPLATE = '{{ template "base" . }}\n'


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to a node."""

    file: Path
    is_file_changed: bool
    is_restarted: bool


def install(daemon: Daemon, address: str, platform: str) -> Change:
    """Have containerd know our snapshotter at `address`, and the runtime class.

    Raises:
        UnsupportedError: containerd cannot be restarted from here. The new file stays, so that a
            restart by hand loads it.
        BootseerError: Any other failure. containerd's configuration is as it was.
    """
    with _locked(daemon) as files:
        plain = without_block(files.loaded_text())
        before = daemon.dump(plain)
        if files.is_new():
            plain = new_file(before["version"])
        lines = lines_for(before, plain, address, platform)
        after = daemon.dump(with_block(plain, lines))
        check_change(before, after, address)
        old = files.read()
        new = with_block(files.head(plain), lines)
        if old != new:
            files.keep_backup(without_block(old or ""))
            files.write(new)
        wanted = runtime_in(after)
        try:
            is_restarted = _have_loaded(daemon, address, wanted)
        except (UnavailableError, DeadlineError):
            if old != new:
                files.write(old)
                with contextlib.suppress(BootseerError):
                    daemon.restart()
            raise
        return Change(files.path, old != new, is_restarted)


def remove(daemon: Daemon, address: str) -> Change:
    """Take our lines out again, to the byte, and have containerd forget them.

    Raises: BootseerError.
    """
    with _locked(daemon) as files:
        old = files.read()
        plain = without_block(old or "")
        # Before anything is changed: what containerd cannot load is left to people.
        rest = daemon.dump(without_block(files.loaded_text()))
        if is_changed := old is not None and plain != old:
            files.write(None if files.is_only_ours(plain) else plain)
            files.drop_backup(plain)
        # What was put there by hand stays.
        is_restarted = not runtime_in(rest) and _have_loaded(daemon, address, {})
        return Change(files.path, is_changed, is_restarted)


def _have_loaded(daemon: Daemon, address: str, runtime: Table) -> bool:
    """Whether it had to be restarted for that. `runtime`: empty for none of ours."""
    if daemon.has_loaded(address, runtime) == bool(runtime):
        return False
    daemon.restart()
    deadline_s = time.monotonic() + RESTART_S
    while True:
        with contextlib.suppress(UnavailableError):
            if daemon.has_loaded(address, runtime) == bool(runtime):
                return True
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"containerd did not come back within {RESTART_S:.0f} s with its new "
                "configuration; the old one is back: see containerd's log on this node"
            )
        time.sleep(0.2)


class _Files:
    """The file that we write: containerd's own, or the template that k3s makes that of."""

    def __init__(self, daemon: Daemon) -> None:
        self._main = daemon.on_node(daemon.config)
        self._is_k3s = "rancher" in daemon.config.parts
        shown = daemon.config
        if self._is_k3s:
            version = parse(self.loaded_text(), str(shown)).get("version")
            shown = shown.with_name(f"config{'-v3' if version == 3 else ''}.toml.tmpl")
        self.path = shown
        self._file = daemon.on_node(shown)
        _remove_left({self._main.parent, self._file.parent})

    def loaded_text(self) -> str:
        """What containerd reads at its start; where it has no file, the least that all versions
        read."""
        try:
            return self._main.read_text()
        except FileNotFoundError:
            return new_file(2)

    def is_new(self) -> bool:
        """Whether containerd has no file, or one that we have made."""
        return without_block(self.loaded_text()) in map(new_file, (2, 3))

    def is_only_ours(self, plain: str) -> bool:
        """Whether there was no file before us, when this is left without our lines."""
        return plain in ((_K3S_TEMPLATE,) if self._is_k3s else map(new_file, (2, 3)))

    def head(self, plain: str) -> str:
        """What stands before our lines in the file that we write."""
        return without_block(self.read() or _K3S_TEMPLATE) if self._is_k3s else plain

    def read(self) -> str | None:
        """The file; None where there is none."""
        try:
            return self._file.read_text()
        except FileNotFoundError:
            return None

    def write(self, text: str | None) -> None:
        """Put it there in one step, on the disk; None: remove it. A link to it stays a link."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            self._file.unlink(missing_ok=True)
        else:
            temporary = self._file.with_name(f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}")
            try:
                with temporary.open("w") as file:
                    with contextlib.suppress(FileNotFoundError):
                        os.fchmod(file.fileno(), self._file.stat().st_mode & 0o7777)
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._file)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        folder = os.open(self._file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def keep_backup(self, text: str) -> None:
        """Keep what was there before us, for people."""
        if text and not self._is_k3s:
            self._backup().write_text(text)

    def drop_backup(self, text: str) -> None:
        """Remove the copy if it is what is there again."""
        with contextlib.suppress(FileNotFoundError):
            if self._backup().read_text() == text:
                self._backup().unlink()

    def _backup(self) -> Path:
        return self._file.with_name(f"{self._file.name}.before-bootseer")


def _remove_left(folders: Iterable[Path]) -> None:
    """Remove the temporary files of installers that were killed. Call it with the lock held."""
    for folder in folders:
        for left in folder.glob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(OSError):
                left.unlink()


@contextlib.contextmanager
def _locked(daemon: Daemon) -> Iterator[_Files]:
    """One installer on a node at a time."""
    folder = daemon.on_node(daemon.config).parent
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_within(fd, _LOCK_S)
        yield _Files(daemon)
    finally:
        os.close(fd)
