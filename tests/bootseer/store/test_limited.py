"""The rate limit counts every byte, and lets none pass faster than it may."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from bootseer.demo.limited import SLICE_BYTES, Account, Meter, NetworkLimits, read_account
from bootseer.errors import DeadlineError, InvalidInputError
from bootseer.store import TEST_NETWORK, open_backend, open_store
from testbed.waiting import pause


def limited(tmp_path: Path, **options: object) -> str:
    options["account"] = tmp_path / "account"
    query = "&".join(f"{key}={value}" for key, value in options.items())
    return f"limit+{(tmp_path / 'root').as_uri()}?{query}"


class Clock:
    """Clock that only this thread's sleeps advance, so that rates are exact on any machine."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self._thread = threading.get_ident()

    def monotonic_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        if threading.get_ident() == self._thread:
            self.now_ns += round(seconds * 1e9)
        else:
            pause(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "monotonic_ns", fake.monotonic_ns)
    monkeypatch.setattr(time, "sleep", fake.sleep)
    return fake


def test_counts_what_is_moved(tmp_path: Path) -> None:
    assert read_account(tmp_path / "account") == Account(0, 0, 0)
    backend = open_backend(limited(tmp_path))
    with backend.create("x") as writer:
        writer.write(b"a" * 1000)
        writer.write(b"b" * 500)
    assert len(backend.read("x", 100, 300)) == 300
    assert backend.read_into("x", 1400, memoryview(bytearray(500))) == 100
    backend.stat("x")
    backend.close()
    assert read_account(tmp_path / "account") == Account(400, 1500, 4)


def test_a_tally_counts_one_url_alone(tmp_path: Path) -> None:
    counted = open_backend(limited(tmp_path, tally=tmp_path / "tally"))
    other = open_backend(limited(tmp_path))
    with other.create("x") as writer:
        writer.write(b"a" * 1000)
    assert len(counted.read("x")) == 1000
    for backend in (counted, other):
        backend.close()
    assert read_account(tmp_path / "account") == Account(1000, 1000, 2)
    assert read_account(tmp_path / "tally") == Account(1000, 0, 1)


def test_counts_the_whole_node(tmp_path: Path) -> None:
    url = limited(tmp_path)
    code = "import sys; from bootseer.store import open_store; open_store(sys.argv[1]).read('x')"
    with open_store(url) as store:
        store.publish("x", b"a" * 1000)
        before = read_account(tmp_path / "account")
        for _ in range(2):
            subprocess.run([sys.executable, "-c", code, url], check=True, timeout=60)
    assert read_account(tmp_path / "account").bytes_read == before.bytes_read + 2000


def test_one_path_is_served_at_the_rate_of_a_stream(tmp_path: Path, clock: Clock) -> None:
    backend = open_backend(limited(tmp_path, stream_bytes_per_s=1_000_000))
    started_ns = clock.now_ns
    with backend.create("x") as writer:
        for _ in range(4):
            writer.write(bytes(500_000))
    assert (clock.now_ns - started_ns) / 1e9 == pytest.approx(2.0)
    for index in range(4):
        backend.read("x", index * 500_000, 500_000)
    assert (clock.now_ns - started_ns) / 1e9 == pytest.approx(4.0)


def test_each_path_and_direction_has_a_rate_of_its_own(tmp_path: Path) -> None:
    meter = Meter(NetworkLimits(stream_bytes_per_s=1e6))
    now_ns = time.monotonic_ns()
    turns = [meter._reserve_stream(way, 1_000_000) for way in (("r", "x"), ("r", "y"), ("w", "x"))]
    turns += [meter._reserve_stream(("r", "x"), 1_000_000)]
    assert all(turn >= now_ns + 10**9 for turn in turns)
    assert turns[3] == turns[0] + 10**9, "in turn"


def test_all_processes_share_the_rate_of_the_node(tmp_path: Path, clock: Clock) -> None:
    url = limited(tmp_path, node_bytes_per_s=1_000_000)
    first, second = open_backend(url), open_backend(url)  # as two processes would
    started_ns = clock.now_ns
    for index, backend in enumerate((first, second, first, second)):
        with backend.create(f"{index}") as writer:
            writer.write(bytes(500_000))
    assert (clock.now_ns - started_ns) / 1e9 == pytest.approx(2.0)


def test_parallel_streams_wait_in_slices(tmp_path: Path, clock: Clock) -> None:
    """A large transfer does not reserve the link for all of its bytes at once."""
    meters = [
        Meter(NetworkLimits(node_bytes_per_s=1e6, account=str(tmp_path / "a"))) for _ in range(2)
    ]
    meters[0].move("r", "large", 4 * SLICE_BYTES)
    before_ns = clock.now_ns
    meters[1].move("r", "small", 1)
    assert clock.now_ns - before_ns <= SLICE_BYTES * 1000 + 1000


def test_each_request_takes_the_latency(tmp_path: Path, clock: Clock) -> None:
    backend = open_backend(limited(tmp_path, latency_s=0.05))
    started_ns = clock.now_ns
    backend.mkdir("x")
    backend.stat("x")
    assert clock.now_ns - started_ns == 10**8


def test_a_latency_ends_at_the_deadline(tmp_path: Path, clock: Clock) -> None:
    """A store that is slower than the deadline counts as one that does not answer."""
    backend = open_backend(limited(tmp_path, latency_s=5), deadline_s=1.5)
    started_ns = clock.now_ns
    with pytest.raises(DeadlineError, match=r"within 1\.5 s"):
        backend.stat("x")
    assert clock.now_ns - started_ns == 1_500_000_000


def test_a_production_process_knows_no_simulated_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TEST_NETWORK)
    with pytest.raises(InvalidInputError, match=r"limit\+file"):
        open_backend(limited(tmp_path, latency_s=5))


def test_a_moment_of_another_boot_is_forgotten(tmp_path: Path) -> None:
    url = limited(tmp_path, node_bytes_per_s=1e9)
    open_store(url).publish("x", b"abc")
    account = tmp_path / "account"
    data = bytearray(account.read_bytes())
    data[8:16] = (time.monotonic_ns() + 10**15).to_bytes(8, sys.byteorder)
    account.write_bytes(data)
    assert open_store(url).read("x") == b"abc"


def test_passes_other_options_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="block_size_bytes"):
        open_backend("limit+hdfs://nn/x?stream_bytes_per_s=1&block_size_bytes=-1")


@pytest.mark.parametrize(
    "query",
    [
        "stream_bytes_per_s=0",
        "stream_bytes_per_s=x",
        "node_bytes_per_s=5",
        "latency_s=-1",
        "latency_s=nan",
    ],
)
def test_refuses_senseless_limits(tmp_path: Path, query: str) -> None:
    with pytest.raises(InvalidInputError):
        open_backend(f"limit+{tmp_path.as_uri()}?{query}")


def test_refuses_a_file_that_is_no_account(tmp_path: Path) -> None:
    (tmp_path / "account").write_text("something else")
    with pytest.raises(InvalidInputError, match="not an account"):
        read_account(tmp_path / "account")
    with pytest.raises(InvalidInputError, match="not an account"):
        open_backend(limited(tmp_path)).mkdir("x")
    assert (tmp_path / "account").read_text() == "something else"
