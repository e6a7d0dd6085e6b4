"""Site of the environment cases: archives on the node, a store and wheels behind the loopback.

Everything lies in memory, so that dropping the page cache makes nodes cold and not their sources:
`near` holds the node's own files; on the far side are a store (HDFS) and wheels (HTTP).
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.containers.node import EmptyNode
from bench.env.floor import fetch_zstd
from bench.env.recipe import CACHE, PLACE, SNAPSHOT, KeptEnvironment, environment, node_at
from bench.machine.disk import new_disk
from bench.model import Workspace
from bench.site import FarSide, far_side, listening
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.snapshots import catalogue
from bootseer.store import open_backend, open_store
from testbed.needs import MissingError, require
from testbed.network import ShapedLoopback
from testbed.packages import Packages

RATE_MBIT = 1000
# Room for wheels, the snapshot in two stores, two archives, and bundles.
_MEMORY_BYTES = 4 * 2**30
_PORT = 8000
# Size of a node's sparse disk, which holds caches and an environment.
_DISK_BYTES = 16 * 2**30
_PIECE_BYTES = 2**23


@dataclass(slots=True)
class EnvironmentSite:
    """Files, store and loopback that the ways of restoring share."""

    kept: KeptEnvironment
    packages: Packages
    near: Path
    """Folder in memory with the node's own files."""
    scratch: Path
    """Folder on the disk of `kept` for the nodes' disks, and for files that they share."""
    far: FarSide
    tree: Tree
    blob: Path
    """Snapshot's blob in the near store."""
    stored_bytes: int

    wheels_url = f"http://127.0.0.1:{_PORT}/"

    @property
    def near_store(self) -> Path:
        """Store in a folder of the node."""
        return self.near / "store"

    @property
    def line(self) -> ShapedLoopback:
        """Loopback between the nodes and the store and wheels."""
        return self.far.line

    @property
    def store_url(self) -> str:
        """URL of the store behind the loopback."""
        return self.far.store_url

    def once(self, name: str, prepare: Callable[[], None]) -> None:
        """Call `prepare` unless it was called under this name before."""
        self.far.once(name, prepare)

    @contextlib.contextmanager
    def node(self, name: str, tree: Path | None = None) -> Iterator[EmptyNode]:
        """Yield a new node, whose environment is `tree`, or missing."""
        with (
            new_disk(self.scratch / f"disk-{name}", _DISK_BYTES) as disk,
            node_at(disk / "node", tree) as node,
        ):
            yield node


def bootseer(store: str, *arguments: str) -> list[str]:
    """Return a command line of Bootseer for a node."""
    variables = [
        f"BOOTSEER_STORE={store}",
        f"BOOTSEER_CACHE_DIR={CACHE}",
        "BOOTSEER_RUN_DIR=/run/bootseer",
        f"BOOTSEER_TIMELINE_DIR={PLACE / 'timeline'}",
        "BOOTSEER_PUBLISH_TIMELINES=off",
    ]
    return ["env", *variables, sys.executable, "-m", "bootseer", *arguments]


@contextlib.contextmanager
def open_site(workspace: Workspace) -> Iterator[EnvironmentSite]:
    """Yield a site with everything in place. Raises: MissingError."""
    require("root", programs=("nsenter", "setpriv", "unshare", "zstd"))
    workspace.kept.mkdir(parents=True, exist_ok=True)
    kept = environment(workspace.kept, workspace.say)
    packages = Packages(workspace.kept / "packages")
    # Fetch it before the site has a network of its own, which reaches no package server.
    with contextlib.suppress(MissingError):
        fetch_zstd(packages)
    with contextlib.ExitStack() as stack:
        far = stack.enter_context(far_side(workspace, _MEMORY_BYTES))
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(dir=workspace.kept, prefix="env-nodes-")
        )
        near = far.memory / "near"
        shutil.copytree(kept.store, near / "store")
        for archive in (kept.tar, kept.packed):
            shutil.copy(archive, near)
        shutil.copytree(kept.wheels, near / "wheels")
        with open_store(str(near / "store")) as store:
            (target,) = catalogue.find(store, SNAPSHOT).targets
            tree = catalogue.load_tree(store, target)
        blob = near / "store" / blob_key(target.blob.digest)
        # The simplest index of wheels: a list of files.
        serve = [sys.executable, "-m", "http.server", str(_PORT), "--bind", "127.0.0.1"]
        serve += ["--directory", str(near / "wheels")]
        log = workspace.directory / "wheels.log"
        stack.enter_context(listening(serve, log, _PORT, "the index of wheels"))
        _copy_store(kept.store, far.store_url)
        stored_bytes = target.blob.size_bytes
        yield EnvironmentSite(kept, packages, near, Path(scratch), far, tree, blob, stored_bytes)


def _copy_store(folder: Path, url: str) -> None:
    """Copy the files of a store in a folder to another store."""
    backend = open_backend(url)
    try:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                with (
                    file.open("rb") as source,
                    backend.create(str(file.relative_to(folder))) as sink,
                ):
                    while piece := source.read(_PIECE_BYTES):
                        sink.write(piece)
    finally:
        backend.close()
