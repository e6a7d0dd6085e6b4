"""Hostile images, layouts and directories: no file outside is read, made or changed."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest

from testbed.needs import MissingError, require
from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.failing.promises import check

_OUTSIDE = "../../../../../../../../../../../.."


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("runtime", ["chroot", "runc"])
@pytest.mark.parametrize(
    "names",
    [("etc", "proc", "sys", "dev", "tmp", "data"), ("etc/hosts", "etc/resolv.conf", "data")],
    ids=["folders", "files"],
)
@pytest.mark.needs("fuse")
def test_mount_points_that_are_links_lead_nowhere(
    own_world: World, runtime: str, names: tuple[str, ...]
) -> None:
    require("root", "fuse")
    if runtime == "runc" and not shutil.which("runc"):
        raise MissingError("runc is not installed")
    world = own_world
    outside = world.path("outside")
    outside.mkdir()
    for prefix in (_OUTSIDE, "", "/proc/1/root", "/proc/self/cwd/" + _OUTSIDE):
        image = world.path("hostile")
        shutil.rmtree(image, ignore_errors=True)
        (image / "etc").mkdir(parents=True)
        if "etc" in names:
            (image / "etc").rmdir()
        for name in names:
            (image / name).symlink_to(f"{prefix}{outside}/planted")
        # It starts, as far as the mounts; then there is nothing that a kernel could run.
        (image / "program").write_bytes(b"\x7fELF nothing")
        (image / "program").chmod(0o755)
        assert world("image", "index", "hostile", "--name", "hostile:1").code == 0
        options = (
            *("--bind", f"{world.path('src')}:/data"),
            *("--checkpoint", f"{world.path('checkpoints')}:/mnt"),
        )
        result = world(
            *("run", "--image", "hostile:1", "--runtime", runtime, *options, "--", "/program")
        )
        assert result.code != 0
        assert "Traceback" not in result.err
        # Nobody waited for what this process itself has mounted.
        assert "aborting them" not in result.err
        assert result.in_time
        assert listing(outside) == []
        assert listing(world.path("src")) == ["bin", "bin/program", "lib", "lib/data"]
    table = Path("/proc/self/mounts").read_text()
    assert str(outside) not in table


def archive(path: Path, working_dir: str, members: list[tuple[str, bytes, str]]) -> None:
    """Write an archive as `docker save`, with one layer of `members` (name, type, link)."""
    import hashlib

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o755
            tar.addfile(info)
    data = layer.getvalue()
    config = {
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
        "config": {"WorkingDir": working_dir, "Cmd": ["/program"]},
    }
    manifest = [{"Config": "config", "RepoTags": ["hostile:1"], "Layers": ["layer"]}]
    with tarfile.open(path, "w") as tar:
        for name, content in (
            ("manifest.json", json.dumps(manifest).encode()),
            ("config", json.dumps(config).encode()),
            ("layer", data),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    "members",
    [
        [("../../outside/x", tarfile.REGTYPE, "")],
        [("a/../../outside/x", tarfile.REGTYPE, "")],
        [("x", tarfile.LNKTYPE, "../../text")],
        [("x", tarfile.LNKTYPE, "x")],
        [("..", tarfile.DIRTYPE, "")],
        [(".wh...", tarfile.REGTYPE, "")],
        [("a/.wh.", tarfile.REGTYPE, "")],
    ],
)
def test_layers_with_names_outside_are_refused(
    own_world: World, members: list[tuple[str, bytes, str]]
) -> None:
    archive(own_world.path("a.tar"), "/", members)
    before = listing(own_world.path("store/images"))
    check(own_world("image", "index", "a.tar"), 15)
    # Blobs of layers may be there: nothing names them.
    assert listing(own_world.path("store/images")) == before


@pytest.mark.parametrize("working_dir", [_OUTSIDE, "/..", "etc/" + _OUTSIDE, "\x1b[31m"])
@pytest.mark.needs("fuse")
def test_a_working_directory_outside(own_world: World, working_dir: str) -> None:
    require("root", "fuse")
    world = own_world
    archive(world.path("a.tar"), working_dir, [("program", tarfile.REGTYPE, "")])
    assert world("image", "index", "a.tar").code == 0
    for runtime in ("chroot", "runc"):
        if runtime == "runc" and not shutil.which("runc"):
            continue
        result = world("run", "--image", "hostile:1", "--runtime", runtime)
        assert result.code in (1, 2, 126, 127), result
        assert "Traceback" not in result.err
    result = world("image", "show", "hostile:1")
    assert result.code == 0
    assert "\x1b" not in result.out


@pytest.mark.parametrize(
    "document",
    ["[]", "5", '{"manifests":5}', '{"manifests":[5]}', "[" * 100_000, "\xff", ""]
    + [
        json.dumps(
            {
                "schemaVersion": 2,
                "manifests": [
                    {
                        "mediaType": "application/vnd.oci.image.manifest.v1+json",
                        "digest": digest,
                        "size": size,
                    }
                ],
            }
        )
        for digest, size in (
            ("sha256:../../../text", 21),
            ("../../text", 21),
            ("sha256:" + "0" * 63 + "/", 2),
            (None, 2),
            ({"a": 1}, 2),
            ("sha256:" + "0" * 64, -1),
            ("sha256:" + "0" * 64, 2**70),
            ("sha256:" + "0" * 64, "x"),
        )
    ],
)
def test_layouts_that_lie(own_world: World, document: str) -> None:
    layout = own_world.path("layout")
    (layout / "blobs/sha256").mkdir(parents=True)
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (layout / "index.json").write_text(document, encoding="latin-1")
    check(own_world("image", "index", "layout"), (15, 16), "layout")


def test_a_store_with_planted_links(own_world: World) -> None:
    """Another user of a shared store makes links in the places of objects or their folders."""
    world = own_world
    outside = world.path("outside")
    outside.mkdir()
    for planted in ("blobs", "indexes/sha256", "images", ".tmp", "snapshots", "leases"):
        store = world.path("store")
        shutil.rmtree(store)
        (store / planted).parent.mkdir(parents=True)
        (store / planted).symlink_to(outside)
        for arguments in (
            ("image", "index", "src", "--name", "image:1"),
            ("snapshot", "create", "--target", "src"),
        ):
            result = world(*arguments)
            assert "Traceback" not in result.err
            if result.code:
                check(result, result.code, "store")
        assert listing(outside) == [], planted
