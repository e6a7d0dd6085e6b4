"""Hostile images on the command line: one sentence, an exit code, bounded memory, no remains.

These tests cover several parts together. Refusals of single parsers are tested beside them
(`tests/bootseer/blob/test_tar_reader.py`, `sources/`), and names that lead outside in
`tests/bootseer/cli/failing/test_hostile.py`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bootseer.settings.config import Settings
from testbed.images.building import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, LayoutBuilder, digest
from testbed.images.odd_tars import END, GNU, block, gnu_long, pax
from testbed.mounts.image_mounts import TIMEOUT_S, bootseer, settings_at

MEMORY_BYTES_MAX = 400 * 2**20
"""Memory of one command; two packers and their queues take some 150 MiB on two cores."""

_MEASURE = """
import os, resource, sys
pid = os.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, "-m", "bootseer", *sys.argv[1:]])
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss * 1024, file=sys.stderr)
os._exit(os.waitstatus_to_exitcode(status))
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_at(tmp_path)


def refused(settings: Settings, layout: Path, code: int) -> str:
    """Return the sentence with which `image index` refuses the layout."""
    flags = ["--store", settings.store_url, "--cache-dir", str(settings.cache_dir)]
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *flags, "image", "index", str(layout)],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    *lines, memory = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("bootseer: ")
    assert len(lines[0]) < 1000
    assert int(memory) < MEMORY_BYTES_MAX
    store = Path(settings.store_url.removeprefix("file://"))
    # A killed indexer may leave the same: whole blobs of sound layers without a record.
    left = {path.relative_to(store).parts[0] for path in store.rglob("*") if path.is_file()}
    assert left <= {"blobs"}
    work = settings.cache_dir / "tmp"
    assert not work.exists() or list(work.iterdir()) == []
    return lines[0]


def layout_of(directory: Path, tar: bytes, compression: str = "gzip") -> Path:
    LayoutBuilder(directory).add_image([tar], compression=compression)
    return directory


@pytest.mark.parametrize(
    ("tar", "message"),
    [
        (block(b"file", size=2**62, magic=GNU) + END, "cut off"),
        (block(b"file", size=-1, magic=GNU) + END, "impossible size"),
        (block(b"file", uid=2**33, magic=GNU) + END, "impossible"),
        (block(b"disk", b"3", device=(2**20, 1)) + END, "impossible device"),
        (pax({b"size": b"9" * 5000}) + block(b"file") + END, "not a number"),
        (pax({b"mtime": b"9" * 5000}) + block(b"file") + END, "not a number"),
        (pax({b"path": b"a\0b"}) + block(b"file") + END, "malformed"),
        (block(b"a", b"2", link=b"b") + block(b"b", b"2", link=b"a") + block(b"a/x"), "links"),
        (b"".join(pax({b"comment": b"x" * 10_000_000}) for _ in range(20)), "too long"),
        (pax({b"SCHILY.xattr.user.x": b"v" * 70_000}) + block(b"file") + END, "xattr"),
        (pax({b"SCHILY.xattr.user." + b"x" * 300: b"v"}) + block(b"file") + END, "xattr"),
        (os.urandom(512) * 100, "not a tar"),
    ],
    ids=[
        "size", "negative", "owner", "device", "pax size", "time", "NUL", "loop", "headers",
        "xattr", "xattr name", "noise",
    ],
)  # fmt: skip
def test_a_hostile_layer_is_refused_by_name(
    tar: bytes, message: str, settings: Settings, tmp_path: Path
) -> None:
    sentence = refused(settings, layout_of(tmp_path / "layout", tar), 15)
    assert message.replace("xattr", "extended attribute") in sentence


def test_a_decompression_bomb_is_refused(settings: Settings, tmp_path: Path) -> None:
    """A few kilobytes that become 16 GiB."""
    zeros = zstandard.ZstdCompressor(level=3).compress(bytes(2**27))
    stored = zstandard.ZstdCompressor().compress(block(b"file", size=2**34, magic=GNU))
    stored += zeros * 128
    layout = LayoutBuilder(tmp_path / "layout")
    add_image(layout, [layout.add_blob(stored, LAYER_TYPE + "+zstd")], [digest(b"never seen")])
    assert "bomb" in refused(settings, layout.directory, 15)


def test_names_that_imply_directories_without_end(settings: Settings, tmp_path: Path) -> None:
    """Regression: a megabyte of a tar, some kilobytes of gzip, took a gigabyte of memory."""
    names = (gnu_long(b"L", b"%08x/" % i + b"a/" * 2040) for i in range(250))
    tar = b"".join(name + block(b"x", magic=GNU) for name in names) + END
    sentence = refused(settings, layout_of(tmp_path / "layout", tar), 15)
    assert "directories that are not in it" in sentence


def add_image(
    layout: LayoutBuilder, layers: list[dict[str, Any]], diff_ids: list[str], **run: object
) -> None:
    """Add an image with these documents."""
    config = {"rootfs": {"type": "layers", "diff_ids": diff_ids}, "config": run}
    add_manifest(layout, layout.add_document(config, CONFIG_TYPE), layers)


def add_manifest(
    layout: LayoutBuilder, config: dict[str, Any], layers: list[dict[str, Any]]
) -> None:
    manifest = {"schemaVersion": 2, "config": config, "layers": layers}
    layout.manifests.append(layout.add_document(manifest, MANIFEST_TYPE))
    layout.write_index()


@pytest.mark.parametrize(
    ("first_bytes", "code", "message"),
    [
        (b"\xfd7zXZ\0" + bytes(1000), 18, "xz"),
        (b"BZh91AY&SY" + bytes(1000), 18, "bzip2"),
        (b"\x1f\x8b" + bytes(1000), 15, "decompressed"),
        (b"\x28\xb5\x2f\xfd" + b"\xff" * 1000, 15, "decompressed"),
        (b"", 15, ""),
    ],
    ids=["xz", "bzip2", "gzip", "zstd", "empty"],
)
def test_a_layer_that_is_no_tar(
    first_bytes: bytes, code: int, message: str, settings: Settings, tmp_path: Path
) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    layer = layout.add_blob(first_bytes, "application/x-unknown")
    add_image(layout, [layer], [digest(first_bytes)])
    assert message in refused(settings, layout.directory, code)


def deep(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    config = layout.add_blob(b'{"rootfs":' + b"[" * 200_000, CONFIG_TYPE)
    add_manifest(layout, config, [layer])


def long_number(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    config = layout.add_blob(b'{"rootfs":' + b"9" * 100_000 + b"}", CONFIG_TYPE)
    add_manifest(layout, config, [layer])


def too_large(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    config = layout.add_blob(b'{"x":"' + b"y" * 9_000_000 + b'"}', CONFIG_TYPE)
    add_manifest(layout, config, [layer])


def many_layers(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    add_image(layout, [layer] * 20_000, [digest(END)] * 20_000)


def many_variables(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    add_image(layout, [layer], [digest(END)], Env=[f"V{n}=x" for n in range(10_001)])


def no_strings(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    add_image(layout, [layer], [digest(END)], Env={"A": "B"}, Cmd=5)


def size_of_everything(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    add_image(layout, [{**layer, "size": 2**39}], [digest(END)])


def other_count(layout: LayoutBuilder, layer: dict[str, Any]) -> None:
    add_image(layout, [layer], [digest(END)] * 2)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (deep, 15),
        (long_number, 15),
        (too_large, 15),
        (many_layers, 15),
        (many_variables, 15),
        (no_strings, 15),
        (size_of_everything, 15),
        (other_count, 2),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_hostile_documents_are_refused(
    make: Callable[[LayoutBuilder, dict[str, Any]], None],
    code: int,
    settings: Settings,
    tmp_path: Path,
) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    make(layout, layout.add_blob(END, LAYER_TYPE))
    refused(settings, layout.directory, code)


def test_what_is_only_odd_is_taken(settings: Settings, tmp_path: Path) -> None:
    """10,000 variables, repeated keys (the last one counts, as in Go), and unknown types."""
    layout = LayoutBuilder(tmp_path / "layout")
    layer = layout.add_blob(END, "application/x-unknown")
    run = json.dumps({"Env": [f"V{n}=x" for n in range(10_000)], "WorkingDir": "/"})
    rootfs = json.dumps({"type": "layers", "diff_ids": [digest(END)]})
    text = f'{{"rootfs": {{"type": "other"}}, "rootfs": {rootfs}, "config": {run}}}'
    add_manifest(layout, layout.add_blob(text.encode(), "application/x-unknown"), [layer])
    done = bootseer(settings, "image", "index", layout.directory, "--name", "odd")
    assert done.returncode == 0, done.stderr
    shown = bootseer(settings, "image", "show", "odd", "--json")
    assert len(json.loads(shown.stdout)["config"]["env"]) == 10_000
