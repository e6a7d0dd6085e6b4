"""Node cache: against a model, shared by processes, after crashes, on a full disk."""

import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.errors import InvalidInputError
from bootseer.linux.locks import lock_file
from bootseer.prefetch.cache.node_cache import CachedStream, NodeCache, StreamUse

DIGEST = "sha256:" + "ab" * 32
STARTS = (0, 512, 1024, 5000, 5001, 12_000, 20_580)
LENGTH = STARTS[-1]
STREAM = bytes(i * 7 % 251 for i in range(LENGTH))
PIECES = range(len(STARTS) - 1)


def piece(number: int) -> bytes:
    return STREAM[STARTS[number] : STARTS[number + 1]]


def opened(directory: Path, digest: str = DIGEST) -> CachedStream:
    return NodeCache(directory).open_pieces(digest, STARTS)


def fill(stream: CachedStream) -> None:
    for number in PIECES:
        assert stream.put(number, piece(number))


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[CachedStream]:
    stream = opened(tmp_path)
    yield stream
    stream.close()


ranges = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
    lambda pair: (pair[0], min(pair[1], LENGTH - pair[0]))
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=st.lists(st.sampled_from(PIECES), max_size=8), asked=ranges)
def test_against_a_model(
    tmp_path_factory: pytest.TempPathFactory, writes: list[int], asked: tuple[int, int]
) -> None:
    cache = opened(tmp_path_factory.mktemp("cache"))
    for number in writes:
        assert cache.put(number, piece(number))
    offset, length = asked
    wanted = {n for n in PIECES if STARTS[n] < offset + length and offset < STARTS[n + 1]}
    absent = wanted - set(writes)
    assert cache.holds_bytes(offset, length) == (not absent)
    assert cache.is_known_to_hold(min(wanted), max(wanted) + 1) == (not absent)
    assert cache.missing(offset, length) == sorted(absent)
    found = cache.get(offset, length)
    assert found == (None if absent else STREAM[offset : offset + length])
    assert cache.missing(0, LENGTH) == sorted(set(PIECES) - set(writes))
    assert cache.present_bytes() == sum(len(piece(number)) for number in set(writes))
    cache.close()


def test_bytes_outside_the_stream_are_not_here(blob: CachedStream) -> None:
    fill(blob)
    assert blob.get(LENGTH - 1, 2) is None
    assert blob.get(2 * LENGTH, 1) is None
    assert not blob.holds_bytes(LENGTH - 1, 2)
    assert blob.missing(0, 10 * LENGTH) == []


def test_a_piece_of_a_wrong_length_is_refused(blob: CachedStream) -> None:
    with pytest.raises(ValueError, match="piece 1"):
        blob.put(1, b"ab")


def test_two_users_see_each_other(tmp_path: Path, blob: CachedStream) -> None:
    other = opened(tmp_path)
    blob.put(1, piece(1))
    assert other.holds_bytes(512, 512)
    assert other.read(512, 512) == STREAM[512:1024]
    assert other.present_bytes() == 512
    other.close()


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from bootseer.prefetch.cache.node_cache import NodeCache\n"
        f"c = NodeCache(Path(sys.argv[1])).open_pieces({DIGEST!r}, {STARTS})\n"
        "c.put(0, b'x' * 512)\n"
        "print('ok', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ok\n"
        os.kill(child.pid, signal.SIGKILL)
    again = opened(tmp_path)
    assert again.holds_bytes(0, 512)
    assert again.read(0, 512) == b"x" * 512
    again.close()


def _sums(tmp_path: Path) -> Path:
    return tmp_path / "streams" / DIGEST.replace(":", "-") / "sums"


def _set_boot(tmp_path: Path, clean: int) -> None:
    with _sums(tmp_path).open("r+b") as file:
        file.seek(12)
        file.write(struct.pack("<I16s", clean, b"another boot id!"))


@pytest.mark.parametrize("clean", [0, 1])
def test_after_a_reboot_what_is_intact_is_kept(tmp_path: Path, clean: int) -> None:
    first = opened(tmp_path)
    first.put(0, piece(0))
    first.close()
    _set_boot(tmp_path, clean)
    again = opened(tmp_path)
    assert again.is_known_to_hold(0, 1) is bool(clean)
    assert again.holds(0, 1)
    assert again.is_known_to_hold(0, 1)
    assert not again.holds(1, 2)
    again.close()


def test_a_damaged_header_loses_nothing(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.put(0, piece(0))
    first.close()
    with _sums(tmp_path).open("r+b") as file:
        file.write(b"\1" * 60)
    again = opened(tmp_path)
    assert again.is_doubtful
    assert again.get(0, 512) == piece(0)
    assert not again.holds(1, 2)
    assert again.put(1, piece(1))
    assert again.check_all() == 0
    again.close()
    last = opened(tmp_path)
    assert not last.is_doubtful
    assert last.read(0, 1024) == STREAM[:1024]
    last.close()


@pytest.mark.parametrize("damage", ["cut", "boundaries", "longer"])
def test_a_damaged_table_is_made_anew(tmp_path: Path, damage: str) -> None:
    first = opened(tmp_path)
    first.put(0, piece(0))
    first.close()
    data = _sums(tmp_path).read_bytes()
    boundary = len(data) - 8 * 3
    _sums(tmp_path).write_bytes(
        {
            "cut": data[:70],
            "boundaries": data[:boundary] + b"\1" + data[boundary + 1 :],
            "longer": data + bytes(16),
        }[damage]
    )
    again = opened(tmp_path)
    assert again.missing(0, LENGTH) == list(PIECES)
    fill(again)
    assert again.read(0, LENGTH) == STREAM
    again.close()


def test_trim_removes_the_longest_unused_and_nothing_in_use(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    digests = [f"sha256:{i:064x}" for i in range(3)]
    streams = []
    for age, digest in enumerate(digests):
        one = opened(tmp_path, digest)
        fill(one)
        streams.append(one)
        os.utime(one.directory, ns=(age, age))
    streams[1].close()
    streams[2].close()
    assert cache.trim(cache.streams()[0].size_bytes * 2) > 0
    assert [blob.key for blob in cache.streams()] == [digests[0], digests[2]]
    assert cache.trim(0) > 0
    assert [blob.key for blob in cache.streams()] == [digests[0]]
    assert streams[0].read(0, LENGTH) == STREAM
    streams[0].close()


def test_two_trims_at_once_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        opened(tmp_path, f"sha256:{number:064x}").close()
    # Each has listed all streams before either removes one.
    listed = threading.Barrier(2)
    streams = NodeCache.streams

    def listing(self: NodeCache) -> list[StreamUse]:
        found = streams(self)
        listed.wait(60)
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(NodeCache, "streams", listing)
        for trimming in [pool.submit(NodeCache(tmp_path).trim, 0) for _ in range(2)]:
            trimming.result(60)
    assert list((tmp_path / "streams").iterdir()) == []


def test_trim_removes_what_killed_processes_left(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    whole = opened(tmp_path, "sha256:" + "01" * 32)
    folder = tmp_path / "streams"
    held = [cache.fill_lock("sha256:" + "02" * 32), cache.replay_lock(DIGEST, "file:///store")]
    locks = [lock_file(path, 0) for path in held]
    for name in (
        f"sha256-{'03' * 32}.fill",
        f"sha256-{'04' * 32}.pull",
        f"sha256-{'05' * 32}.x.replay",
    ):
        (folder / name).touch()
    (folder / f"sha256-{'06' * 32}").mkdir()
    (folder / f"sha256-{'06' * 32}" / "lock").touch()
    cache.trim(10**12)
    left = {path.name for path in folder.iterdir()}
    assert left == {whole.directory.name, *(path.name for path in held)}
    for fd in locks:
        os.close(fd)
    whole.close()


def test_streams_are_opened_while_others_are_removed(tmp_path: Path) -> None:
    """A folder that vanishes between two steps of an open is made again."""
    over = threading.Event()

    def remove() -> None:
        while not over.is_set():
            NodeCache(tmp_path).trim(0)

    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(remove)
        try:
            for _ in range(100):
                opened(tmp_path).close()
        finally:
            over.set()
        removing.result(60)


def test_a_check_finds_bit_rot_and_what_is_damaged_is_absent(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    serving = opened(tmp_path)
    fill(serving)
    assert cache.recheck(DIGEST) == 0
    assert serving.holds_bytes(0, LENGTH)
    with (tmp_path / "streams" / DIGEST.replace(":", "-") / "data").open("r+b") as file:
        file.seek(1100)
        file.write(b"rot")
    found = cache.details(DIGEST)
    assert found is not None
    assert (found.stream_length, found.present_bytes, found.is_used) == (LENGTH, LENGTH, True)
    assert cache.recheck(DIGEST) == len(piece(2))
    assert serving.missing(0, LENGTH) == [2]
    assert cache.recheck("sha256:" + "00" * 32) == 0
    serving.close()
    found = cache.details(DIGEST)
    assert found is not None
    assert not found.is_used


def test_nobody_waits_while_the_last_user_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tmp_path)
    fill(first)
    others: list[CachedStream] = []
    fsync = os.fsync

    def slow(fd: int) -> None:
        if not others:
            others.append(opened(tmp_path))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    first.close()
    (second,) = others
    assert second.read(0, LENGTH) == STREAM
    # Not clean, since the second one may write.
    assert _sums(tmp_path).read_bytes()[12] == 0
    second.close()
    assert _sums(tmp_path).read_bytes()[12] == 1
    # Read-only streams stay clean.
    third = opened(tmp_path)
    assert third.read(0, LENGTH) == STREAM
    assert _sums(tmp_path).read_bytes()[12] == 1
    third.put(0, piece(0))
    assert _sums(tmp_path).read_bytes()[12] == 0
    third.close()


def test_bad_digest_is_refused(tmp_path: Path) -> None:
    for digest in ("sha256:../../x", "md5:" + "a" * 64, "sha256:" + "g" * 64):
        with pytest.raises(InvalidInputError, match="not a digest"):
            NodeCache(tmp_path).open_pieces(digest, (0, 1))


def test_files_are_private(blob: CachedStream) -> None:
    for path in (blob.directory, blob.directory.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in blob.directory.iterdir()} == {0o600}


def test_a_stream_that_says_it_has_a_terabyte_takes_no_room(tmp_path: Path) -> None:
    length = 2**40
    starts = (*range(0, length, 2**26), length)
    with closing(NodeCache(tmp_path).open_pieces(DIGEST, starts)) as stream:
        assert not stream.holds_bytes(2**39, 4096)
        assert stream.put(2**13, bytes(2**26))
        assert stream.holds_bytes(2**39, 4096)
        assert stream.present_bytes() == 2**26
    (one,) = NodeCache(tmp_path).streams()
    assert one.size_bytes < 2**26 + 2**20
    details = NodeCache(tmp_path).details(DIGEST)
    assert details is not None
    assert (details.stream_length, details.present_bytes) == (length, 2**26)
