"""Site of the environment cases: archives on the node, a store and wheels behind the line.

All of it lies in memory, so that dropping the page cache makes nodes cold and not their sources:
in `near` what is on a node already; on the far side a store (HDFS) and wheels (HTTP).
"""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.containers.node import EmptyNode
from bench.env.recipe import CACHE, PLACE, SNAPSHOT, Kept, environment, node_at
from bench.machine.disk import new_disk
from bench.model import Workspace
from bench.site import FarSide, far_side, listening
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.snapshots import catalogue
from bootseer.store import open_backend, open_store
from testbed.line import Line
from testbed.needs import require
from testbed.packages import Packages

RATE_MBIT = 1000
# Wheels, the snapshot in two stores, two archives, and bundles.
_MEMORY_BYTES = 4 * 2**30
_PORT = 8000
# A node's, sparse: caches, an environment, and room.
_DISK_BYTES = 16 * 2**30
_PIECE_BYTES = 2**23


@dataclass(slots=True)
class EnvironmentSite:
    """All that ways of restoring share."""

    kept: Kept
    packages: Packages
    near: Path
    """In memory: what a node has."""
    scratch: Path
    """On the disk of `kept`: for the disks of nodes, and for what they share."""
    far: FarSide
    tree: Tree
    blob: Path
    """The snapshot's, in the near store."""
    stored_bytes: int

    wheels_url = f"http://127.0.0.1:{_PORT}/"

    @property
    def near_store(self) -> Path:
        """A store in a folder of the node."""
        return self.near / "store"

    @property
    def line(self) -> Line:
        """Line between the nodes and the store and wheels."""
        return self.far.line

    @property
    def store_url(self) -> str:
        """URL of the store behind the line."""
        return self.far.store_url

    def once(self, name: str, prepare: Callable[[], None]) -> None:
        """Call `prepare` if nothing was prepared under this name."""
        self.far.once(name, prepare)

    @contextlib.contextmanager
    def node(self, name: str, tree: Path | None = None) -> Iterator[EmptyNode]:
        """A new node, whose environment is `tree`, or nothing yet."""
        with (
            new_disk(self.scratch / f"disk-{name}", _DISK_BYTES) as disk,
            node_at(disk / "node", tree) as node,
        ):
            yield node


def bootseer(store: str, *arguments: str) -> list[str]:
    """A command line for a node."""
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
    """Everything in its place. Raises: MissingError."""
    require("root", programs=("nsenter", "setpriv", "unshare", "zstd"))
    workspace.kept.mkdir(parents=True, exist_ok=True)
    kept = environment(workspace.kept, workspace.say)
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
        # An index of wheels as simple as one can be: a list of files.
        serve = [sys.executable, "-m", "http.server", str(_PORT), "--bind", "127.0.0.1"]
        serve += ["--directory", str(near / "wheels")]
        log = workspace.directory / "wheels.log"
        stack.enter_context(listening(serve, log, _PORT, "the index of wheels"))
        _copy_store(kept.store, far.store_url)
        stored_bytes = target.blob.size_bytes
        packages = Packages(workspace.kept / "packages")
        yield EnvironmentSite(kept, packages, near, Path(scratch), far, tree, blob, stored_bytes)


def _copy_store(folder: Path, url: str) -> None:
    """A store's files are the same everywhere."""
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
