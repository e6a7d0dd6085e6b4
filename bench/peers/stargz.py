"""eStargz by the stargz snapshotter in containerd: `ctr-remote image rpull`, then `ctr run`.

The image is converted before. Debian has the snapshotter only as a Go library, so its program is
built here, once. An image whose layers begin with the files that the workload read would start
faster, but `ctr-remote image optimize` does not end with these images.
"""

import os
import shutil
import subprocess
from pathlib import Path

from bench.containers.node import EmptyNode
from bench.containers.site import PeersSite, copy_image
from bench.peers.containerd import NAMESPACE, ctr, programs, pull, run, shell, start_containerd
from testbed.needs import MissingError
from testbed.packages import Packages

_SOCKET = "/run/stargz/stargz.sock"
_SUITE = "trixie"
_TAG = "estargz"
_LIBRARY = "golang-github-containerd-stargz-snapshotter-dev"
_SOURCE = Path(__file__).with_name("stargz_snapshotter.go")
_BUILD_DEADLINE_S = 900.0
_CONVERT_DEADLINE_S = 900.0


class Stargz:
    """The stargz snapshotter with an eStargz image."""

    name = "estargz"
    description = "the image as eStargz: ctr-remote image rpull, then ctr run"

    def __init__(self, containerd_suite: str) -> None:
        self._suite = containerd_suite

    def fetch(self, packages: Packages) -> None:
        packages.unpacked(self._suite, "containerd")
        packages.unpacked(_SUITE, "stargz-snapshotter")
        _snapshotter(packages)

    def prepare(self, site: PeersSite) -> None:
        site.once(_TAG, lambda: self._convert(site))

    def _convert(self, site: PeersSite) -> None:
        # Kept beside the image, since the conversion takes minutes.
        kept = site.layout.with_name(f"{site.layout.name}-{_TAG}")
        here, there = f"oci:{kept}:{_TAG}", f"docker://{site.reference(_TAG)}"
        if kept.exists():
            copy_image(here, there)
            return
        with site.node("estargz") as node:
            start_containerd(site, node, self._suite)
            folder = programs(site, self._suite)
            names = f"{site.reference()} {site.reference(_TAG)}"
            command = shell(
                pull(site, folder),
                f"{_client(site)} image convert --estargz --oci {names}",
                f"{ctr(folder)} image push --plain-http {site.reference(_TAG)}",
            )
            node.run(command, timeout_s=_CONVERT_DEADLINE_S)
        partial = kept.with_name(f"{kept.name}.partial")
        copy_image(there, f"oci:{partial}:{_TAG}")
        partial.rename(kept)

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        start_containerd(site, node, self._suite, {"stargz": _SOCKET})
        node.run(["mkdir", "-p", str(Path(_SOCKET).parent)], timeout_s=10)
        node.start(
            [str(_snapshotter(site.packages)), _SOCKET, str(node.folder / "stargz")],
            lambda: node.succeeds(["test", "-S", _SOCKET]),
        )

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        image = site.reference(_TAG)
        rpull = f"{_client(site)} image rpull --plain-http {image}"
        start = run(site, programs(site, self._suite), "--snapshotter=stargz", image=image)
        return shell(rpull, start)

    def settle(self, site: PeersSite, node: EmptyNode) -> dict[str, float]:
        return {}


def _client(site: PeersSite) -> str:
    folder = site.packages.unpacked(_SUITE, "stargz-snapshotter") / "usr/bin"
    return f"{folder / 'ctr-remote'} --namespace {NAMESPACE}"


def _snapshotter(packages: Packages) -> Path:
    """Return the snapshotter's program, built if necessary. Raises: MissingError."""
    program = packages.folder / _SUITE / "containerd-stargz-grpc"
    if not program.exists():
        root = packages.unpacked_with_needs(_SUITE, _LIBRARY, "golang-go")
        [go] = (root / "usr/lib").glob("go-*")
        cache = packages.folder / _SUITE / "go-cache"
        settings = {
            "GOROOT": str(go),
            "GOPATH": str(root / "usr/share/gocode"),
            "GO111MODULE": "off",
            "GOTOOLCHAIN": "local",
            "GOCACHE": str(cache),
            "CGO_ENABLED": "0",
        }
        partial = program.with_suffix(".partial")
        done = subprocess.run(
            [str(go / "bin/go"), "build", "-o", str(partial), str(_SOURCE)],
            env={**os.environ, **settings}, capture_output=True, text=True,
            timeout=_BUILD_DEADLINE_S, check=False,
        )  # fmt: skip
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(root)
        if done.returncode != 0:
            raise MissingError(f"the stargz snapshotter cannot be built: {done.stderr[-500:]}")
        partial.rename(program)
    return program
