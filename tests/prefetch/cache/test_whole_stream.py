"""Whole streams: visible at once, completed in place, removed after their writer's death."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, DeadlineError, InvalidInputError
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.cache.stream import WHOLE_PIECE_BYTES, whole_starts

DIGEST = "sha256:" + "cd" * 32
STREAM = random.Random(5).randbytes(3 * 2**20 + 100)


def append_in_pieces(cache: NodeCache, seed: int = 1) -> None:
    generator = random.Random(seed)
    with cache.new_stream() as new:
        position = 0
        while position < len(STREAM):
            count = generator.choice((1, 511, 70_000, 900_000))
            new.append(STREAM[position : position + count])
            position += count
        assert new.length_bytes == len(STREAM)
        assert cache.open_whole(DIGEST) is None
        stream = new.commit(DIGEST)
        assert stream.read(0, len(STREAM)) == STREAM
        stream.close()


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "streams").iterdir())


def test_nothing_is_visible_before_the_commit(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    append_in_pieces(cache)
    whole = cache.open_whole(DIGEST)
    assert whole is not None
    assert whole.stream_length == len(STREAM)
    assert whole.read(0, len(STREAM)) == STREAM
    whole.close()
    assert names(tmp_path) == [DIGEST.replace(":", "-")]
    assert [one.key for one in cache.streams()] == [DIGEST]


def test_an_empty_stream(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    with cache.new_stream() as new:
        new.commit(DIGEST).close()
    whole = cache.open_whole(DIGEST)
    assert whole is not None
    assert whole.stream_length == 0
    whole.close()


def test_one_that_is_in_use_is_completed_in_place(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    serving = cache.open_pieces(DIGEST, whole_starts(len(STREAM)))
    serving.put(1, STREAM[WHOLE_PIECE_BYTES : 2 * WHOLE_PIECE_BYTES])
    append_in_pieces(cache)
    assert serving.holds_bytes(0, len(STREAM))
    assert serving.read(0, len(STREAM)) == STREAM
    serving.close()
    assert names(tmp_path) == [DIGEST.replace(":", "-")]


def test_one_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    with cache.new_stream() as new:
        new.append(STREAM)
    assert names(tmp_path) == []
    with pytest.raises(InvalidInputError, match="aborted"):
        new.commit(DIGEST)
    with cache.new_stream() as new, pytest.raises(InvalidInputError, match="not a digest"):
        new.commit("sha256:../x")
    assert names(tmp_path) == []


def test_a_committed_stream_that_is_open_is_not_trimmed(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path)
    with cache.new_stream() as new:
        new.append(STREAM)
        assert cache.trim(0) == 0
        stream = new.commit(DIGEST)
    assert cache.trim(0) == 0
    assert stream.read(0, len(STREAM)) == STREAM
    stream.close()
    assert cache.trim(0) > len(STREAM)


def test_what_a_killed_writer_left_is_swept_and_a_live_one_is_not(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from bootseer.prefetch.cache.node_cache import NodeCache\n"
        "new = NodeCache(Path(sys.argv[1])).new_stream()\n"
        "new.append(bytes(1000000))\n"
        "print('ok', flush=True)\n"
        "time.sleep(60)\n"
    )
    cache = NodeCache(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ok\n"
        cache.trim(0)
        assert len(names(tmp_path)) == 1
        os.kill(child.pid, signal.SIGKILL)
    cache.trim(2**40)
    assert names(tmp_path) == []


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    cache = NodeCache(tmp_path)
    with cache.new_stream() as new:
        monkeypatch.setattr(os, "pwrite", refuse)
        with pytest.raises(BootseerError, match="No space"):
            new.append(STREAM)
    assert names(tmp_path) == []


def test_one_pulls_and_the_others_find_it(tmp_path: Path) -> None:
    pulled: list[int] = []

    def pull(number: int) -> None:
        cache = NodeCache(tmp_path)
        with cache.pulling(DIGEST, 30):
            whole = cache.open_whole(DIGEST)
            if whole is None:
                pulled.append(number)
                append_in_pieces(cache)
            else:
                whole.close()

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pulled) == 1
    assert names(tmp_path) == [DIGEST.replace(":", "-")]
    cache = NodeCache(tmp_path)
    with (
        cache.pulling(DIGEST, 1),
        pytest.raises(DeadlineError, match="still pulling"),
        cache.pulling(DIGEST, 0.05),
    ):
        pass


@pytest.mark.needs("mount", "fuse")
def test_no_more_is_removed_than_a_new_stream_needs(tmp_path: Path) -> None:
    """A layer may claim to be small, and removed streams have to be fetched again."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", tmp_path], check=True)
    try:
        cache = NodeCache(tmp_path)
        digests = [f"sha256:{number:064}" for number in range(3)]
        for number, digest in enumerate(digests):
            with cache.new_stream() as new:
                new.append(bytes(18 * 2**20))
                new.commit(digest).close()
            os.utime(tmp_path / "streams" / digest.replace(":", "-"), (number, number))
        with cache.new_stream() as new:
            new.append(bytes(20 * 2**20))
            new.commit(DIGEST).close()
        assert {one.key for one in cache.streams()} == {*digests[1:], DIGEST}
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
