"""OCI layouts and archives: names, opening and refusals."""

import contextlib
import gc
import gzip
import http.server
import io
import json
import os
import tarfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnknownFormatError,
)
from bootseer.prefetch.sources import ImageSource, open_source
from testbed.images.building import (
    INDEX_TYPE,
    MANIFEST_TYPE,
    NASTY,
    LayoutBuilder,
    Member,
    digest,
    run_tool,
    tar_of,
    write_layout,
)
from tests.prefetch.sources.packed import packed_digests

RUN = {"Env": ["A=1"], "Entrypoint": ["/bin/sh", "-c"], "WorkingDir": "/w", "User": "9"}


def opened(source: Path | str, tmp_path: Path) -> ImageSource:
    return open_source(str(source), tmp_path / "work")


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    write_layout(tmp_path / "layout", NASTY, compression="gzip", tag="v1", run=RUN)
    return tmp_path / "layout"


@pytest.mark.parametrize("form", ["{}", "oci:{}", "oci:{}:v1"])
def test_a_layout(form: str, layout: Path, tmp_path: Path) -> None:
    source = opened(form.format(layout), tmp_path)
    assert source.reference == "layout:v1"
    assert source.config.env == ("A=1",)
    assert source.config.entrypoint == ("/bin/sh", "-c")
    assert (source.config.working_dir, source.config.user) == ("/w", "9")
    assert [layer.digest for layer in source.layers] == [digest(tar_of(m)) for m in NASTY]
    assert len(packed_digests(source)) == len(NASTY)


def test_a_tag_that_is_a_whole_name(tmp_path: Path) -> None:
    name = "registry.example:5000/team/train:v1"
    write_layout(tmp_path / "a:b", NASTY[:1], tag=name)
    source = opened(f"oci:{tmp_path / 'a:b'}:{name}", tmp_path)
    assert source.reference == name


def test_several_images_need_a_tag(layout: Path, tmp_path: Path) -> None:
    more = LayoutBuilder(tmp_path / "more")
    for tag in ("one", "two"):
        more.add_image([tar_of([Member(tag)])], tag=tag)
    with pytest.raises(InvalidInputError, match="one, two"):
        opened(more.directory, tmp_path)
    with pytest.raises(NotFoundError, match="three"):
        opened(f"oci:{more.directory}:three", tmp_path)
    two = opened(f"oci:{more.directory}:two", tmp_path)
    assert two.layers[0].digest == digest(tar_of([Member("two")]))


@pytest.mark.parametrize("nested", [True, False])
def test_the_running_platform_is_picked(nested: bool, tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    here = [tar_of([Member("here")])]
    other = [tar_of([Member("other")])]
    manifests = [
        layout.add_image(other, architecture="s390x", listed=not nested, tag="v1"),
        layout.add_image(here, listed=not nested, tag="v1"),
        layout.add_image(other, architecture="unknown", listed=not nested, tag="v1"),
    ]
    if nested:
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": manifests}
        layout.manifests.append(layout.add_document(index, INDEX_TYPE))
        layout.write_index()
    assert opened(layout.directory, tmp_path).layers[0].digest == digest(here[0])


def test_no_image_for_this_platform(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    for architecture in ("s390x", "riscv64"):
        layout.add_image([tar_of([])], architecture=architecture)
    with pytest.raises(NotFoundError, match="linux/riscv64, linux/s390x"):
        opened(layout.directory, tmp_path)


def replaced(layout: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the manifest, with the right digest."""
    index = json.loads((layout / "index.json").read_text())
    entry = index["manifests"][0]
    manifest = json.loads((layout / "blobs" / entry["digest"].replace(":", "/")).read_text())
    change(manifest)
    written = LayoutBuilder(layout)
    descriptor = written.add_document(manifest, MANIFEST_TYPE)
    written.manifests.append({**entry, **descriptor})
    written.write_index()


Change = Callable[[dict[str, Any]], None]


def set_in(**values: object) -> Change:
    return lambda manifest: manifest.update(values)


def set_layer(**values: object) -> Change:
    return lambda manifest: manifest["layers"][0].update(values)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (set_in(schemaVersion=1), UnknownFormatError),
        (set_in(schemaVersion=None), UnknownFormatError),
        (set_in(layers=5), CorruptError),
        (set_in(layers=[None]), CorruptError),
        (set_in(layers=[]), InvalidInputError),
        (set_in(config=None), CorruptError),
        (set_layer(digest="sha256:../../../etc/passwd"), CorruptError),
        (set_layer(digest="md5:" + "0" * 32), CorruptError),
        (set_layer(digest=7), CorruptError),
        (set_layer(size=-1), CorruptError),
        (set_layer(size=2**60), CorruptError),
        (set_layer(size="5"), CorruptError),
        (set_layer(size=True), CorruptError),
        (set_layer(mediaType=["x"]), CorruptError),
        (
            set_in(
                config={"mediaType": "x", "digest": digest(b"{}"), "size": 2},
            ),
            NotFoundError,
        ),
    ],
)
def test_hostile_manifests(
    change: Change, error: type[BootseerError], layout: Path, tmp_path: Path
) -> None:
    replaced(layout, change)
    with pytest.raises(error) as caught:
        opened(layout, tmp_path)
    assert type(caught.value) is error


def test_a_document_that_is_not_what_its_digest_says(layout: Path, tmp_path: Path) -> None:
    entry = json.loads((layout / "index.json").read_text())["manifests"][0]
    path = layout / "blobs" / entry["digest"].replace(":", "/")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CorruptError, match="other contents"):
        opened(layout, tmp_path)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(layout: Path, tmp_path: Path) -> None:
    blob = max(layout.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)
    blob.unlink()
    os.mkfifo(blob)
    with pytest.raises(InvalidInputError, match="regular file"):
        packed_digests(opened(layout, tmp_path))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b" " * 9_000_000])
def test_an_index_that_is_none(data: bytes, layout: Path, tmp_path: Path) -> None:
    (layout / "index.json").write_bytes(data)
    with pytest.raises(CorruptError):
        opened(layout, tmp_path)


def test_an_index_that_points_to_itself_ends(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    entry = layout.add_document({"schemaVersion": 2, "manifests": []}, INDEX_TYPE)
    for _ in range(10):
        entry = layout.add_document({"schemaVersion": 2, "manifests": [entry]}, INDEX_TYPE)
    layout.manifests.append(entry)
    layout.write_index()
    with pytest.raises(CorruptError, match="nested"):
        opened(layout.directory, tmp_path)


def test_an_artifact_is_no_image(tmp_path: Path) -> None:
    layout = LayoutBuilder(tmp_path / "layout")
    manifest = {
        "schemaVersion": 2,
        "config": layout.add_blob(b"{}", "application/vnd.oci.empty.v1+json"),
        "layers": [],
    }
    layout.manifests.append(layout.add_document(manifest, MANIFEST_TYPE))
    layout.write_index()
    with pytest.raises(InvalidInputError, match="artifact"):
        opened(layout.directory, tmp_path)


def test_an_empty_layout(tmp_path: Path) -> None:
    LayoutBuilder(tmp_path / "layout")
    with pytest.raises(InvalidInputError, match="no image"):
        opened(tmp_path / "layout", tmp_path)
    (tmp_path / "layout/index.json").unlink()
    with pytest.raises(InvalidInputError, match=r"index\.json"):
        opened(tmp_path / "layout", tmp_path)


@pytest.mark.parametrize("kind", ["docker-archive", "oci-archive"])
@pytest.mark.parametrize("prefixed", [True, False])
def test_archives_made_by_skopeo(kind: str, prefixed: bool, layout: Path, tmp_path: Path) -> None:
    archive = tmp_path / "image.tar"
    run_tool("skopeo", "copy", f"oci:{layout}:v1", f"{kind}:{archive}:team/train:v1")
    source = opened(f"{kind}:{archive}" if prefixed else archive, tmp_path)
    assert source.reference in ("docker.io/team/train:v1", "team/train:v1")
    direct = opened(layout, tmp_path)
    assert source.config.entrypoint == direct.config.entrypoint
    assert source.config.diff_ids == direct.config.diff_ids
    assert packed_digests(source) == packed_digests(direct)


def archive_of(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return buffer.getvalue()


def saved(layers: Mapping[str, bytes], tags: list[str], **more: Any) -> dict[str, bytes]:
    """Return the files of an archive as Docker before 25 wrote them."""
    diff_ids = [digest(data) for data in layers.values()]
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": diff_ids}, **more}).encode()
    name = digest(config)[7:] + ".json"
    entry = {"Config": name, "RepoTags": tags, "Layers": list(layers)}
    return {name: config, "manifest.json": json.dumps([entry]).encode(), **layers}


LAYER = tar_of([Member("x", data=b"x" * 1000)])


def test_the_layout_of_old_docker_save(tmp_path: Path) -> None:
    files = saved({"abc/layer.tar": LAYER, "def/layer.tar": LAYER}, ["tool:1"])
    del files["def/layer.tar"]
    path = tmp_path / "old.tar"
    path.write_bytes(archive_of(files, {"def/layer.tar": "../abc/layer.tar"}))
    source = opened(path, tmp_path)
    assert source.reference == "tool:1"
    first, second = packed_digests(source)
    assert first == second
    assert opened(f"docker-archive:{path}:tool:1", tmp_path).reference == "tool:1"
    with pytest.raises(NotFoundError, match="tool:2"):
        opened(f"docker-archive:{path}:tool:2", tmp_path)


def test_an_archive_without_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.tar"
    path.write_bytes(archive_of(saved({"l": LAYER}, [])))
    assert opened(path, tmp_path).reference == "mine"


def test_several_images_in_an_archive(tmp_path: Path) -> None:
    files = saved({"l": LAYER}, ["tool:1"])
    entry = json.loads(files["manifest.json"])[0]
    files["manifest.json"] = json.dumps([entry, {**entry, "RepoTags": ["tool:2"]}]).encode()
    path = tmp_path / "two.tar"
    path.write_bytes(archive_of(files))
    with pytest.raises(InvalidInputError, match="tool:1, tool:2"):
        opened(path, tmp_path)
    assert opened(f"docker-archive:{path}:tool:2", tmp_path).reference == "tool:2"


def test_archives_that_are_refused(tmp_path: Path) -> None:
    files = saved({"l": LAYER}, ["tool:1"])
    config = next(name for name in files if name.endswith(".json") and len(name) > 20)
    whole = archive_of(files)
    loop = {k: v for k, v in files.items() if k != "l"}
    cases: list[tuple[bytes, type[BootseerError], str]] = [
        (b"", InvalidInputError, "not an image archive"),
        (b"no tar at all" * 1000, InvalidInputError, "not an image archive"),
        (gzip.compress(whole), InvalidInputError, "gunzip"),
        (archive_of({"a": b"b"}), InvalidInputError, "neither"),
        (archive_of({"repositories": b"{}"}), UnknownFormatError, "1.10"),
        (archive_of(loop, {"l": "m", "m": "l"}), NotFoundError, "no file l"),
        (archive_of(loop), NotFoundError, "no file l"),
        (archive_of({**files, config: b"{}"}), CorruptError, "digest"),
        (archive_of({**files, "manifest.json": b"{}"}), CorruptError, "list"),
        (archive_of({**files, "manifest.json": b"[]"}), NotFoundError, "no image"),
        (archive_of({**files, "manifest.json": b"[1]"}), CorruptError, "object"),
        (archive_of({**files, "manifest.json": b"[{}]"}), NotFoundError, "no file"),
        (whole[: whole.index(LAYER) + 600], CorruptError, "cut off"),
    ]
    for number, (data, error, message) in enumerate(cases):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(data)
        with pytest.raises(error, match=message) as caught:
            opened(path, tmp_path)
        assert type(caught.value) is error, number


def test_a_layer_of_an_archive_is_verified(tmp_path: Path) -> None:
    files = saved({"l": LAYER}, ["tool:1"])
    files["l"] = tar_of([Member("y", data=b"y" * 1000)])
    path = tmp_path / "image.tar"
    path.write_bytes(archive_of(files))
    with pytest.raises(CorruptError, match="configuration"):
        packed_digests(opened(path, tmp_path))


def test_sources_that_do_not_exist(tmp_path: Path) -> None:
    for source in ("absent", "oci:absent:v1", "docker-archive:absent", "/dev/null/x"):
        with pytest.raises(NotFoundError):
            opened(source, tmp_path)
    with pytest.raises(InvalidInputError, match="registry"):
        opened("ftp://x/y", tmp_path)
    with pytest.raises(InvalidInputError, match="neither"):
        opened("/dev/null", tmp_path)


def test_a_directory_that_is_no_layout_is_a_root_file_system(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    source = opened(tmp_path / "root", tmp_path)
    assert (source.reference, source.identity) == ("root", None)


@pytest.mark.parametrize(
    ("directory", "reference"),
    [(".venv", "venv"), ("my root (old)", "my-root-old"), ("é", "image"), ("x" * 200, "x" * 100)],
)
def test_a_name_for_what_has_none(directory: str, reference: str, tmp_path: Path) -> None:
    (tmp_path / directory).mkdir()
    assert opened(tmp_path / directory, tmp_path).reference == reference


def test_no_docker_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        # The SDK does not close a socket that it could not connect.
        warnings.simplefilter("ignore", ResourceWarning)
        for host in (f"unix://{tmp_path}/absent.sock", "tcp://127.0.0.1:1", "nonsense"):
            monkeypatch.setenv("DOCKER_HOST", host)
            with pytest.raises(UnavailableError, match="docker save"):
                opened("docker://tool:1", tmp_path)
        gc.collect()
    with pytest.raises(InvalidInputError, match="name"):
        opened("docker://", tmp_path)
    assert not (tmp_path / "work").exists() or not list((tmp_path / "work").iterdir())


class Engine(http.server.BaseHTTPRequestHandler):
    """Docker engine with one image, tool:1."""

    sends: Callable[[io.BufferedIOBase, threading.Event], object]
    """Function that sends the image; the event is set at the test's end."""
    size_bytes = 0
    over: threading.Event

    def do_GET(self) -> None:
        if self.path.endswith("/get"):
            self.send_response(200)
            if self.size_bytes:
                self.send_header("Content-Length", str(self.size_bytes))
            self.end_headers()
            with contextlib.suppress(OSError):
                type(self).sends(self.wfile, self.over)
            return
        document = {"ApiVersion": "1.43", "Id": "sha256:" + "7" * 64, "RepoTags": ["tool:1"]}
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def engine(
    monkeypatch: pytest.MonkeyPatch,
    sends: Callable[[io.BufferedIOBase, threading.Event], object],
    size_bytes: int = 0,
) -> Iterator[None]:
    """Replace the Docker engine of this process; its image claims to have so many bytes."""
    over = threading.Event()
    kind = type("One", (Engine,), {"sends": sends, "size_bytes": size_bytes, "over": over})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_address[1]}")
    try:
        yield
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


def test_a_docker_engine_that_drips_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(sink: io.BufferedIOBase, over: threading.Event) -> None:
        while not over.wait(0.02):
            sink.write(b"x")

    monkeypatch.setattr("bootseer.prefetch.sources.stream.WAIT_S", 1.0)
    with engine(monkeypatch, drip):
        with pytest.raises(DeadlineError, match="too little"):
            opened("docker://tool:1", tmp_path)
        assert list((tmp_path / "work").iterdir()) == []


def test_a_docker_engine_that_hangs_up_is_no_fault_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(monkeypatch, lambda sink, over: sink.write(b"a"), 1000):
        with pytest.raises(UnavailableError, match="Docker engine"):
            opened("docker://tool:1", tmp_path)
        assert list((tmp_path / "work").iterdir()) == []


def test_a_copy_of_an_engines_image_is_gone_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = archive_of(saved({"abc/layer.tar": LAYER, "def/layer.tar": LAYER}, ["tool:1"]))
    with engine(monkeypatch, lambda sink, over: sink.write(image), len(image)):
        source = opened("docker://tool:1", tmp_path)
    assert source.reference == "tool:1"
    # If this process were killed now, nothing would stay.
    assert list((tmp_path / "work").iterdir()) == []
    first, second = packed_digests(source)
    assert first == second


def test_a_layer_as_umoci_inserts_it_ends_with_its_last_byte(tmp_path: Path) -> None:
    """Without padding and without the blocks that end an archive, as containerd accepts it."""
    layout, tree = tmp_path / "layout", tmp_path / "tree"
    tree.mkdir()
    (tree / "x").write_bytes(b"hello")
    run_tool("umoci", "init", "--layout", str(layout))
    run_tool("umoci", "new", "--image", f"{layout}:v1")
    run_tool("umoci", "insert", "--image", f"{layout}:v1", str(tree), "/d")
    (layer,) = opened(f"oci:{layout}:v1", tmp_path).layers
    sink = io.BytesIO()
    packed = layer.pack(sink, lambda count: None)
    pieces: list[bytes] = []
    pulled = layer.pull(pieces.append, lambda count: None)
    assert b"".join(pieces).endswith(b"hello")
    for tree_of in (packed.tree, pulled.tree):
        assert [path for path, _ in tree_of.walk()] == [b"", b"d", b"d/x"]


def test_a_refused_layer_is_named(tmp_path: Path) -> None:
    good, bad = tar_of([Member("a")]), tar_of([Member("../\u00e9")])
    layout = LayoutBuilder(tmp_path / "layout")
    layout.add_image([good, bad])
    layers = opened(layout.directory, tmp_path).layers
    uses: tuple[Callable[[], object], ...] = (
        lambda: layers[1].pack(io.BytesIO(), lambda count: None),
        lambda: layers[1].pull(lambda piece: None, lambda count: None),
    )
    for use in uses:
        with pytest.raises(CorruptError) as caught:
            use()
        assert digest(bad) in str(caught.value)
        assert "'../\u00e9'" in str(caught.value)
