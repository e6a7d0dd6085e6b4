"""SOCI's snapshotter in containerd: `soci image rpull`, then `ctr run`, lazily from seek points.

Its index is made and pushed before, with the defaults of `soci create`. Release 0.4.1 asks for the
index by TLS only, so the image has the registry's secure address as its name. The layers come from
the plain address, which is configured as its mirror, as for the other peers.
"""

from pathlib import Path

from bench.containers.node import EmptyNode
from bench.containers.site import PeersSite, copy_image
from bench.peers.containerd import (
    NAMESPACE,
    PULL_DEADLINE_S,
    path,
    programs,
    pull,
    run,
    shell,
    start_containerd,
)
from testbed.packages import Packages

_SOCKET = "/run/soci/soci.sock"
_SUITE = "trixie"
_CONFIG = """[resolver.host."{secure_registry}"]
  [[resolver.host."{secure_registry}".mirrors]]
    host = "{registry}"
    insecure = true
"""


class Soci:
    """SOCI's snapshotter with a containerd of another suite."""

    def __init__(self, containerd_suite: str, *, is_indexed: bool = True) -> None:
        self.name = "soci" if is_indexed else "soci unindexed"
        state = "its index pushed beforehand" if is_indexed else "nobody has made its index"
        self.description = f"soci image rpull, then ctr run; {state}"
        self._suite = containerd_suite
        self._is_indexed = is_indexed
        # A repository of its own, since an index belongs to a repository.
        self._repository = "bench/torch" if is_indexed else "bench/torch-unindexed"

    def fetch(self, packages: Packages) -> None:
        packages.unpacked(self._suite, "containerd")
        packages.unpacked(_SUITE, "soci-snapshotter")

    def prepare(self, site: PeersSite) -> None:
        if self._is_indexed:
            site.once("soci index", lambda: self._push_index(site))
        else:
            target = f"docker://{site.reference(repository=self._repository)}"
            site.once("no index", lambda: copy_image(f"docker://{site.reference()}", target))

    def _push_index(self, site: PeersSite) -> None:
        containerd = programs(site, self._suite)
        client = _client(site)
        with site.node("soci-index") as node:
            start_containerd(site, node, self._suite)
            command = shell(
                pull(site, containerd),
                f"{client} create {site.reference()}",
                f"{client} push --plain-http {site.reference()}",
                "true",
            )
            node.run(command, timeout_s=PULL_DEADLINE_S)

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        start_containerd(site, node, self._suite, {"soci": _SOCKET})
        config = node.folder / "soci.toml"
        config.write_text(
            _CONFIG.format(secure_registry=site.secure_registry, registry=site.registry)
        )
        command = [str(_programs(site) / "soci-snapshotter-grpc"), "--address", _SOCKET]
        command += ["--root", str(node.folder / "soci"), "--config", str(config)]
        node.start(
            [*command, "--log-level", "error"],
            lambda: node.succeeds(["test", "-S", _SOCKET]),
            {**path(programs(site, self._suite)), "SSL_CERT_FILE": str(site.certificate)},
        )

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        trust = f"export SSL_CERT_FILE={site.certificate}"
        image = site.reference(secure=True, repository=self._repository)
        rpull = f"{_client(site)} image rpull {image}"
        start = run(site, programs(site, self._suite), "--snapshotter=soci", image=image)
        return shell(trust, rpull, start)

    def settle(self, site: PeersSite, node: EmptyNode) -> dict[str, float]:
        return {}


def _programs(site: PeersSite) -> Path:
    return site.packages.unpacked(_SUITE, "soci-snapshotter") / "usr/bin"


def _client(site: PeersSite) -> str:
    return f"{_programs(site) / 'soci'} --namespace {NAMESPACE}"
