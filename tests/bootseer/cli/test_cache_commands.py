"""`bootseer cache`: kept caches, whether they can be used, and why not."""

import tarfile
from pathlib import Path

import pytest

from tests.bootseer.cli.conftest import World
from tests.bootseer.cli.json_page import agree


@pytest.fixture
def torch(own_world: World, tmp_path: Path) -> Path:
    """Return packages of the Python that commands run in, torch among them."""
    packages = tmp_path / "packages"
    (packages / "torch-9.9.1.dist-info").mkdir(parents=True)
    own_world.variables.update(PATH="/usr/bin:/bin", PYTHONPATH=str(packages))
    return packages


def test_a_cache_from_its_import_to_its_end(own_world: World, torch: Path) -> None:
    world = own_world
    archive = world.path("cache.tar.gz")
    with tarfile.open(archive, "w:gz") as made:
        made.add(world.path("src"), ".")
    job = ("--", "python3", "train.py")
    name = "TORCHINDUCTOR_CACHE_DIR"
    missed = world("cache", "explain", "--json", *job).json
    agree("cache explain", missed, free=("[].parts",))
    assert {one["cache"]: one["hit"] for one in missed}[name] is False
    imported = world("cache", "import", "--json", archive, name, *job).json
    agree("cache import", imported)
    key = imported["key"]
    (hit,) = (one for one in world("cache", "explain", "--json", *job).json if one["cache"] == name)
    assert (hit["key"], hit["hit"], hit["nearest"]) == (key, True, None)
    (listed,) = world("cache", "list", "--json").json
    agree("cache list", [listed])
    assert listed["generation"]["key"] == key
    assert key[:12] in world("cache", "list").out
    # An environment is none of these, and these are none.
    assert key not in [one["fingerprint"] for one in world("snapshot", "list", "--json").json]
    for arguments in (("--files",), ()):
        shown = world("snapshot", "show", key[:12], "--json", *arguments).json
        agree("snapshot show", shown, free=("parts",))
        assert shown["parts"]["package torch"] == "9.9.1"
    # Another version of torch is another cache, and the difference is said.
    (torch / "torch-9.9.1.dist-info").rename(torch / "torch-9.9.2.dist-info")
    (other,) = (
        one for one in world("cache", "explain", "--json", *job).json if one["cache"] == name
    )
    agree("cache explain", [other], free=("[].parts",))
    assert other["nearest"] == key
    wanted = {"part": "package torch", "there": "9.9.1", "here": "9.9.2"}
    assert wanted in other["differences"]
    told = world("cache", "explain", *job).out
    assert "9.9.2" in told
    assert "differs in" in told
    exported = world("snapshot", "export", key, "out.tar.zst", "--json").json
    agree("snapshot export", exported)
    agree("cache delete", world("cache", "delete", key[:12], "--json").json)
    assert world("cache", "list", "--json").json == []
    assert world("snapshot", "show", key).code == 10


def test_a_snapshot_is_no_cache(own_world: World) -> None:
    created = own_world("snapshot", "create", "--target", "src", "--json").json
    refused = own_world("cache", "delete", created["fingerprint"])
    assert refused.code == 10
    assert "not a kept cache" in refused.err


def test_an_unknown_cache_is_refused_with_those_there_are(own_world: World, torch: Path) -> None:
    done = own_world("cache", "import", "x.tar", "NO_CACHE_DIR", "--", "python3")
    assert done.code == 2
    assert "TORCHINDUCTOR_CACHE_DIR" in done.err
