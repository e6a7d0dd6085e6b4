"""The fsspec interface: features of checkpoints beyond fsspec's own suite (`test_fsspec_suite`)."""

import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import random
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import fsspec
import pytest

from bootseer.errors import CorruptError, InvalidInputError, UnavailableError, UnsupportedError
from bootseer.fuse.striped.fsspec_system import CheckpointFileSystem
from bootseer.fuse.striped.layout import PARTS_FOLDER
from tests.fuse.striped.support.fsspec_access import DATA, OPTIONS, UNIT, exercise

pytestmark = pytest.mark.usefixtures("no_instances_stay")


@pytest.fixture
def made(url: str) -> tuple[CheckpointFileSystem, str]:
    """File system and a folder in it, on a local disk and on HDFS."""
    fs, path = fsspec.url_to_fs(f"bootseer::{url}", **OPTIONS)
    return fs, path


def test_a_file_is_striped_and_read_back(made: tuple[CheckpointFileSystem, str]) -> None:
    # Imported here: its threads would keep the workers of pytest from being forks.
    import numpy as np

    fs, root = made
    path = f"{root}/step-1/model.pt"
    with fs.open(path, "wb") as file:
        for at in range(0, len(DATA), 100_000):
            file.write(memoryview(DATA)[at : at + 100_000])
        assert not fs.exists(path)
    assert fs.storage.tree.stored.view(fs.key(path)).layout is not None
    with fs.open(path) as file:
        assert file.size == len(DATA)
        assert file.read(10) == DATA[:10]
        file.seek(-7, os.SEEK_END)
        assert file.read() == DATA[-7:]
        file.seek(0)
        assert file.read() == DATA
        assert file.read(1) == b""
        file.seek(5)
        buffer = np.zeros(UNIT + 3, dtype=np.uint8)
        assert file.readinto(buffer) == len(buffer)
        assert buffer.tobytes() == DATA[5 : 5 + len(buffer)]
        assert file.tell() == 5 + len(buffer)


def test_names_and_attributes(made: tuple[CheckpointFileSystem, str]) -> None:
    fs, root = made
    fs.makedirs(f"{root}/a/b")
    with pytest.raises(FileExistsError):
        fs.mkdir(f"{root}/a")
    fs.pipe({f"{root}/a/one": b"1", f"{root}/a/b/two": DATA})
    assert fs.ls(f"{root}/a", detail=False) == [f"{root}/a/b", f"{root}/a/one"]
    assert fs.ls(f"{root}/a/one", detail=False) == [f"{root}/a/one"]
    assert fs.find(root) == [f"{root}/a/b/two", f"{root}/a/one"]
    assert fs.glob(f"{root}/*/*/t*") == [f"{root}/a/b/two"]
    assert {key: fs.info(f"{root}/a/b/two")[key] for key in ("size", "type", "name")} == {
        "size": len(DATA),
        "type": "file",
        "name": f"{root}/a/b/two",
    }
    assert fs.created(f"{root}/a/one") == fs.modified(f"{root}/a/one")
    assert fs.modified(f"{root}/a/one").tzinfo is not None
    assert fs.cat(f"{root}/a/o*") == {f"{root}/a/one": b"1"}
    before = fs.ukey(f"{root}/a/b/two")
    fs.pipe_file(f"{root}/a/b/two", DATA)
    assert fs.ukey(f"{root}/a/b/two") != before
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{root}/none")
    with pytest.raises(FileNotFoundError):
        fs.info(f"{root}/a/{PARTS_FOLDER}")
    assert fs.isdir("/")


def test_ranges_count_from_either_end(made: tuple[CheckpointFileSystem, str]) -> None:
    fs, root = made
    fs.pipe_file(f"{root}/f", DATA)
    assert fs.cat_file(f"{root}/f", 5, -5) == DATA[5:-5]
    assert fs.cat_file(f"{root}/f", -10) == DATA[-10:]
    assert fs.cat_file(f"{root}/f", len(DATA) + 5, len(DATA) + 9) == b""
    starts = [random.Random(1).randrange(len(DATA)) for _ in range(20)]
    found = fs.cat_ranges([f"{root}/f"] * 20, starts, [start + 1000 for start in starts])
    assert found == [DATA[start : start + 1000] for start in starts]
    results = fs.cat_ranges([f"{root}/f", f"{root}/none"], 0, 10)
    assert results[0] == DATA[:10]
    assert isinstance(results[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges([f"{root}/none"], 0, 10, on_error="raise")


def test_appending_adds_at_the_end(made: tuple[CheckpointFileSystem, str]) -> None:
    fs, root = made
    for piece in (b"head", DATA, b"tail"):
        with fs.open(f"{root}/log", "ab") as file:
            file.write(piece)
    assert fs.cat_file(f"{root}/log") == b"head" + DATA + b"tail"


def test_rename_and_remove(made: tuple[CheckpointFileSystem, str]) -> None:
    fs, root = made
    fs.pipe_file(f"{root}/step.tmp/model", DATA)
    parts = fs.storage.backend.list(f"{fs.key(root)}/step.tmp/{PARTS_FOLDER}")
    generation = next(parts).path.rpartition("/")[2]
    fs.mv(f"{root}/step.tmp", f"{root}/step-1", recursive=True)
    moved = fs.storage.backend.list(f"{fs.key(root)}/step-1/{PARTS_FOLDER}")
    assert [info.path.rpartition("/")[2] for info in moved] == [generation]  # nothing was copied
    fs.mv(f"{root}/step-1/model", f"{root}/step-1/weights")
    fs.mv(f"{root}/step-1/weights", f"{root}/elsewhere")  # between directories: a copy
    assert fs.find(root) == [f"{root}/elsewhere"]
    assert fs.cat_file(f"{root}/elsewhere") == DATA
    fs.cp_file(f"{root}/elsewhere", f"{root}/step-1/again")
    assert fs.cat_file(f"{root}/step-1/again") == DATA
    with pytest.raises(OSError):
        fs.rmdir(f"{root}/step-1")
    fs.rm(f"{root}/step-1", recursive=True)
    assert not fs.exists(f"{root}/step-1")
    with pytest.raises(FileNotFoundError):
        fs.rm(f"{root}/step-1")


def test_a_move_to_the_same_place_loses_nothing(made: tuple[CheckpointFileSystem, str]) -> None:
    """Regression: under another spelling a file was copied onto itself, and then removed."""
    fs, root = made
    fs.pipe_file(f"{root}/d/f", DATA)
    fs.mv(f"{root}/d/f", f"{root}/d//f")
    fs.mv(f"{root}/d", f"{root}//d", recursive=True)
    fs.mv(f"{root}/d/f", fs.unstrip_protocol(f"{root}/d/f"), recursive=True)
    assert fs.find(root) == [f"{root}/d/f"]
    assert fs.cat_file(f"{root}/d/f") == DATA


def test_files_that_cannot_be_copied_are_not_moved(made: tuple[CheckpointFileSystem, str]) -> None:
    """Regression: fsspec up to 2026.1 goes on after missing names, and removes."""
    fs, root = made
    fs.pipe_file(f"{root}/d/f", DATA)
    with pytest.raises(FileNotFoundError):
        fs.mv(f"{root}/d/*", f"{root}/{PARTS_FOLDER}/", recursive=True)
    assert fs.find(root) == [f"{root}/d/f"]


def test_a_damaged_file_does_not_hide_its_directory(
    made: tuple[CheckpointFileSystem, str],
) -> None:
    """Regression: other files beside it could be neither listed nor removed."""
    fs, root = made
    fs.pipe_file(f"{root}/d/f", DATA)
    fs.pipe_file(f"{root}/d/g", b"sound")
    backend = fs.storage.backend
    layout = bytearray(backend.read(fs.key(f"{root}/d/f")))
    layout[200] ^= 1
    with backend.create(fs.key(f"{root}/d/f"), overwrite=True) as writer:
        writer.write(layout)
    sizes = {entry["name"]: entry["size"] for entry in fs.ls(f"{root}/d")}
    assert sizes == {f"{root}/d/f": len(layout), f"{root}/d/g": 5}
    assert fs.exists(f"{root}/d/f")
    with pytest.raises(CorruptError):
        fs.cat_file(f"{root}/d/f")
    fs.rm(f"{root}/d/f")
    assert fs.find(root) == [f"{root}/d/g"]


def test_a_storage_that_does_not_answer_is_not_an_empty_one(
    made: tuple[CheckpointFileSystem, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it looked empty, and `xb` replaced the file."""
    fs, root = made
    fs.pipe_file(f"{root}/f", b"old")

    def refuse(path: str) -> NoReturn:
        raise UnavailableError("no answer")

    assert not fs.exists(f"{root}/f/none")
    with monkeypatch.context() as patch:
        patch.setattr(fs.storage.backend, "stat", refuse)
        with pytest.raises(UnavailableError):
            fs.exists(f"{root}/f")
        with pytest.raises(UnavailableError):
            fs.open(f"{root}/f", "xb")
    assert fs.cat_file(f"{root}/f") == b"old"


def _in_with(fs: CheckpointFileSystem, path: str, mode: str) -> Any:
    return fs.open(path, mode)


def _in_open_file(fs: CheckpointFileSystem, path: str, mode: str) -> Any:
    return fsspec.open(fs.unstrip_protocol(path), mode, **OPTIONS)


@pytest.mark.parametrize("opener", [_in_with, _in_open_file])
@pytest.mark.parametrize("mode", ["wb", "w"])
def test_an_exception_leaves_the_old_file(
    opener: Callable[..., Any], mode: str, tmp_path: Path
) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    path = str(tmp_path / "f")
    fs.pipe_file(path, b"old")
    with contextlib.suppress(KeyError), opener(fs, path, mode) as file:
        file.write("x" * 2_000_000 if mode == "w" else bytes(2_000_000))
        raise KeyError
    assert fs.cat_file(path) == b"old"
    with opener(fs, path, mode) as file:
        file.write("new" if mode == "w" else b"new")
    assert fs.cat_file(path) == b"new"


def test_a_file_closed_while_an_exception_is_handled_is_kept(tmp_path: Path) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    pieces = iter([b"1", b"2"])
    file = fs.open(str(tmp_path / "f"), "wb")
    try:
        while True:
            file.write(next(pieces))
    except StopIteration:
        file.close()
    assert fs.cat_file(str(tmp_path / "f")) == b"12"


def test_a_file_that_is_never_closed_is_not_kept(tmp_path: Path) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    file = fs.open(str(tmp_path / "f"), "wb")
    file.write(DATA)
    del file
    gc.collect()
    assert not fs.exists(str(tmp_path / "f"))


def test_transactions(made: tuple[CheckpointFileSystem, str]) -> None:
    fs, root = made
    with fs.transaction:
        for name in "ab":
            with fs.open(f"{root}/{name}", "wb") as file:
                file.write(DATA)
        assert not fs.exists(f"{root}/a")
    assert fs.cat_file(f"{root}/b") == fs.cat_file(f"{root}/a") == DATA
    with contextlib.suppress(KeyError), fs.transaction:
        with fs.open(f"{root}/a", "wb") as file:
            file.write(b"new")
        raise KeyError
    assert fs.cat_file(f"{root}/a") == DATA


def _read_in_worker(fs: CheckpointFileSystem, file: Any, path: str) -> tuple[bool, bool]:
    return fs.cat_file(path) == DATA, file.read() == DATA[3:]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes(method: str, tmp_path: Path) -> None:
    """A DataLoader's workers are forked, or get pickled objects."""
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    root = str(tmp_path)
    fs.pipe_file(f"{root}/f", DATA)
    file = fs.open(f"{root}/f")
    file.read(3)
    assert pickle.loads(pickle.dumps(fs)).storage is fs.storage
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        waiting = pool.apply_async(_read_in_worker, (fs, file, f"{root}/f"))
        assert waiting.get(timeout=60) == (True, True)
        pool.close()
        pool.join()
    assert file.read(5) == DATA[3:8]  # the parent's is as it was


def test_a_forked_child_reads_on_and_publishes_nothing(
    made: tuple[CheckpointFileSystem, str],
) -> None:
    fs, root = made
    fs.pipe_file(f"{root}/f", DATA)
    file = fs.open(f"{root}/f")
    file.read(3)
    written = fs.open(f"{root}/g", "wb")
    written.write(DATA)
    child = os.fork()
    if child == 0:
        is_right = False
        try:
            is_right = file.read() == DATA[3:] and fs.cat_file(f"{root}/f") == DATA
            written.close()
            is_right = is_right and not fs.exists(f"{root}/g")
        finally:
            os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    written.close()
    assert fs.cat_file(f"{root}/g") == DATA


def test_a_file_that_was_replaced_is_not_unpickled_as_another(tmp_path: Path) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    fs.pipe_file(str(tmp_path / "f"), DATA)
    with fs.open(str(tmp_path / "f")) as file:
        sent = pickle.dumps(file)
        fs.pipe_file(str(tmp_path / "f"), DATA[1:])
        assert file.read() == DATA  # who has it open reads on
    with pytest.raises(UnavailableError, match="replaced"):
        pickle.loads(sent)


def test_threads_share_one_window(tmp_path: Path) -> None:
    url = f"bootseer::{tmp_path.as_uri()}"
    found = []

    def ask() -> None:
        found.append(fsspec.url_to_fs(url, **OPTIONS)[0])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(fs.storage) for fs in found}) == 1
    assert (
        fsspec.url_to_fs(url, **{**OPTIONS, "stripe_count": 2})[0].storage is not found[0].storage
    )


def test_damage_is_an_error(tmp_path: Path) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    fs.pipe_file(str(tmp_path / "f"), DATA)
    part = next((tmp_path / PARTS_FOLDER).glob("*/01"))
    content = bytearray(part.read_bytes())
    content[100] ^= 1
    part.write_bytes(content)
    with fs.open(str(tmp_path / "f")) as file, pytest.raises(CorruptError, match="01"):
        file.read()


def test_urls_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="bootseer::hdfs://nn/x"):
        fsspec.url_to_fs("bootseer://hdfs://nn/x")
    with pytest.raises(InvalidInputError, match="target_protocol"):
        fsspec.filesystem("bootseer")
    fs, path = fsspec.url_to_fs("bootseer::hdfs://me@nn:8020/a//b?replication=2")
    assert path == "/a//b"
    assert fs.shown_name(path) == "/a/b"
    assert fs.storage.backend.url == "hdfs://nn:8020"
    assert fs.unstrip_protocol("/a/b") == "bootseer::hdfs://nn:8020/a/b"
    fs, path = fsspec.url_to_fs("bootseer::memory://a/b")
    assert (path, fs.unstrip_protocol(path)) == ("/a/b", "bootseer::memory://a/b")
    assert fs.key("/a/b") == "a/b"


def test_a_local_path_may_go_through_a_symbolic_link(tmp_path: Path) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", **OPTIONS)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fs.pipe_file(str(tmp_path / "link/f"), DATA)
    assert fs.ls(str(tmp_path / "link"), detail=False) == [str(tmp_path / "link/f")]
    assert fs.cat_file(str(tmp_path / "real/f")) == DATA


def test_arrow_and_numpy(made: tuple[CheckpointFileSystem, str]) -> None:
    # Imported here: their threads would keep the workers of pytest from being forks.
    import numpy as np
    import pyarrow as pa
    import pyarrow.dataset
    import pyarrow.parquet as pq

    fs, root = made
    table = pa.table({"x": np.arange(200_000), "y": np.random.default_rng(0).random(200_000)})
    pq.write_table(table, f"{root}/t/one.parquet", filesystem=fs)
    assert pq.read_table(f"{root}/t/one.parquet", filesystem=fs).equals(table)
    assert pyarrow.dataset.dataset(f"{root}/t", filesystem=fs).to_table().equals(table)
    array = np.random.default_rng(1).random((300, 500))
    with fs.open(f"{root}/a.npy", "wb") as file:
        np.save(file, array)
    with fs.open(f"{root}/a.npy") as file:
        assert np.array_equal(np.load(file), array)


def test_lines_and_pickle(made: tuple[CheckpointFileSystem, str]) -> None:
    fs, root = made
    lines = [f"line {number} é\n" for number in range(50_000)]
    with fs.open(f"{root}/lines", "w", encoding="utf-8") as file:
        file.writelines(lines)
    with fs.open(f"{root}/lines", "r", encoding="utf-8") as file:
        assert list(file) == lines
    with fs.open(f"{root}/lines") as file:
        assert file.readline(4) == b"line"
        assert file.readline() == b" 0 \xc3\xa9\n"
        assert [line.decode() for line in file] == lines[1:]
    state = {"step": 7, "weights": [bytes(random.Random(n).randbytes(1000)) for n in range(900)]}
    with fs.open(f"{root}/state", "wb") as file:
        pickle.dump(state, file)
    with fs.open(f"{root}/state") as file:
        assert pickle.load(file) == state
    with fsspec.open(fs.unstrip_protocol(f"{root}/lines.gz"), "wb", compression="gzip") as file:
        file.write(DATA)
    with pytest.raises(UnsupportedError, match=r"fsspec\.open"):
        fs.open(f"{root}/lines.gz", "wb", compression="gzip")
    with fs.open(f"{root}/lines.gz", "rb", compression="gzip") as file:
        assert file.read() == DATA
    buffered = io.BufferedReader(fs.open(f"{root}/state"))
    assert pickle.load(buffered) == state


def test_plain_files_on_request(tmp_path: Path) -> None:
    fs = fsspec.filesystem("bootseer", target_protocol="file", layout="plain", **OPTIONS)
    fs.pipe_file(str(tmp_path / "f"), DATA)
    assert (tmp_path / "f").read_bytes() == DATA


def test_in_memory() -> None:
    exercise(*fsspec.url_to_fs("bootseer::memory://doors/x", **OPTIONS))
    assert fsspec.filesystem("memory").find("/doors") == []


def test_get_and_put(made: tuple[CheckpointFileSystem, str], tmp_path: Path) -> None:
    fs, root = made
    source = Path(tempfile.mkdtemp(dir=tmp_path))
    (source / "sub").mkdir()
    (source / "sub/f").write_bytes(DATA)
    (source / "g").write_bytes(b"g")
    seen = fsspec.Callback()
    fs.put(str(source), f"{root}/up", recursive=True, callback=seen)
    assert fs.find(f"{root}/up") == [f"{root}/up/g", f"{root}/up/sub/f"]
    fs.get(f"{root}/up", str(tmp_path / "down"), recursive=True)
    assert (tmp_path / "down/sub/f").read_bytes() == DATA
    sink = io.BytesIO()
    fs.get_file(f"{root}/up/sub/f", sink)
    assert sink.getvalue() == DATA
