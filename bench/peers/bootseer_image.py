"""Bootseer's `run --image` by the command line, with the store behind the limited loopback.

Layers are indexed and records are made before, by starts that are not timed, unless a mode says
otherwise.
"""

import sys
from collections.abc import Mapping
from enum import Enum

from bench.containers.node import EmptyNode
from bench.containers.site import PeersSite
from testbed.images.torch_image import TAGS
from testbed.needs import require
from testbed.packages import Packages

_INDEX_DEADLINE_S = 600.0
_WAIT_DEADLINE_S = 180.0
_V1, _REBUILT = TAGS


class ImageMode(Enum):
    """State of the store before the start, and kind of the start."""

    UNINDEXED = "nobody has indexed the image: it is pulled whole, and indexed behind the start"
    SEEK_POINTS = "lazy from the registry: only seek points are in the store; nothing is recorded"
    LAZY = "lazy without a record: indexed; nothing is fetched ahead"
    RECORD = "the record run: indexed; what is read is recorded and published behind the start"
    REPLAY = "replay: an earlier start was recorded"
    REBUILT = "replay of a record of the image from before its top layer was built again"
    LOCAL = "all of the image in the node's cache, which is on disk; the page cache is cold"


class Bootseer:
    """`bootseer run --image` in one mode, with `count` containers at once on the node."""

    def __init__(self, name: str, mode: ImageMode, *, count: int = 1) -> None:
        self.name = name
        many = f", {count} containers at once" if count > 1 else ""
        self.description = f"{mode.value}{many}"
        self._mode = mode
        self._count = count
        self._records = 0

    def fetch(self, packages: Packages) -> None:
        if self._mode is ImageMode.SEEK_POINTS:
            # Without this module the layers would be copied.
            require(modules=["indexed_gzip"])

    def prepare(self, site: PeersSite) -> None:
        if self._mode is ImageMode.SEEK_POINTS:
            site.once("bootseer seek points", lambda: _find_seek_points(site))
        elif self._mode is not ImageMode.UNINDEXED:
            site.once("bootseer index", lambda: _index(site, _V1))
        if self._mode in (ImageMode.REPLAY, ImageMode.REBUILT):
            site.once("bootseer record", lambda: _record(site))
        if self._mode is ImageMode.REBUILT:
            site.once("bootseer index rebuilt", lambda: _index(site, _REBUILT))

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        if self._mode is ImageMode.LOCAL:
            command = _command(settings(site, node), "image", "fetch", _name(_V1))
            node.run(command, timeout_s=_INDEX_DEADLINE_S)

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        tag, workload, switches = _V1, site.workload.name, {"BOOTSEER_RECORD": "never"}
        if self._mode is ImageMode.RECORD:
            # A workload name without a record.
            self._records += 1
            workload, switches = f"{workload}-{self._records}", {}
        elif self._mode is ImageMode.LAZY:
            switches["BOOTSEER_PREFETCH"] = "off"
        elif self._mode is ImageMode.SEEK_POINTS:
            switches |= {"BOOTSEER_PREFETCH": "off", "BOOTSEER_STORE": _points_store(site)}
            return _run(site, node, site.reference(), workload, switches)
        elif self._mode is ImageMode.REBUILT:
            tag = _REBUILT
        elif self._mode is ImageMode.UNINDEXED:
            return self._launch_unindexed(site, node)
        one = _run(site, node, _name(tag), workload, switches)
        if self._count == 1:
            return one
        # `set -e` ends the script with the first exit code that is not 0.
        script = f'for i in $(seq {self._count}); do "$@" & all="$all $!"; done'
        return ["sh", "-ec", f'{script}; for one in $all; do wait "$one"; done', "sh", *one]

    def _launch_unindexed(self, site: PeersSite, node: EmptyNode) -> list[str]:
        # An empty store.
        self._records += 1
        store = {"BOOTSEER_STORE": f"{site.store_url}-unindexed-{self._records}"}
        image = f"registry://{site.reference()}"
        return _run(site, node, image, site.workload.name, store)

    def settle(self, site: PeersSite, node: EmptyNode) -> dict[str, float]:
        if self._mode is ImageMode.RECORD:
            _wait_published(site, node)
        return {}


def _name(tag: str) -> str:
    return f"bench-torch:{tag}"


def settings(site: PeersSite, node: EmptyNode) -> dict[str, str]:
    """Return Bootseer's variables on a node."""
    return {
        "BOOTSEER_STORE": site.store_url,
        "BOOTSEER_CACHE_DIR": str(node.folder / "cache"),
        "BOOTSEER_RUN_DIR": "/run/bootseer",
        "BOOTSEER_TIMELINE_DIR": str(node.folder / "timeline"),
        "BOOTSEER_PUBLISH_TIMELINES": "off",
    }


def _command(variables_of: Mapping[str, str], *arguments: str) -> list[str]:
    variables = [f"{name}={value}" for name, value in variables_of.items()]
    return ["env", *variables, sys.executable, "-m", "bootseer", *arguments]


def _run(
    site: PeersSite, node: EmptyNode, image: str, workload: str, switches: Mapping[str, str]
) -> list[str]:
    start = ["--workload", workload, "run", "--image", image, "--runtime", "runc"]
    variables = {**settings(site, node), **switches}
    return _command(variables, *start, "--", *site.workload.command)


def _index(site: PeersSite, tag: str) -> None:
    with site.node("bootseer-index") as node:
        source = f"oci:{site.layout}:{tag}"
        command = _command(settings(site, node), "image", "index", source, "--name", _name(tag))
        node.run(command, timeout_s=_INDEX_DEADLINE_S)


def _points_store(site: PeersSite) -> str:
    """Return the URL of a store that holds only seek points."""
    return f"{site.store_url}-points"


def _find_seek_points(site: PeersSite) -> None:
    with site.node("bootseer-points") as node:
        variables = {
            **settings(site, node),
            "BOOTSEER_STORE": _points_store(site),
            "BOOTSEER_COPY_LAYERS": "off",
        }
        command = _command(variables, "image", "index", f"registry://{site.reference()}")
        node.run(command, timeout_s=_INDEX_DEADLINE_S)


def _record(site: PeersSite) -> None:
    with site.node("bootseer-record") as node:
        always = {"BOOTSEER_RECORD": "always"}
        run = _run(site, node, _name(_V1), site.workload.name, always)
        node.run(run, timeout_s=_INDEX_DEADLINE_S)
        _wait_published(site, node)


def _wait_published(site: PeersSite, node: EmptyNode) -> None:
    wait = _command(settings(site, node), "status", "--wait", f"{_WAIT_DEADLINE_S:g}")
    node.run(wait, timeout_s=_WAIT_DEADLINE_S + 10)
