"""Striped files on an object store: objects written in parallel, published by one PUT."""

import concurrent.futures
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from bootseer.errors import NotFoundError, UnsupportedError
from bootseer.fuse.striped.layout import PARTS_FOLDER, decode_layout
from bootseer.store import Backend, open_backend
from testbed.waiting import wait_for
from tests.fuse.striped.support.faulty import FaultyBackend, failing
from tests.fuse.striped.support.fsspec_access import OPTIONS, exercise
from tests.fuse.striped.support.harness import UNIT, Driver, storage_on
from tests.fuse.striped.support.mounting import checkpoints, shell
from tests.fuse.striped.support.stored import find_garbage

DATA = random.Random(8).randbytes(20 * UNIT + 77)
OTHER = random.Random(9).randbytes(17 * UNIT + 5)


@pytest.fixture
def s3_url(
    moto: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> str:
    """URL of a prefix for one test."""
    for key, value in moto.items():
        monkeypatch.setenv(key, value)
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return f"s3://conformance/{name}"


@pytest.fixture
def backend(s3_url: str) -> Iterator[Backend]:
    made = open_backend(s3_url)
    yield made
    made.close()


def test_a_file_is_published_by_one_put(backend: Backend) -> None:
    with storage_on(backend) as storage:
        driver = Driver(storage)
        driver.mkdir("d")
        assert driver.names("") == ["d"]
        assert driver.names("d") == []
        driver.write("d/f", b"small")
        driver.write("d/f", DATA)
        assert driver.read("d/f") == DATA
        driver.write("d/f", OTHER[:UNIT], flags=os.O_APPEND)
        assert driver.read("d/f") == DATA + OTHER[:UNIT]
        with storage_on(backend) as elsewhere:
            assert Driver(elsewhere).read("d/f") == DATA + OTHER[:UNIT]
        layout = decode_layout(backend.read("d/f"), "d/f")
        # Every unit is an object.
        assert [len(segment.parts) for segment in layout.segments] == [21, 1]
        driver.rename("d/f", "d/g")
        assert driver.read("d/g") == DATA + OTHER[:UNIT]
        driver.unlink("d/g")
        driver.rmdir("d")
        with pytest.raises(NotFoundError):
            backend.stat("d")


def test_a_file_of_several_segments(backend: Backend) -> None:
    data = random.Random(4).randbytes(130 * UNIT)
    with storage_on(backend) as storage:
        driver = Driver(storage)
        driver.mkdir("d")
        driver.write("d/f", data)
        assert driver.read("d/f") == data
        layout = decode_layout(backend.read("d/f"), "d/f")
        assert [len(segment.parts) for segment in layout.segments] == [128, 2]


def test_several_writers_of_one_name(backend: Backend) -> None:
    contents = [bytes([number]) * (10 * UNIT + number) for number in range(4)]

    def save(content: bytes) -> None:
        with storage_on(backend) as storage:
            Driver(storage).write("d/f", content)

    with storage_on(backend) as storage:
        Driver(storage).mkdir("d")
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(save, contents))
        assert Driver(storage).read("d/f") in contents


@pytest.mark.parametrize("size", [9, 5 * UNIT], ids=["plain", "striped"])
def test_saves_within_a_second_are_told_apart(backend: Backend, size: int) -> None:
    """Both have the same size and, in the bucket's listing, the same time."""
    with storage_on(backend) as here, storage_on(backend) as elsewhere:
        nodes = Driver(here), Driver(elsewhere)
        for content in (DATA[:size], OTHER[:size], DATA[-size:]):
            nodes[0].write("f", content)
            assert [node.read("f") for node in nodes] == [content] * 2


def test_a_directory_is_not_renamed(backend: Backend) -> None:
    with storage_on(backend) as storage:
        driver = Driver(storage)
        driver.mkdir("d")
        driver.write("d/f", DATA)
        with pytest.raises(UnsupportedError):
            driver.rename("d", "e")
        assert driver.read("d/f") == DATA


def test_a_rename_that_was_cut_short_costs_no_file(backend: Backend) -> None:
    """A copy without the delete leaves two names for the same objects; either can be removed."""
    with storage_on(backend) as storage:
        driver = Driver(storage)
        driver.mkdir("d")
        driver.write("d/f", DATA)
        with backend.create("d/g") as writer:
            writer.write(backend.read("d/f"))
        driver.unlink("d/f")
        assert driver.read("d/g") == DATA
        driver.unlink("d/g")
        assert find_garbage(backend, "d") == []


def test_a_put_that_fails_is_made_again(backend: Backend) -> None:
    faulty = FaultyBackend(backend)
    faulty.rules.append(failing("close", lambda: OSError(5, "5"), within=PARTS_FOLDER, times=2))
    with storage_on(faulty) as storage:
        driver = Driver(storage)
        driver.mkdir("d")
        driver.write("d/f", DATA)
        assert driver.read("d/f") == DATA
        assert storage.counters.read().write_retry_count == 2


def test_a_save_that_is_killed_leaves_only_garbage(s3_url: str) -> None:
    backend = open_backend(s3_url)
    backend.mkdir("d")
    code = (
        "import sys, time\n"
        "from tests.fuse.striped.support.harness import *\n"
        "from bootseer.store import open_backend\n"
        "driver = Driver(storage_on(open_backend(sys.argv[1])))\n"
        "file = driver.open('d/f', os.O_WRONLY | os.O_CREAT)\n"
        "for number in range(16): driver.pwrite(file, number * UNIT, bytes(UNIT))\n"
        "print('half', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, s3_url], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    wait_for(lambda: find_garbage(backend, "d"), "a part in the store")
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    with pytest.raises(NotFoundError):
        backend.stat("d/f")
    assert len(find_garbage(backend, "d")) == 1
    backend.close()


@pytest.mark.needs("fuse")
def test_a_mounted_bucket(s3_url: str, tmp_path: Path, mountpoint: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(random.Random(1).randbytes(9 * 2**20 + 5))
    with checkpoints(tmp_path, mountpoint, s3_url, stripe_unit_bytes=2**20):
        shell(
            "mkdir {m}/step-1; cp {s} {m}/step-1/model; cmp {s} {m}/step-1/model;"
            "mv {m}/step-1/model {m}/step-1/weights; cmp {s} {m}/step-1/weights;"
            "echo 1 > {m}/latest; test $(cat {m}/latest) = 1; rm -r {m}/step-1; ls {m}",
            m=mountpoint,
            s=source,
        )


def test_an_object_store_with_credentials_of_its_own(moto: dict[str, str]) -> None:
    options = {
        "endpoint_url": moto["AWS_ENDPOINT_URL"],
        "key": moto["AWS_ACCESS_KEY_ID"],
        "secret": moto["AWS_SECRET_ACCESS_KEY"],
    }
    fs, root = fsspec.url_to_fs("bootseer::s3://conformance/doors", s3=options, **OPTIONS)
    assert root == "conformance/doors"
    exercise(fs, root)
    type(fs).clear_instance_cache()  # closes it while the server is there
