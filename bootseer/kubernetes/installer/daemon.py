"""The containerd that runs on a node, as a pod in the node's process namespace reaches it.

Alone knows its processes. Everything follows from its socket: who listens there, with
which configuration, of which systemd unit. Its files are reached in its own mount namespace, which
is held, so that they are there while it is not.
"""

import contextlib
import os
import re
import socket
import struct
import subprocess
from pathlib import Path

from bootseer.errors import DeadlineError, InvalidInputError, UnavailableError, UnsupportedError
from bootseer.kubernetes import cri
from bootseer.kubernetes.installer.block import NAME, Table, parse
from bootseer.linux.root_paths import resolve_in_root

_CALL_S = 5.0
_COMMAND_S = 60.0
_DEFAULT_CONFIG = "/etc/containerd/config.toml"
TEMPORARY_PREFIX = ".bootseer-"
"""Names of files beside containerd's own that the next installer removes if this one is killed."""
_CREDENTIALS = struct.Struct("3i")


class Daemon:
    """One containerd. Every call has a deadline."""

    def __init__(self, address: Path, restart: str) -> None:
        """`address`: its socket on the node; `restart`: a shell command for the node, in which
        `{pid}` is the process; empty: its systemd unit is restarted. Raises: UnavailableError."""
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
        """Its configuration file, as it calls it."""
        program = Path(os.readlink(f"/proc/{self.pid}/exe").removesuffix(" (deleted)"))
        # k3s is one program with many names.
        self._program = program.with_name("containerd")
        units = re.findall(r"/([^/\n]+\.service)", Path(f"/proc/{self.pid}/cgroup").read_text())
        self._unit = units[-1] if units else ""
        self._root = os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY)
        self._mounts = os.open(f"/proc/{self.pid}/ns/mnt", os.O_RDONLY)

    def on_node(self, path: Path) -> Path:
        """Where this process finds a file of the node: the one that links on the way to it name.

        Raises: InvalidInputError, for a link that leads nowhere.
        """
        # The kernel takes an absolute link from this process's own root, which is not the node's.
        root = Path(f"/proc/self/fd/{self._root}")
        for named in (*reversed(path.parents), path):
            entry = resolve_in_root(root, str(named.parent)) / named.name
            if entry.is_symlink() and not resolve_in_root(root, str(named)).exists():
                raise InvalidInputError(
                    f"{named} on this node is a symbolic link that leads nowhere: mend or remove it"
                )
        return resolve_in_root(root, str(path))

    def dump(self, text: str) -> Table:
        """What containerd would load from a configuration file with this text, put beside its own.

        Raises: UnsupportedError, with what containerd says.
        """
        trial = self.config.with_name(f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}.toml")
        place = self.on_node(trial)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        try:
            command = [self._program, "--config", trial, "config", "dump"]
            done = self._on_node(list(map(str, command)), "ask containerd what it would load")
        finally:
            place.unlink(missing_ok=True)
        if done.returncode != 0:
            raise UnsupportedError(
                f"containerd refuses its configuration: {_last_line(done.stderr)}"
            )
        return parse(done.stdout, "what containerd prints of its configuration")

    def has_loaded(self, address: str, runtime: Table) -> bool:
        """Whether it runs with our proxy plugin and this runtime class; where that is empty,
        whether it runs with anything of ours. Raises: UnavailableError."""
        plugin, loaded = self.loaded()
        if not runtime:
            return bool(plugin or loaded)
        # Both have zeros for what nobody has set, but not the same of them.
        options = {name: value for name, value in runtime.get("options", {}).items() if value}
        had = {name: value for name, value in (loaded.get("options") or {}).items() if value}
        return plugin == address and loaded.get("snapshotter") == NAME and had == options

    def loaded(self) -> tuple[str, Table]:
        """The address of our proxy plugin, and our runtime class, as it runs; empty: it has none.

        Raises: UnavailableError.
        """
        runtime = cri.runtimes(self._address).get(NAME) or {}
        return cri.plugin_address(self._address, NAME), runtime

    def restart(self) -> None:
        """Ask for a restart; containers go on. Raises: UnsupportedError, DeadlineError."""
        if self._restart:
            with contextlib.suppress(UnavailableError):
                self.pid = self._listener()
            command = ["sh", "-c", self._restart.replace("{pid}", str(self.pid))]
        elif self._unit:
            command = ["systemctl", "restart", self._unit]
        else:
            raise UnsupportedError(
                "containerd is no service of systemd on this node: restart it there, or give a "
                "command (containerd.restartCommand)"
            )
        done = self._on_node(command, "restart containerd")
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
            raise UnsupportedError("containerd's process is not seen here: the pod needs hostPID")
        return pid

    def _on_node(self, command: list[str], what: str) -> "subprocess.CompletedProcess[str]":
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
    return (text.strip().splitlines() or ["it says nothing"])[-1][:500]
