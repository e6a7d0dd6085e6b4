"""What the environment cases stand on while they run: archives, wheels, a store, and the line.

What nodes restore from lies in memory, so that dropping the page cache makes nodes cold and not
their sources: in `near` what is on a node already; behind the line a store (HDFS) and wheels
(HTTP).
"""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.containers.node import Node
from bench.containers.services import assemble_hdfs, hdfs_store, listening
from bench.env.recipe import CACHE, PLACE, SNAPSHOT, Kept, environment, node_at
from bench.machine.disk import new_disk
from bench.machine.tmpfs import tmpfs
from bench.model import Workspace
from bootseer.blob.keys import blob_key
from bootseer.blob.tree import Tree
from bootseer.snapshots.catalogue import catalogue
from bootseer.store import open_backend, open_store
from testbed.line import Line, own_network
from testbed.needs import MissingError
from testbed.packages import Packages

RATE_MBIT = 1000
# Wheels, the snapshot in two stores, two archives, and bundles.
_MEMORY_BYTES = 4 * 2**30
_PORT = 8000
# A node's, sparse: caches, an environment, and room.
_DISK_BYTES = 16 * 2**30
_PIECE_BYTES = 2**23


@dataclass(slots=True)
class Site:
    """All that ways of restoring share."""

    kept: Kept
    packages: Packages
    near: Path
    """In memory: what a node has."""
    scratch: Path
    """On the disk of `kept`: for the disks of nodes, and for what they share."""
    line: Line
    store_url: str
    tree: Tree
    blob: Path
    """The snapshot's, in the near store."""
    stored_bytes: int
    prepared: set[str] = field(default_factory=set)

    wheels_url = f"http://127.0.0.1:{_PORT}/"

    @property
    def near_store(self) -> Path:
        """A store in a folder of the node."""
        return self.near / "store"

    def once(self, name: str, prepare: Callable[[], None]) -> None:
        """Call `prepare` if nothing was prepared under this name."""
        if name not in self.prepared:
            prepare()
            self.prepared.add(name)

    @contextlib.contextmanager
    def node(self, name: str, tree: Path | None = None) -> Iterator[Node]:
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
def open_site(workspace: Workspace) -> Iterator[Site]:
    """Everything in its place. Raises: MissingError."""
    if os.geteuid() != 0:
        raise MissingError("namespaces, mounts and dropping the page cache need root")
    for tool in ("nsenter", "setpriv", "unshare", "zstd"):
        if shutil.which(tool) is None:
            raise MissingError(f"there is no {tool}; apt install util-linux zstd")
    workspace.kept.mkdir(parents=True, exist_ok=True)
    kept = environment(workspace.kept, workspace.say)
    assemble_hdfs()
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(tmpfs(workspace.directory, _MEMORY_BYTES))
        scratch = stack.enter_context(
            tempfile.TemporaryDirectory(dir=workspace.kept, prefix="env-nodes-")
        )
        near = memory / "near"
        shutil.copytree(kept.store, near / "store")
        for archive in (kept.tar, kept.packed):
            shutil.copy(archive, near)
        shutil.copytree(kept.wheels, near / "wheels")
        with open_store(str(near / "store")) as store:
            (target,) = catalogue.find(store, SNAPSHOT).targets
            tree = catalogue.load_tree(store, target)
        blob = near / "store" / blob_key(target.blob.digest)
        line = stack.enter_context(own_network())
        # An index of wheels as simple as one can be: a list of files.
        serve = [sys.executable, "-m", "http.server", str(_PORT), "--bind", "127.0.0.1"]
        serve += ["--directory", str(near / "wheels")]
        log = workspace.directory / "wheels.log"
        stack.enter_context(listening(serve, log, _PORT, "the index of wheels"))
        store_url = stack.enter_context(hdfs_store(memory))
        _copy_store(kept.store, store_url)
        stored_bytes = target.blob.size_bytes
        packages = Packages(workspace.kept / "packages")
        yield Site(kept, packages, near, Path(scratch), line, store_url, tree, blob, stored_bytes)


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
