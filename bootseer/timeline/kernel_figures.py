"""Counters of the kernel for the node, the network and this process, as evidence in stages.

A stage samples them at its begin and its end, and records the differences. A file that cannot be
read is left out. A sample takes about 0.2 ms. Imports only the standard library, since training
processes use it, too.
"""

import os
from collections.abc import Callable, Iterator

from bootseer.base.requests import request_counts

Sample = dict[str, float]

_TICKS = os.sysconf("SC_CLK_TCK")
_SECTOR_BYTES = 512
# Smaller differences are left out.
_SMALLEST = 1e-4


def sample() -> Sample:
    """Return the current counters, by the names that stages use; see docs/format/timeline.md."""
    found: Sample = {}
    for read in _READERS:
        try:
            found.update(read())
        except Exception:
            # The kernel's format, or the Python of an image, may differ from what is expected.
            continue
    return found


def difference(before: Sample, after: Sample) -> Sample:
    """Return the growth of each counter; leave out counters that are new or have not grown."""
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
    """Yield seconds in which a task of the cgroup (v2) or node waited for a resource.

    Source: Documentation/accounting/psi.rst.
    """
    path = dict(_cgroup_paths()).get("", "")
    # If the controllers are on cgroup v1, v2 may be mounted as "unified".
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        try:
            yield from _pressures(f"{root}{path}/{{}}.pressure")
            return
        except OSError:
            continue
    yield from _pressures("/proc/pressure/{}")


def _pressures(path: str) -> list[tuple[str, float]]:
    lines = [(name, _lines(path.format(name))[0]) for name in ("cpu", "io", "memory")]
    return [(f"psi.{name}_s", int(line.rpartition("=")[2]) / 1e6) for name, line in lines]


def _processor() -> Iterator[tuple[str, float]]:
    """Yield the seconds that the hypervisor gave to others, per processor. Source: proc(5)."""
    fields = _lines("/proc/stat")[0].split()
    yield "cpu.steal_s", int(fields[8]) / _TICKS / (os.cpu_count() or 1)


def _cgroup() -> Iterator[tuple[str, float]]:
    """Yield the seconds in which this cgroup was throttled. Source: cgroup-v2.rst, cpu.stat."""
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
    """Yield retransmitted TCP segments, and bytes of all devices but loopback. Source: proc(5)."""
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
    """Yield bytes of whole disks; partitions and stacked devices would count twice.

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
    """Yield the page faults of this process that waited for a disk or a network file system."""
    import resource

    yield "faults.major", resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _requests() -> Iterator[tuple[str, float]]:
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
