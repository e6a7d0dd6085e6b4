"""eStargz by the stargz snapshotter in containerd: `ctr-remote image rpull`, then `ctr run`.

The image is converted beforehand: as it is, or optimized, that is with what the same workload read
put first in each layer, which the snapshotter then fetches ahead. Debian has the snapshotter only
as a Go library, so its program is built here from that, once.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

from bench.containers.node import Node
from bench.containers.packages import Packages
from bench.containers.site import Site, copy_image
from bench.model import SkippedError
from bench.peers.containerd import NAMESPACE, programs, pull, run, shell, start_containerd

_SOCKET = "/run/stargz/stargz.sock"
_SUITE = "trixie"
_LIBRARY = "golang-github-containerd-stargz-snapshotter-dev"
_SOURCE = Path(__file__).with_name("stargz_snapshotter.go")
_BUILD_DEADLINE_S = 900.0
_CONVERT_DEADLINE_S = 900.0


class Stargz:
    """The snapshotter with an eStargz image."""

    def __init__(self, name: str, containerd_suite: str, *, is_optimized: bool) -> None:
        self.name = name
        how = "optimized for this workload" if is_optimized else "not optimized"
        self.description = f"an eStargz image, {how}: ctr-remote image rpull, then ctr run"
        self._suite = containerd_suite
        self._is_optimized = is_optimized

    def fetch(self, packages: Packages) -> None:
        packages.unpacked(self._suite, "containerd")
        packages.unpacked(_SUITE, "stargz-snapshotter")
        _snapshotter(packages)

    def prepare(self, site: Site) -> None:
        site.once(self._tag(site), lambda: self._convert(site))

    def _tag(self, site: Site) -> str:
        return f"estargz-{site.workload.name}" if self._is_optimized else "estargz"

    def _convert(self, site: Site) -> None:
        tag = self._tag(site)
        # Kept beside the image, since this takes minutes.
        kept = f"oci:{site.layout.with_name(f'{site.layout.name}-{tag}')}:{tag}"
        target = f"docker://{site.reference(tag)}"
        if not Path(kept.split(":")[1]).exists():
            with site.node("estargz") as node:
                start_containerd(site, node, self._suite)
                folder = programs(site, self._suite)
                push = f"{folder / 'ctr'} --namespace {NAMESPACE} image push --plain-http"
                command = shell(
                    pull(site, folder), self._conversion(site), f"{push} {site.reference(tag)}"
                )
                node.run(command, timeout_s=_CONVERT_DEADLINE_S)
            copy_image(target, kept)
        else:
            copy_image(kept, target)

    def _conversion(self, site: Site) -> str:
        names = f"{site.reference()} {site.reference(self._tag(site))}"
        if not self._is_optimized:
            return f"{_client(site)} image convert --estargz --oci {names}"
        start = json.dumps(list(site.workload.command)).replace("'", r"'\''")
        ends = f"--wait-on-line {site.workload.output} --period 120"
        return (
            f"{_client(site)} image optimize --oci --net-host {ends} --entrypoint '{start}' {names}"
        )

    def start(self, site: Site, node: Node) -> None:
        start_containerd(site, node, self._suite, {"stargz": _SOCKET})
        node.run(["mkdir", "-p", str(Path(_SOCKET).parent)], timeout_s=10)
        node.start(
            [str(_snapshotter(site.packages)), _SOCKET, str(node.folder / "stargz")],
            lambda: node.succeeds(["test", "-S", _SOCKET]),
        )

    def launch(self, site: Site, node: Node) -> list[str]:
        image = site.reference(self._tag(site))
        rpull = f"{_client(site)} image rpull --plain-http {image}"
        start = run(site, programs(site, self._suite), "--snapshotter=stargz", image=image)
        return shell(rpull, start)

    def settle(self, site: Site, node: Node) -> dict[str, float]:
        return {}


def _client(site: Site) -> str:
    folder = site.packages.unpacked(_SUITE, "stargz-snapshotter") / "usr/bin"
    return f"{folder / 'ctr-remote'} --namespace {NAMESPACE}"


def _snapshotter(packages: Packages) -> Path:
    """The program, built if need be. Raises: SkippedError."""
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
            raise SkippedError(f"the stargz snapshotter cannot be built: {done.stderr[-500:]}")
        partial.rename(program)
    return program
