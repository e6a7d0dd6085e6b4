"""File operations through a mount have the same results as on the directory behind it.

Each scenario is a script that prints its results. It runs twice in child processes, on the mount
and on a plain directory of the same file system; both outputs must be equal.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.fuse.kernel.server import FuseServer
from testbed.kernels import RELEASES, offer_all, offer_as
from testbed.mounts import fuse_mount
from testbed.mounts.passthrough_fs import PassthroughFileSystem
from testbed.needs import MissingError

pytestmark = pytest.mark.needs("fuse")

_SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*/*.py"))
_numbers = itertools.count()


@pytest.fixture(scope="module", params=["cached", "direct_io", "no_ttl", *RELEASES])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FuseServer, Path]]:
    """Mounted mirror, and a directory of the same file system beside the mirrored one."""
    root = tmp_path_factory.mktemp("files")
    (root / "backing").mkdir()
    (root / "plain").mkdir()
    file_system = PassthroughFileSystem(
        root / "backing",
        direct_io=request.param == "direct_io",
        ttl_s=0.0 if request.param == "no_ttl" else 1.0,
    )
    if request.param in RELEASES:
        offer_as(request.param)
    try:
        with fuse_mount.mounted(file_system, root / "mnt") as server:
            yield server, root / "plain"
    finally:
        offer_all()
    assert file_system.destroyed_count == 1


@pytest.mark.parametrize("scenario", _SCENARIOS, ids=lambda path: path.stem)
def test_as_on_the_directory_behind(served: tuple[FuseServer, Path], scenario: Path) -> None:
    server, plain = served
    connection = server.attached.connection
    direct_io = isinstance(server.operations, PassthroughFileSystem) and server.operations.direct_io
    if direct_io and scenario.stem == "mmap_shared" and not connection.direct_io_mmap:
        raise MissingError("this kernel maps no direct_io files (Linux 6.6 does)")
    name = f"{scenario.stem}-{next(_numbers)}"
    backing = server.attached.path.parent / "backing"
    outputs = []
    for parent in (backing, plain):
        (parent / name).mkdir()
    for path in (server.attached.path / name, plain / name):
        outputs.append(fuse_mount.check_python(scenario.read_text(), path))
    assert outputs[0] == outputs[1]
    assert outputs[0]


def test_more_entries_than_a_reply_holds(served: tuple[FuseServer, Path]) -> None:
    server, _ = served
    name = f"many-{next(_numbers)}"
    backing = server.attached.path.parent / "backing" / name
    backing.mkdir()
    for number in range(2_000):
        (backing / f"file-{number}").touch()
    code = "import os, sys; names = os.listdir(sys.argv[1]); print(len(names), len(set(names)))"
    path = server.attached.path / name
    assert fuse_mount.check_python(code, path).split() == ["2000", "2000"]
    code = "import os, sys; print(sum(e.stat().st_size == 0 for e in os.scandir(sys.argv[1])))"
    assert fuse_mount.check_python(code, path).strip() == "2000"
