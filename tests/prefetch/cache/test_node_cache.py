"""The node cache: against a model, shared by processes, after crashes, on a full disk."""

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
from bootseer.prefetch.cache.node_cache import SECTOR_BYTES, CachedStream, NodeCache, StreamCache

DIGEST = "sha256:" + "ab" * 32
LENGTH = 40 * SECTOR_BYTES + 100
STREAM = bytes(i * 7 % 251 for i in range(LENGTH))


@pytest.fixture
def blob(tmp_path: Path) -> Iterator[StreamCache]:
    opened = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    yield opened
    opened.close()


ranges = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
    lambda pair: (pair[0], min(pair[1], LENGTH - pair[0]))
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=st.lists(ranges, max_size=8), asked=ranges)
def test_against_a_model(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    cache = NodeCache(tmp_path_factory.mktemp("cache")).open_stream(DIGEST, LENGTH)
    model: set[int] = set()
    last = -(-LENGTH // SECTOR_BYTES)
    for offset, length in writes:
        assert cache.write(offset, STREAM[offset : offset + length])
        end = offset + length
        model |= set(
            range(-(-offset // SECTOR_BYTES), last if end == LENGTH else end // SECTOR_BYTES)
        )
    offset, length = asked
    wanted = range(offset // SECTOR_BYTES, -(-(offset + length) // SECTOR_BYTES))
    assert cache.has(offset, length) == (set(wanted) <= model)
    absent = set()
    for start, count in cache.missing(offset, length):
        assert start % SECTOR_BYTES == 0
        assert count > 0
        absent |= set(range(start // SECTOR_BYTES, -(-(start + count) // SECTOR_BYTES)))
    assert absent == set(wanted) - model
    if not absent:
        assert cache.read(offset, length) == STREAM[offset : offset + length]
    cache.close()


def test_bytes_outside_the_stream_are_refused(blob: StreamCache) -> None:
    with pytest.raises(ValueError, match="outside"):
        blob.write(LENGTH - 1, b"ab")


def test_two_users_see_each_other(tmp_path: Path, blob: StreamCache) -> None:
    other = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    blob.write(512, STREAM[512:1536])
    assert other.has(512, 1024)
    assert other.read(512, 1024) == STREAM[512:1536]
    assert other.present_bytes() == 1024
    other.close()


def test_kill_9_loses_nothing(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from bootseer.prefetch.cache.node_cache import NodeCache\n"
        f"c = NodeCache(Path(sys.argv[1])).open_stream({DIGEST!r}, {LENGTH})\n"
        "c.write(0, b'x' * 1024)\n"
        "print('ok', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ok\n"
        os.kill(child.pid, signal.SIGKILL)
    again = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    assert again.has(0, 1024)
    assert again.read(0, 1024) == b"x" * 1024
    again.close()


def _set_boot(tmp_path: Path, clean: int) -> None:
    path = tmp_path / "streams-3" / DIGEST.replace(":", "-") / "present"
    with path.open("r+b") as file:
        file.seek(12)
        file.write(struct.pack("<I16s", clean, b"another boot id!"))


@pytest.mark.parametrize("clean", [0, 1])
def test_after_a_reboot_what_is_intact_is_kept(tmp_path: Path, clean: int) -> None:
    first = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    first.write(0, STREAM[:1024])
    first.close()
    _set_boot(tmp_path, clean)
    again = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    assert again.holds_now(0, 1024) is bool(clean)
    assert again.has(0, 1024)
    assert again.holds_now(0, 1024)
    assert not again.has(1024, 1)
    again.close()


def test_a_damaged_map_is_made_anew(tmp_path: Path) -> None:
    first = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    first.write(0, STREAM[:1024])
    first.close()
    path = tmp_path / "streams-3" / DIGEST.replace(":", "-") / "present"
    path.write_bytes(b"\1" * 70)
    again = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    assert again.has(0, 1024)
    assert not again.has(1024, 1)
    again.close()


def test_trim_removes_the_longest_unused_and_nothing_in_use(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    digests = [f"sha256:{i:064x}" for i in range(3)]
    opened = []
    for age, digest in enumerate(digests):
        one = cache.open_stream(digest, LENGTH)
        one.write(0, STREAM)
        opened.append(one)
        os.utime(one.directory, ns=(age, age))
    opened[1].close()
    opened[2].close()
    assert cache.trim(cache.streams()[0].size_bytes * 2) > 0
    assert [blob.key for blob in cache.streams()] == [digests[0], digests[2]]
    assert cache.trim(0) > 0
    assert [blob.key for blob in cache.streams()] == [digests[0]]
    assert opened[0].read(0, LENGTH) == STREAM
    opened[0].close()


def test_two_trims_at_once_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = NodeCache(tmp_path)
    for number in range(20):
        cache.open_stream(f"sha256:{number:064x}", LENGTH).close()
    # Each has listed all streams before either removes one.
    listed = threading.Barrier(2)
    streams = NodeCache.streams

    def listing(self: NodeCache) -> list[CachedStream]:
        found = streams(self)
        listed.wait(60)
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(NodeCache, "streams", listing)
        for trimming in [pool.submit(NodeCache(tmp_path).trim, 0) for _ in range(2)]:
            trimming.result(60)
    assert list((tmp_path / "streams-3").iterdir()) == []


def test_trim_removes_what_killed_processes_left(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    whole = cache.open_stream("sha256:" + "01" * 32, LENGTH)
    folder = tmp_path / "streams-3"
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
    (folder / ".new-00").touch()
    os.utime(folder / ".new-00", (0, 0))
    (folder / ".new-01").touch()
    cache.trim(10**12)
    left = {path.name for path in folder.iterdir()}
    assert left == {whole.directory.name, ".new-01", *(path.name for path in held)}
    for fd in locks:
        os.close(fd)
    whole.close()


def test_streams_are_opened_while_others_are_removed(tmp_path: Path) -> None:
    """A folder that goes between two steps of who opens it is made anew."""
    over = threading.Event()

    def remove() -> None:
        while not over.is_set():
            NodeCache(tmp_path).trim(0)

    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(remove)
        try:
            for _ in range(100):
                NodeCache(tmp_path).open_stream(DIGEST, LENGTH).close()
        finally:
            over.set()
        removing.result(60)


def test_a_check_finds_bit_rot_and_what_is_damaged_is_absent(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    serving = cache.open_stream(DIGEST, LENGTH)
    serving.write(0, STREAM[: 8 * SECTOR_BYTES])
    serving.write(8 * SECTOR_BYTES, STREAM[8 * SECTOR_BYTES :])
    assert cache.recheck(DIGEST) == 0
    assert serving.has(0, LENGTH)
    with (tmp_path / "streams-3" / DIGEST.replace(":", "-") / "data").open("r+b") as file:
        file.seek(1000)
        file.write(b"rot")
    found = cache.details(DIGEST)
    assert found is not None
    assert (found.stream_length, found.present_bytes, found.is_used) == (LENGTH, LENGTH, True)
    assert cache.recheck(DIGEST) == 8 * SECTOR_BYTES
    assert list(serving.missing(0, LENGTH)) == [(0, 8 * SECTOR_BYTES)]
    assert cache.recheck("sha256:" + "00" * 32) == 0
    serving.close()
    found = cache.details(DIGEST)
    assert found is not None
    assert not found.is_used


def test_nobody_waits_while_the_last_user_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = NodeCache(tmp_path).open_stream(DIGEST, LENGTH)
    first.write(0, STREAM)
    opened: list[StreamCache] = []
    fsync = os.fsync

    def slow(fd: int) -> None:
        if not opened:
            opened.append(NodeCache(tmp_path).open_stream(DIGEST, LENGTH))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    first.close()
    (second,) = opened
    assert second.read(0, LENGTH) == STREAM
    path = tmp_path / "streams-3" / DIGEST.replace(":", "-") / "present"
    # Not clean: the second one may write.
    assert path.read_bytes()[12] == 0
    second.close()
    assert path.read_bytes()[12] == 1


def test_bad_digest_is_refused(tmp_path: Path) -> None:
    for digest in ("sha256:../../x", "md5:" + "a" * 64, "sha256:" + "g" * 64):
        with pytest.raises(InvalidInputError, match="not a digest"):
            NodeCache(tmp_path).open_stream(digest, 1)


def test_files_are_private(blob: StreamCache) -> None:
    for path in (blob.directory, blob.directory.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in blob.directory.iterdir()} == {0o600}


def test_a_stream_that_says_it_has_a_terabyte_takes_no_room(tmp_path: Path) -> None:
    length = 2**40
    with closing(NodeCache(tmp_path).open_stream(DIGEST, length)) as stream:
        assert stream.write(2**39, bytes(4096))
        assert stream.has(2**39, 4096)
        assert not stream.has(2**39 + 4096, 4096)
        assert stream.present_bytes() == 4096
    (one,) = NodeCache(tmp_path).streams()
    assert one.size_bytes < 2**20
    details = NodeCache(tmp_path).details(DIGEST)
    assert details is not None
    assert (details.stream_length, details.present_bytes) == (length, 4096)
