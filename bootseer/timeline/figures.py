"""What the kernel says of the node, the network and this process: evidence for where time went.

Samples are taken at the begin and the end of a stage, and their differences noted with it. Each
file that cannot be read is left out. A sample takes some 0.2 ms. Only the standard library is
imported: training processes use it, too.
"""

import os
from collections.abc import Callable, Iterator

from bootseer.base.requests import request_counts

Sample = dict[str, float]

_TICKS = os.sysconf("SC_CLK_TCK")
_SECTOR_BYTES = 512
# What differs by less says nothing.
_SMALLEST = 1e-4


def sample() -> Sample:
    """The counters now, by the names that stages carry; see docs/format/timeline.md."""
    found: Sample = {}
    for read in _READERS:
        try:
            found.update(read())
        except Exception:
            # Whatever a kernel writes, or the Python of an image lacks.
            continue
    return found


def difference(before: Sample, after: Sample) -> Sample:
    """By how much each counter has grown; counters that have not, or that are new, are left out."""
    return {
        name: round(value - before[name], 4)
        for name, value in after.items()
        if name in before and value - before[name] >= _SMALLEST
    }


def _lines(path: str) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 16).decode("ascii", "replace").splitlines()
    finally:
        os.close(descriptor)


def _pressure() -> Iterator[tuple[str, float]]:
    """Seconds in which some task waited for a resource: of this cgroup v2, else of the node.

    Source: Documentation/accounting/psi.rst.
    """
    path = dict(_cgroup_paths()).get("", "")
    # Where version 1 has the controllers, version 2 may be beside them.
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        try:
            yield from _pressures(f"{root}{path}/{{}}.pressure")
            return
        except OSError:
            continue
    yield from _pressures("/proc/pressure/{}")


def _pressures(path: str) -> list[tuple[str, float]]:
    """What the files of the three resources say. Raises: OSError."""
    lines = [(name, _lines(path.format(name))[0]) for name in ("cpu", "io", "memory")]
    return [(f"psi.{name}_s", int(line.rpartition("=")[2]) / 1e6) for name, line in lines]


def _processor() -> Iterator[tuple[str, float]]:
    """Seconds that the hypervisor gave to others, of one processor. Source: proc(5), /proc/stat."""
    fields = _lines("/proc/stat")[0].split()
    yield "cpu.steal_s", int(fields[8]) / _TICKS / (os.cpu_count() or 1)


def _cgroup() -> Iterator[tuple[str, float]]:
    """Seconds for which this cgroup was kept from running. Source: cgroup-v2.rst, cpu.stat."""
    paths = dict(_cgroup_paths())
    for path in (
        f"/sys/fs/cgroup{paths.get('', '')}/cpu.stat",
        f"/sys/fs/cgroup/cpu{paths.get('cpu', '')}/cpu.stat",
    ):
        try:
            fields = dict(line.split() for line in _lines(path))
        except OSError:
            continue
        if "throttled_usec" in fields:
            yield "cpu.throttled_s", int(fields["throttled_usec"]) / 1e6
        elif "throttled_time" in fields:
            yield "cpu.throttled_s", int(fields["throttled_time"]) / 1e9


def _cgroup_paths() -> Iterator[tuple[str, str]]:
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path.rstrip("/")


def _network() -> Iterator[tuple[str, float]]:
    """TCP segments sent again, and bytes of all devices but loopback. Source: proc(5)."""
    names, values = (line.split() for line in _lines("/proc/net/snmp") if line.startswith("Tcp:"))
    yield "tcp.retransmits", int(values[names.index("RetransSegs")])
    received = sent = 0
    for line in _lines("/proc/net/dev")[2:]:
        device, _, counters = line.partition(":")
        if device.strip() != "lo":
            fields = counters.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    yield "net.rx_bytes", received
    yield "net.tx_bytes", sent


def _disk() -> Iterator[tuple[str, float]]:
    """Bytes of whole disks; parts of disks and devices above them would count twice.

    Source: Documentation/admin-guide/iostats.rst.
    """
    read = written = 0
    for line in _lines("/proc/diskstats"):
        fields = line.split()
        if os.path.exists(f"/sys/block/{fields[2]}/device"):
            read, written = read + int(fields[5]), written + int(fields[9])
    yield "disk.read_bytes", read * _SECTOR_BYTES
    yield "disk.written_bytes", written * _SECTOR_BYTES


def _faults() -> Iterator[tuple[str, float]]:
    """Page faults of this process that waited for a disk or a network file system."""
    import resource

    yield "faults.major", resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _requests() -> Iterator[tuple[str, float]]:
    """Requests of this process to servers that nodes share."""
    yield from request_counts().items()


_READERS: tuple[Callable[[], Iterator[tuple[str, float]]], ...] = (
    _pressure,
    _processor,
    _cgroup,
    _network,
    _disk,
    _faults,
    _requests,
)
