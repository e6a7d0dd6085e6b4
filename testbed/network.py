"""A network namespace with a loopback of a given rate.

Processes that the calling thread starts inside `own_network` (registry, store, clients) are in the
namespace and reach one another at 127.0.0.1 through a token bucket. The namespace ends with its
last process. Needs root.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from testbed.needs import MissingError

_CLONE_NEWNET = 0x40000000
# The burst must be larger than a packet of loopback, which has up to 64 KiB.
_BURST, _LATENCY = "1mb", "50ms"
_COMMAND_DEADLINE_S = 20


class ShapedLoopback:
    """Loopback device of the calling thread's network, with a rate and a byte count."""

    def set_rate(self, mbit_per_s: int | None) -> None:
        """Set the rate from now on; None removes the limit."""
        subprocess.run(
            ["tc", "qdisc", "del", "dev", "lo", "root"],
            capture_output=True, timeout=_COMMAND_DEADLINE_S, check=False,
        )  # fmt: skip
        if mbit_per_s is not None:
            bucket = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", _BURST, "latency", _LATENCY]
            run_network_command(["tc", "qdisc", "add", "dev", "lo", "root", *bucket])

    def received_bytes(self) -> int:
        """Return the number of bytes sent over loopback so far, both ways, headers included."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "lo":
                return int(counters.split()[0])
        raise MissingError("the network has no loopback")


@contextlib.contextmanager
def own_network() -> Iterator[ShapedLoopback]:
    """Move the calling thread into a new network namespace until the block ends.

    Raises: MissingError.
    """
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise MissingError(f"there is no {tool}; apt install iproute2")
    if os.geteuid() != 0:
        raise MissingError("a network namespace needs root")
    library = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.unshare(_CLONE_NEWNET) != 0:
            raise MissingError(f"no network namespace: {os.strerror(ctypes.get_errno())}")
        try:
            run_network_command(["ip", "link", "set", "lo", "up"])
            yield ShapedLoopback()
        finally:
            library.setns(before, _CLONE_NEWNET)
    finally:
        os.close(before)


@contextlib.contextmanager
def entered(network: Path) -> Iterator[None]:
    """Move the calling thread into an existing network namespace until the block ends.

    Raises: MissingError.
    """
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        enter(network)
        try:
            yield
        finally:
            _set_network(before.fileno())


def enter(network: Path) -> None:
    """Move the calling thread into an existing network namespace. Raises: MissingError."""
    with network.open("rb") as file:
        _set_network(file.fileno())


def _set_network(file: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(file, _CLONE_NEWNET) != 0:
        raise MissingError(f"cannot enter a network: {os.strerror(ctypes.get_errno())}")


def run_network_command(command: list[str], text: str = "") -> str:
    """Run a command that changes or shows the thread's network; return its output.

    `text` is the command's input. Raises: MissingError if the command fails.
    """
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["it failed"]
        raise MissingError(f"{' '.join(command)}: {words[0]}")
    return done.stdout
