"""Limits for the links of DataNodes: the kernel's where it can, else relays.

The kernel's: the calling thread is put into a network of its own, whose loopback has an HTB class
for each DataNode and direction (tc-htb(8)), told apart by the DataNode's port. They take next to no
CPU, while relays copy every byte in Python on the very cores that are measured. Everybody else's
traffic, such as the NameNode's, passes freely. A DataNode that forwards to another one is to that
one what a client is, with both. One thread at a time, the one that asked for the limits.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from bench.checkpoint.placement import Moved
from testbed.hdfs.relay import Relays
from testbed.line import configure, own_network
from testbed.needs import MissingError

# What an idle link may send at once; relays have the same.
_BURST_S = 0.01
# A class has a rate at all times, since it keeps its count only as long as it is there.
_NO_LIMIT_BYTES_PER_S = 100e9
# Of one class before it is the next one's turn: a packet of loopback.
_QUANTUM_BYTES = 65536
_COUNT = re.compile(r"^class htb 1:([0-9a-f]+) .*\n Sent (\d+) bytes", re.MULTILINE)


class Links(Protocol):
    """Both directions of the links of a cluster's DataNodes."""

    def set_rates(self, rates: Sequence[float | None]) -> None:
        """In bytes/s each way, from now on; None: no limit."""

    def moved(self) -> Moved:
        """What went over them so far."""


class Limiter(Protocol):
    """A way of limiting DataNodes."""

    apart: bool
    """Whether DataNodes must listen where clients do not ask, as `MiniHdfs(apart=True)`."""
    note: str
    """What it is, for readers of the result."""

    def links(self, ports: Sequence[int], bytes_per_s: float) -> AbstractContextManager[Links]:
        """Limit the DataNodes that clients reach at these ports, until the block ends.

        Raises: MissingError.
        """


@contextlib.contextmanager
def limiter() -> Iterator[Limiter]:
    """The best that this machine allows, until the block ends.

    What is to be limited is started by the calling thread within the block, whose network may
    lead nowhere else.
    """
    with contextlib.ExitStack() as stack:
        chosen: Limiter
        try:
            stack.enter_context(own_network())
            chosen = Classes()
        except MissingError as reason:
            stack.close()
            chosen = _WithRelays(str(reason))
        yield chosen


class Classes:
    """HTB on the loopback of the calling thread's network, for any number of clusters."""

    apart = False
    note = (
        "each DataNode has an HTB class of the kernel for each direction, on the loopback of a "
        "network of its own; their bytes include TCP's and IP's headers, 0.1 % of packets of 64 KiB"
    )

    def __init__(self) -> None:
        """Raises: MissingError when the kernel lacks HTB or u32."""
        self._count = 0
        # Nothing is lost here. The end of what a link has queued must not be sent a second time
        # because it is not acknowledged within a few ms, as TCP's tail loss probe would.
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")
        _tc(["qdisc add dev lo root handle 1: htb default 0"])
        # Nobody's port: says whether the kernel has all that is needed.
        self.add("sport", 0, None)

    def add(self, end: str, port: int, bytes_per_s: float | None) -> int:
        """A class for packets with `port` at that end ("sport", "dport"); returns its number."""
        self._count += 1
        name = f"1:{self._count:x}"
        match = f"match ip {end} {port} 0xffff"
        _tc(
            [
                f"class add {_class(self._count, bytes_per_s)}",
                f"filter add dev lo parent 1: protocol ip prio 1 u32 {match} flowid {name}",
            ]
        )
        return self._count

    @contextlib.contextmanager
    def links(self, ports: Sequence[int], bytes_per_s: float) -> Iterator[Links]:
        """See `Limiter`. The classes end with the network."""
        yield _ClassLinks(
            [self.add("sport", port, bytes_per_s) for port in ports],
            [self.add("dport", port, bytes_per_s) for port in ports],
        )


class _ClassLinks:
    def __init__(self, reads: list[int], writes: list[int]) -> None:
        self._reads, self._writes = reads, writes

    def set_rates(self, rates: Sequence[float | None]) -> None:
        _tc(
            [
                f"class change {_class(number, rate)}"
                for numbers in (self._reads, self._writes)
                for number, rate in zip(numbers, rates, strict=True)
            ]
        )

    def moved(self) -> Moved:
        shown = configure(["tc", "-s", "class", "show", "dev", "lo"])
        counts = {int(number, 16): int(count) for number, count in _COUNT.findall(shown)}
        return Moved(
            tuple(counts[number] for number in self._reads),
            tuple(counts[number] for number in self._writes),
        )


class _WithRelays:
    apart = True

    def __init__(self, reason: str) -> None:
        self.note = (
            "a relay before each DataNode caps it, which takes CPU of the machine that is "
            f"measured (no limits of the kernel: {reason})"
        )

    @contextlib.contextmanager
    def links(self, ports: Sequence[int], bytes_per_s: float) -> Iterator[Links]:
        with Relays(list(ports), bytes_per_s) as relays:
            yield _RelayLinks(relays, len(ports))


class _RelayLinks:
    def __init__(self, relays: Relays, count: int) -> None:
        self._relays, self._each = relays, range(count)

    def set_rates(self, rates: Sequence[float | None]) -> None:
        for index, rate in enumerate(rates):
            self._relays.set_rate(index, rate)

    def moved(self) -> Moved:
        relays = self._relays
        return Moved(
            tuple(map(relays.read_bytes, self._each)), tuple(map(relays.written_bytes, self._each))
        )


def _class(number: int, bytes_per_s: float | None) -> str:
    rate = int(bytes_per_s or _NO_LIMIT_BYTES_PER_S)
    # Less than a packet is enough: HTB lets one go when anything is left, and takes its size off.
    burst = max(1, int(rate * _BURST_S))
    return (
        f"dev lo parent 1: classid 1:{number:x} htb rate {rate}bps ceil {rate}bps "
        f"burst {burst} cburst {burst} quantum {_QUANTUM_BYTES}"
    )


def _tc(lines: Sequence[str]) -> None:
    configure(["tc", "-batch", "-"], "\n".join(lines) + "\n")
