"""A network of its own for a case: loopback alone, shaped to a rate, with a count of its bytes.

What the calling thread starts while it lasts is in it: registry, store and clients, who reach each
other at 127.0.0.1 through a token bucket. Nothing remains of it afterwards. Needs root.
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
# Larger than the packets of loopback, which are up to 64 KiB.
_BURST, _LATENCY = "1mb", "50ms"
_COMMAND_DEADLINE_S = 20


class Line:
    """The shaped loopback."""

    def set_rate(self, mbit_per_s: int | None) -> None:
        """From now on; None: as fast as memory."""
        subprocess.run(
            ["tc", "qdisc", "del", "dev", "lo", "root"],
            capture_output=True, timeout=_COMMAND_DEADLINE_S, check=False,
        )  # fmt: skip
        if mbit_per_s is not None:
            bucket = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", _BURST, "latency", _LATENCY]
            configure(["tc", "qdisc", "add", "dev", "lo", "root", *bucket])

    def received_bytes(self) -> int:
        """What came through so far, both ways, headers included."""
        for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "lo":
                return int(counters.split()[0])
        raise MissingError("the network has no loopback")


@contextlib.contextmanager
def own_network() -> Iterator[Line]:
    """Put the calling thread into a new network until the block ends. Raises: MissingError."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise MissingError(f"there is no {tool}; apt install iproute2")
    if os.geteuid() != 0:
        raise MissingError("a network of its own needs root")
    library = ctypes.CDLL(None, use_errno=True)
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if library.unshare(_CLONE_NEWNET) != 0:
            raise MissingError(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        try:
            configure(["ip", "link", "set", "lo", "up"])
            yield Line()
        finally:
            library.setns(before, _CLONE_NEWNET)
    finally:
        os.close(before)


def configure(command: list[str], text: str = "") -> str:
    """What a command prints that sets up or shows the thread's network, with `text` as its input.

    Raises: MissingError.
    """
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        words = done.stderr.strip().splitlines() or ["it failed"]
        raise MissingError(f"{' '.join(command)}: {words[0]}")
    return done.stdout
