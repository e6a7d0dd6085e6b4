"""containerd's process on a node, as seen from a pod in the node's process namespace.

The socket's listener gives the process, its configuration file and its systemd unit. Files are
reached through the process's mount namespace, which is kept open, so that they stay reachable while
containerd restarts.
"""

import contextlib
import os
import re
import socket
import struct
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from bootseer.errors import DeadlineError, InvalidInputError, UnavailableError, UnsupportedError
from bootseer.kubernetes import containerd
from bootseer.linux.root_paths import resolve_in_root

NAME = "bootseer"
"""Name of the proxy plugin, the runtime handler, and the snapshotter."""
Table = dict[str, Any]

_CALL_S = 5.0
_COMMAND_S = 60.0
_DEFAULT_CONFIG = "/etc/containerd/config.toml"
TEMPORARY_PREFIX = ".bootseer-"
"""Prefix of temporary files beside containerd's own; the next installer removes leftovers."""
_CREDENTIALS = struct.Struct("3i")


def parse(text: str, what: str) -> Table:
    """Parse TOML that `what` describes.

    Raises: InvalidInputError.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{what} is not valid TOML: {error}; correct it first") from error


class ContainerdDaemon:
    """Process of containerd. Every call has a deadline."""

    def __init__(self, address: Path, restart: str) -> None:
        """Find the process that listens on a socket.

        Args:
            address: containerd's socket on the node.
            restart: Shell command that restarts containerd, in which `{pid}` stands for its
                process id. Empty: restart its systemd unit.

        Raises: UnavailableError, UnsupportedError.
        """
        self._address = address
        self._restart = restart
        self.pid = self._listener()
        words = Path(f"/proc/{self.pid}/cmdline").read_bytes().split(b"\0")
        named = [
            os.fsdecode(words[number + 1]) if word in (b"-c", b"--config") else os.fsdecode(value)
            for number, word in enumerate(words)
            for _, _, value in [word.partition(b"=")]
            if word in (b"-c", b"--config") or word.startswith((b"--config=", b"-c="))
        ]
        folder = os.readlink(f"/proc/{self.pid}/cwd")
        self.config = Path(folder, named[-1] if named else _DEFAULT_CONFIG)
        """Path of the configuration file in containerd's own mount namespace."""
        program = Path(os.readlink(f"/proc/{self.pid}/exe").removesuffix(" (deleted)"))
        # The program of k3s is k3s itself, with a link named containerd beside it.
        self._program = program.with_name("containerd")
        units = re.findall(r"/([^/\n]+\.service)", Path(f"/proc/{self.pid}/cgroup").read_text())
        self._unit = units[-1] if units else ""
        self._root = os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY)
        self._mounts = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)

    def on_node(self, path: Path) -> Path:
        """Return the path by which this process reaches a file of the node, with links resolved.

        Raises: InvalidInputError if a link is dangling.
        """
        # The kernel would resolve an absolute link from this process's root, not from the node's.
        root = Path(f"/proc/self/fd/{self._root}")
        for named in (*reversed(path.parents), path):
            entry = resolve_in_root(root, str(named.parent)) / named.name
            if entry.is_symlink() and not resolve_in_root(root, str(named)).exists():
                raise InvalidInputError(
                    f"{named} on this node is a dangling symbolic link: correct or remove it"
                )
        return resolve_in_root(root, str(path))

    def dump(self, text: str) -> Table:
        """Return the configuration that containerd would load from a file with this text.

        Raises: UnsupportedError with containerd's own message.
        """
        trial = self.config.with_name(f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}.toml")
        place = self.on_node(trial)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        try:
            command = [self._program, "--config", trial, "config", "dump"]
            done = self._run_on_node(list(map(str, command)), "parse the configuration")
        finally:
            place.unlink(missing_ok=True)
        if done.returncode != 0:
            raise UnsupportedError(
                f"containerd refuses its configuration: {_last_line(done.stderr)}"
            )
        return parse(done.stdout, "containerd's dump of its configuration")

    def has_loaded(self, address: str, runtime: Table) -> bool:
        """Return whether containerd runs with Bootseer's proxy plugin and this runtime.

        For an empty `runtime`: whether it runs with anything of Bootseer's.

        Raises: UnavailableError.
        """
        plugin, loaded = self.loaded()
        if not runtime:
            return bool(plugin or loaded)
        # Unset options may be zero in one table and missing in the other.
        options = {name: value for name, value in runtime.get("options", {}).items() if value}
        had = {name: value for name, value in (loaded.get("options") or {}).items() if value}
        return plugin == address and loaded.get("snapshotter") == NAME and had == options

    def loaded(self) -> tuple[str, Table]:
        """Return the loaded address of Bootseer's proxy plugin and its loaded runtime, or empty."""
        runtime = containerd.runtimes(self._address).get(NAME) or {}
        return containerd.plugin_address(self._address, NAME), runtime

    def restart(self) -> None:
        """Restart containerd; containers keep running.

        Raises: UnsupportedError, DeadlineError.
        """
        if self._restart:
            with contextlib.suppress(UnavailableError):
                self.pid = self._listener()
            command = ["sh", "-c", self._restart.replace("{pid}", str(self.pid))]
        elif self._unit:
            command = ["systemctl", "restart", self._unit]
        else:
            raise UnsupportedError(
                "containerd is not a systemd service on this node: restart it there, or set a "
                "command (containerd.restartCommand)"
            )
        done = self._run_on_node(command, "restart containerd")
        if done.returncode != 0:
            raise UnsupportedError(f"cannot restart containerd: {_last_line(done.stderr)}")

    def _listener(self) -> int:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(_CALL_S)
                client.connect(str(self._address))
                data = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError as error:
            raise UnavailableError(
                f"no containerd answers on {self._address} of this node: {error.strerror}; name "
                "its socket (containerd.socket)"
            ) from error
        pid: int = _CREDENTIALS.unpack(data)[0]
        if pid == 0:
            raise UnsupportedError(
                "containerd's process is not visible here: the pod needs hostPID"
            )
        return pid

    def _run_on_node(self, command: list[str], what: str) -> "subprocess.CompletedProcess[str]":
        enter = [
            "nsenter",
            f"--mount=/proc/self/fd/{self._mounts}",
            f"--root=/proc/self/fd/{self._root}",
        ]
        try:
            return subprocess.run(
                [*enter, "--wd=/", "--", *command],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S,
                pass_fds=(self._mounts, self._root),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"cannot {what} within {_COMMAND_S:.0f} s: {command[0]}") from error
        except OSError as error:
            raise UnsupportedError(f"cannot {what}: {error}") from error


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:500]
