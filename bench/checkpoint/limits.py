"""Limits for the links of DataNodes: by the kernel if possible, else by relays.

For the kernel's, the calling thread is put into a network namespace whose loopback has an HTB class
for each DataNode and direction (tc-htb(8)), told apart by the DataNode's port. HTB uses next to no
CPU, while relays copy every byte in Python on the cores that are measured. Other traffic, such as
the NameNode's, is not limited. Traffic between two DataNodes passes the classes of both. One thread
at a time, the one that asked for the limits.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from bench.checkpoint.placement import Moved
from testbed.hdfs.relay import Relays
from testbed.needs import MissingError
from testbed.network import own_network, run_network_command

# Length of the burst that an idle link may send; the same as the relays'.
_BURST_S = 0.01
# An unlimited class has a rate, too: removing the class would lose its count.
_NO_LIMIT_BYTES_PER_S = 100e9
# Bytes of a class before the next one's turn: a packet of loopback.
_QUANTUM_BYTES = 65536
_COUNT = re.compile(r"^class htb 1:([0-9a-f]+) .*\n Sent (\d+) bytes", re.MULTILINE)


class DataNodeLinks(Protocol):
    """Both directions of the links of a cluster's DataNodes."""

    def set_rates(self, rates: Sequence[float | None]) -> None:
        """Set the rates in bytes/s for each direction; None removes a limit."""

    def moved(self) -> Moved:
        """Return the bytes moved so far."""


class Limiter(Protocol):
    """Method of limiting DataNodes."""

    separate_addresses: bool
    """Whether DataNodes must listen at other addresses than clients use (`MiniHdfs`)."""
    note: str
    """Description for readers of the result."""

    def links(
        self, ports: Sequence[int], bytes_per_s: float
    ) -> AbstractContextManager[DataNodeLinks]:
        """Limit the DataNodes that clients reach at these ports, until the block ends.

        Raises: MissingError.
        """


@contextlib.contextmanager
def limiter() -> Iterator[Limiter]:
    """Yield the best limiter that this machine allows.

    Limited servers must be started by the calling thread within the block. Its network may have no
    way out.
    """
    with contextlib.ExitStack() as stack:
        chosen: Limiter
        try:
            stack.enter_context(own_network())
            chosen = TrafficClasses()
        except MissingError as reason:
            stack.close()
            chosen = _WithRelays(str(reason))
        yield chosen


class TrafficClasses:
    """Limiter by HTB on the loopback of the calling thread's network."""

    separate_addresses = False
    note = (
        "each DataNode has an HTB class of the kernel for each direction, on the loopback of a "
        "network of its own; their bytes include TCP's and IP's headers, 0.1 % of packets of 64 KiB"
    )

    def __init__(self) -> None:
        """Set up HTB. Raises: MissingError if the kernel lacks HTB or u32."""
        self._count = 0
        # Loopback loses nothing, but a link's queue can delay an acknowledgement for some ms. TCP's
        # tail loss probe would then send the queue's end a second time.
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_early_retrans").write_text("0")
        _tc(["qdisc add dev lo root handle 1: htb default 0"])
        # An unused port, to see whether the kernel has everything that is needed.
        self.add("sport", 0, None)

    def add(self, end: str, port: int, bytes_per_s: float | None) -> int:
        """Add a class for packets with `port` at that end ("sport", "dport"); return its number."""
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
    def links(self, ports: Sequence[int], bytes_per_s: float) -> Iterator[DataNodeLinks]:
        """Add classes for the ports (see `Limiter`); they end with the network."""
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
        shown = run_network_command(["tc", "-s", "class", "show", "dev", "lo"])
        counts = {int(number, 16): int(count) for number, count in _COUNT.findall(shown)}
        return Moved(
            tuple(counts[number] for number in self._reads),
            tuple(counts[number] for number in self._writes),
        )


class _WithRelays:
    separate_addresses = True

    def __init__(self, reason: str) -> None:
        self.note = (
            "a relay before each DataNode caps it, which takes CPU of the machine that is "
            f"measured (no limits of the kernel: {reason})"
        )

    @contextlib.contextmanager
    def links(self, ports: Sequence[int], bytes_per_s: float) -> Iterator[DataNodeLinks]:
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
    # A burst smaller than a packet is enough: HTB sends a packet if any burst is left, and
    # subtracts its size.
    burst = max(1, int(rate * _BURST_S))
    return (
        f"dev lo parent 1: classid 1:{number:x} htb rate {rate}bps ceil {rate}bps "
        f"burst {burst} cburst {burst} quantum {_QUANTUM_BYTES}"
    )


def _tc(lines: Sequence[str]) -> None:
    run_network_command(["tc", "-batch", "-"], "\n".join(lines) + "\n")
