"""Nodes in network namespaces whose lines are limited both ways, and a store behind such a line.

A node is a fork of this process in a namespace of its own, so that 64 of them begin within a
second. Each is a port of a bridge, which is a namespace as well; with racks, of a bridge for each
rack, joined by uplinks that are limited, too. Nothing remains afterwards. Needs root.
"""

import contextlib
import json
import os
import random
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.fanout.hostile import serve_hostile
from bootseer.base.content_digest import content_digest
from bootseer.fanout.exchange import Exchange
from bootseer.fanout.objects import ChunkList, chunk_list
from bootseer.fanout.trees import STORE, Place, Trees
from testbed.needs import MissingError, require
from testbed.network import enter, run_network_command
from testbed.waiting import pause

_PORT = 7000
_KEY = bytes(range(32))
_LIMIT_S = 100.0
_RANGE = struct.Struct("!QI")
# Larger packets would be dropped by tbf. A queue of 100 packets of 9000 bytes.
_GSO, _QUEUE = "gso_max_size 9000", 100


@dataclass(frozen=True)
class Scenario:
    """Parameters of one measurement."""

    nodes: int
    size: int = 16 << 20
    chunk_bytes: int = 64 << 10
    mbit: float | None = 16.0
    """Rate of each line, both ways; None: not limited."""
    racks: int = 1
    lost: Sequence[int] = ()
    frozen: Sequence[int] = ()
    slow: Sequence[int] = ()
    """Nodes whose lines drop to a tenth."""
    hostile: Sequence[int] = ()
    fault_s: float = 2.0
    joined_s: Mapping[int, float] = field(default_factory=dict)
    absent: Sequence[int] = ()

    @property
    def places(self) -> list[Place]:
        """The rack of each node."""
        return [(f"rack{n * self.racks // self.nodes}",) for n in range(self.nodes)]


@dataclass(frozen=True)
class Report:
    """Result for the nodes without a fault."""

    took_s: dict[int, float]
    """Seconds from a node's beginning until it had everything."""
    first_s: dict[int, float]
    """Seconds until its first chunk."""
    cpu_s: dict[int, float]
    wrong: int
    """Nodes whose file is not the object."""
    unfinished: int
    copies: float
    """Bytes that the store sent, by the size of the object."""
    uplink_copies: float
    """Bytes that came by the busiest uplink of a rack, by the size of the object."""
    fed: list[str]
    """Sources of each node, as sentences."""


class Site:
    """Network namespaces of the nodes and the store, and the lines between them."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._name = f"bsf{os.getpid()}"
        self._core = f"{self._name}-core"
        self._hosts = [*range(scenario.nodes), STORE]
        self._gso = _GSO if scenario.mbit is not None else ""

    def netns(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self._name}-{'store' if host == STORE else host}"

    def _switch(self, host: int) -> str:
        if host == STORE or self._scenario.racks == 1:
            return self._core
        return f"{self._name}-{self._scenario.places[host][0]}"

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host."""
        return f"10.214.0.{host + 2}"

    def make(self) -> None:
        """Raises: MissingError."""
        switches = sorted({self._switch(host) for host in self._hosts})
        for switch in switches:
            run_network_command(["ip", "netns", "add", switch])
            _batch(switch, ["link add br0 type bridge", "link set br0 up"])
        for rack in switches:
            if rack != self._core:
                port = rack.rpartition("-")[2]
                _batch(rack, [f"link add uplink type veth peer name {port} netns {self._core}"])
                _batch(rack, [f"link set uplink {self._gso} master br0 up"])
                _batch(self._core, [f"link set {port} {self._gso} master br0 up"])
                self._limit(rack, "uplink")
                self._limit(self._core, port)
        for host in self._hosts:
            self._make_host(host)

    def _make_host(self, host: int) -> None:
        inside, switch, port = self.netns(host), self._switch(host), f"p{host + 1}"
        run_network_command(["ip", "netns", "add", inside])
        _batch(inside, [f"link add e0 {self._gso} type veth peer name {port} netns {switch}"])
        _batch(switch, [f"link set {port} {self._gso} master br0 up"])
        address = f"addr add {self.address(host)}/24 dev e0"
        _batch(inside, [address, "link set lo up", f"link set e0 {self._gso} up"])
        self._limit(switch, port)
        self._limit(inside, "e0")

    def _limit(self, netns: str, device: str, share: float = 1.0, verb: str = "add") -> None:
        if self._scenario.mbit is None:
            return
        rate = f"{int(self._scenario.mbit * share * 1000)}kbit"
        tbf = f"qdisc {verb} dev {device} root handle 1: tbf rate {rate} burst 32kb latency 1s\n"
        if verb == "add":
            tbf += f"qdisc add dev {device} parent 1: handle 10: pfifo limit {_QUEUE}\n"
        run_network_command(["tc", "-n", netns, "-batch", "-"], tbf)

    def slow_down(self, host: int) -> None:
        """Leave a host a tenth of its line."""
        self._limit(self._switch(host), f"p{host + 1}", 0.1, "change")
        self._limit(self.netns(host), "e0", 0.1, "change")

    def cut(self, host: int) -> None:
        """Take a host from the network."""
        _batch(self._switch(host), [f"link set p{host + 1} down"])

    def uplink_bytes(self) -> int:
        """Return what came to a rack by its uplink: the most of all racks."""
        most = 0
        for rack in {self._switch(host) for host in self._hosts} - {self._core}:
            shown = run_network_command(
                ["ip", "-n", rack, "-json", "-stats", "link", "show", "uplink"]
            )
            most = max(most, json.loads(shown)[0]["stats64"]["rx"]["bytes"])
        return most

    def network(self, host: int) -> Path:
        """Return the file of a host's namespace."""
        return Path(f"/run/netns/{self.netns(host)}")

    def set_share(self, share: float) -> None:
        """Give each line this share of its rate."""
        for host in self._hosts:
            self._limit(self._switch(host), f"p{host + 1}", share, "change")
            self._limit(self.netns(host), "e0", share, "change")

    def separate(self, is_separate: bool) -> None:
        """Let no two nodes reach each other, as a firewall would, or let them again."""
        word = "on" if is_separate else "off"
        for host in self._hosts:
            if host != STORE:
                line = f"link set p{host + 1} type bridge_slave isolated {word}"
                _batch(self._switch(host), [line])

    def remove(self) -> None:
        """Remove all namespaces that exist."""
        names = {self.netns(host) for host in self._hosts}
        for name in names | {self._switch(host) for host in self._hosts}:
            with contextlib.suppress(MissingError):
                run_network_command(["ip", "netns", "del", name])


def _batch(netns: str, lines: Sequence[str]) -> None:
    run_network_command(["ip", "-n", netns, "-batch", "-"], "".join(f"{line}\n" for line in lines))


class _Process:
    """A fork of this process, which tells its parent lines of JSON."""

    def __init__(self, act: "Callable[[_Talk], None]") -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                # Ahead of whatever else this machine does, so that the lines are the bottleneck.
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
                act(_Talk(theirs))
                signal.pause()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self.talk = _Talk(ours)

    def end(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.talk.close()


class _Talk:
    """End of a connection between the parent and a child process, with lines of JSON."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lines = sock.makefile("rb")

    def say(self, what: Any) -> None:
        self.sock.sendall(json.dumps(what).encode() + b"\n")

    def hear(self) -> Any:
        line = self._lines.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self._lines.close()
        self.sock.close()


def measure(scenario: Scenario, folder: Path) -> Report:
    """Run a scenario; files go to `folder`, which is better in memory. Raises: MissingError."""
    require("root", programs=("ip", "tc"))
    data = random.Random(scenario.size).randbytes(1 << 20) * (scenario.size >> 20)
    parts = [data[n : n + scenario.chunk_bytes] for n in range(0, len(data), scenario.chunk_bytes)]
    chunks = chunk_list([len(part) for part in parts], [content_digest(part) for part in parts])
    source = folder / "object"
    source.write_bytes(data)
    site = Site(scenario)
    with contextlib.ExitStack() as stack:
        stack.callback(site.remove)
        site.make()
        store = _Process(lambda talk: _be_store(site, source, talk))
        stack.callback(store.end)
        store.talk.hear()
        nodes: dict[int, _Process] = {}
        for n in range(scenario.nodes):
            if n not in scenario.absent:
                nodes[n] = _Process(_node(site, scenario, n, chunks, folder, nodes, store))
                stack.callback(nodes[n].end)
        for process in nodes.values():
            process.talk.hear()
        return _watch(site, scenario, nodes, store)


def _node(
    site: Site,
    scenario: Scenario,
    number: int,
    chunks: ChunkList,
    folder: Path,
    others: Mapping[int, _Process],
    store: _Process,
) -> "Callable[[_Talk], None]":
    def act(talk: _Talk) -> None:
        for other in (*others.values(), store):
            other.talk.close()
        enter(site.network(number))
        if number in scenario.hostile:
            serve_hostile(("", _PORT), number, _KEY, chunks)
            talk.say("ready")
        else:
            _be_node(site, scenario, number, chunks, folder / f"node-{number}", talk)

    return act


def _be_node(
    site: Site, scenario: Scenario, number: int, chunks: ChunkList, file: Path, talk: _Talk
) -> None:
    addresses = [(site.address(n), _PORT) for n in range(scenario.nodes)]
    trees = Trees(scenario.nodes, scenario.places if scenario.racks > 1 else ())
    late_s = scenario.joined_s.get(number)
    exchange = (
        None if late_s is not None else Exchange(addresses, number, _KEY, trees, listener=_listen())
    )
    talk.say("ready")
    begin_s = talk.hear() + (late_s or 0.0)
    pause(begin_s - time.monotonic())
    cpu_s = time.process_time()
    exchange = exchange or Exchange(addresses, number, _KEY, trees, listener=_listen())
    exchange.join(chunks.name, file, _Origin((site.address(STORE), _PORT), chunks))
    first_s, whole = 0.0, threading.Event()

    def told(counts: tuple[int, ...], is_over: bool) -> bool:
        nonlocal first_s
        if counts[0]:
            first_s = first_s or time.monotonic() - begin_s
        if sum(counts) == len(chunks.lengths):
            whole.set()
        return True

    # Not `fetch`: the processes of a node read the file themselves.
    exchange.watch(chunks.name, told)
    whole.wait(_LIMIT_S)
    took_s, cpu_s = time.monotonic() - begin_s, time.process_time() - cpu_s
    expected = content_digest((file.parent / "object").read_bytes())
    talk.say(
        {
            "took_s": took_s,
            "first_s": first_s,
            "cpu_s": cpu_s,
            "is_right": content_digest(file.read_bytes()) == expected,
            "fed": [
                f"node {number}, tree {one.tree}: {one.byte_count >> 10} KiB by {one.source} in "
                f"{one.seconds:.1f} s; {one.left_because}"
                for one in exchange.source_records()
            ],
        }
    )


def _listen() -> socket.socket:
    server = socket.create_server(("", _PORT), backlog=64)
    # What most machines have. Connections inherit it, and the listening side sends.
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return server


class _Origin:
    """The store as a node sees it: one connection for each thread."""

    def __init__(self, address: tuple[str, int], chunks: ChunkList) -> None:
        self._address, self._chunks, self._own = address, chunks, threading.local()

    def chunk_list(self) -> bytes:
        """Return the encoded list of chunks."""
        return self._chunks.encode()

    def chunk(self, index: int, offset: int, length: int) -> bytes:
        """Return the bytes of one chunk."""
        sock = getattr(self._own, "sock", None)
        if sock is None:
            sock = self._own.sock = socket.create_connection(self._address, _LIMIT_S)
        sock.sendall(_RANGE.pack(offset, length))
        data = bytearray(length)
        left = memoryview(data)
        while left:
            count = sock.recv_into(left)
            if not count:
                raise ConnectionResetError("the store has closed the connection")
            left = left[count:]
        return bytes(data)


def _be_store(site: Site, source: Path, talk: _Talk) -> None:
    """Serve ranges of a file until the parent asks how many bytes were sent."""
    enter(site.network(STORE))
    server, file, sent = _listen(), source.open("rb"), [0]

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, struct.error):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                offset, length = _RANGE.unpack(sock.recv(_RANGE.size, socket.MSG_WAITALL))
                while length:
                    count = os.sendfile(sock.fileno(), file.fileno(), offset, length)
                    offset, length, sent[0] = offset + count, length - count, sent[0] + count

    def accept() -> None:
        while True:
            sock, _ = server.accept()
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    talk.say("ready")
    while talk.hear() is not None:
        talk.say(sent[0])


def _watch(
    site: Site, scenario: Scenario, nodes: Mapping[int, _Process], store: _Process
) -> Report:
    broken = {*scenario.lost, *scenario.frozen, *scenario.slow, *scenario.hostile}
    begin_s = time.monotonic() + 0.1
    for n, process in nodes.items():
        if n not in scenario.hostile:
            process.talk.say(begin_s)
    if broken:
        pause(begin_s + scenario.fault_s - time.monotonic())
        for n in scenario.lost:
            site.cut(n)
            os.kill(nodes[n].pid, signal.SIGKILL)
        for n in scenario.frozen:
            os.kill(nodes[n].pid, signal.SIGSTOP)
        for n in scenario.slow:
            site.slow_down(n)
    waiting = {process.talk.sock: n for n, process in nodes.items() if n not in broken}
    reports = {}
    while waiting and (left_s := begin_s + _LIMIT_S - time.monotonic()) > 0:
        for sock in _readable(list(waiting), left_s):
            n = waiting.pop(sock)
            if (report := nodes[n].talk.hear()) is not None:
                reports[n] = report
    store.talk.say("how much?")
    return Report(
        took_s={n: one["took_s"] for n, one in reports.items()},
        first_s={n: one["first_s"] for n, one in reports.items()},
        cpu_s={n: one["cpu_s"] for n, one in reports.items()},
        wrong=sum(not one["is_right"] for one in reports.values()),
        unfinished=len(nodes.keys() - broken) - len(reports),
        copies=store.talk.hear() / scenario.size,
        uplink_copies=site.uplink_bytes() / scenario.size,
        fed=[line for one in reports.values() for line in one["fed"]],
    )


def _readable(socks: Sequence[socket.socket], timeout_s: float) -> Iterator[socket.socket]:
    poll = select.poll()
    by_file = {sock.fileno(): sock for sock in socks}
    for file in by_file:
        poll.register(file, select.POLLIN)
    for file, _ in poll.poll(timeout_s * 1000):
        yield by_file[file]


def cpu_s_per_gb(report: Report, size: int) -> float:
    """Return the seconds of CPU of a node per GB that it got and passed on, the mean of all."""
    return sum(report.cpu_s.values()) / len(report.cpu_s) / (size / 1e9)
