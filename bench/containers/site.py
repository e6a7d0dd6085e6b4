"""Site of the image cases: the image in a registry behind a limited loopback.

A `Peer` gets the site, and returns the commands of its start.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.containers.node import HOST, EmptyNode
from bench.model import Workspace
from bench.site import FarSide, far_side, listening
from testbed.images.torch_image import TAGS
from testbed.images.workloads import Workload
from testbed.needs import MissingError, require
from testbed.network import ShapedLoopback
from testbed.packages import Packages

# Fixed ports, since the network namespace has no other servers. The second one uses TLS, for
# clients that insist on it; nodes know it by name.
_PORT, _SECURE_PORT = 5000, 5001
_COMMAND_DEADLINE_S = 300.0
# Room for the image twice, as eStargz, and packed in the store.
_FAR_SIDE_BYTES = 3 * 2**30
_REGISTRY_CONFIG = """version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {folder}}}, delete: {{enabled: true}}}}
http: {{addr: 127.0.0.1:{port}{tls}}}
"""
_TLS = ", tls: {{certificate: {certificate}, key: {key}}}"


@dataclass(slots=True)
class PeersSite:
    """Folders, registry and store that the peers share."""

    directory: Path
    packages: Packages
    layout: Path
    far: FarSide
    workload: Workload
    rate_mbit: int
    missing: Mapping[str, str]
    """Reasons why a package of a peer cannot be fetched, by peer."""

    registry = f"127.0.0.1:{_PORT}"
    secure_registry = f"{HOST}:{_SECURE_PORT}"

    def reference(
        self, tag: str = TAGS[0], *, secure: bool = False, repository: str = "bench/torch"
    ) -> str:
        """Return the image's name in the registry."""
        return f"{self.secure_registry if secure else self.registry}/{repository}:{tag}"

    @property
    def certificate(self) -> Path:
        """Certificate that clients of the secure registry trust."""
        return self.directory / "registry.crt"

    @property
    def line(self) -> ShapedLoopback:
        """Loopback between the nodes and the registry and store."""
        return self.far.line

    @property
    def store_url(self) -> str:
        """URL of the store."""
        return self.far.store_url

    def once(self, name: str, prepare: Callable[[], None]) -> None:
        """Call `prepare` unless it was called under this name before."""
        self.far.once(name, prepare)

    def node(self, name: str) -> EmptyNode:
        """Return a new node, to be entered."""
        return EmptyNode(self.directory / f"node-{name}")


class Peer(Protocol):
    """Way of starting a container of an image in a registry."""

    name: str
    description: str

    def fetch(self, packages: Packages) -> None:
        """Fetch what comes from outside, which cannot be reached later. Raises: MissingError."""

    def prepare(self, site: PeersSite) -> None:
        """Make what all starts need, such as an index; not timed. Raises: MissingError,
        RuntimeError."""

    def start(self, site: PeersSite, node: EmptyNode) -> None:
        """Start the daemons that a node runs before the image is asked for."""

    def launch(self, site: PeersSite, node: EmptyNode) -> list[str]:
        """Return the timed command, which gets the image and runs the workload."""

    def settle(self, site: PeersSite, node: EmptyNode) -> dict[str, float]:
        """Wait for work behind the timed command; return further figures."""


@contextlib.contextmanager
def open_site(
    workspace: Workspace,
    layout: Path,
    workload: Workload,
    rate_mbit: int,
    peers: Sequence[Peer],
) -> Iterator[PeersSite]:
    """Yield a site with the images of `layout` and an empty store. Raises: MissingError."""
    require("root", programs=("openssl", "skopeo", "nsenter", "setpriv", "unshare", "runc"))
    # Everything from outside is fetched now, since the network namespace has no way out.
    packages = Packages(workspace.kept / "packages")
    missing = {}
    for peer in peers:
        try:
            peer.fetch(packages)
        except MissingError as reason:
            missing[peer.name] = str(reason)
    registry = packages.unpacked("bookworm", "docker-registry") / "usr/bin/docker-registry"
    with contextlib.ExitStack() as stack:
        far = stack.enter_context(far_side(workspace, _FAR_SIDE_BYTES))
        key = _make_certificate(workspace.directory / "registry.crt")
        tls = _TLS.format(certificate=workspace.directory / "registry.crt", key=key)
        for port, secrets in ((_PORT, ""), (_SECURE_PORT, tls)):
            config = workspace.directory / f"registry-{port}.yml"
            content = far.memory / "registry"
            config.write_text(_REGISTRY_CONFIG.format(folder=content, port=port, tls=secrets))
            serve, log = [str(registry), "serve", str(config)], config.with_suffix(".log")
            stack.enter_context(listening(serve, log, port, "the registry"))
        site = PeersSite(workspace.directory, packages, layout, far, workload, rate_mbit, missing)
        for tag in TAGS:
            copy_image(f"oci:{layout}:{tag}", f"docker://{site.reference(tag)}")
        yield site


def _make_certificate(certificate: Path) -> Path:
    """Write a self-signed certificate for the secure registry; return its key's path."""
    key = certificate.with_suffix(".key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", f"/CN={HOST}"]
    command += ["-addext", f"subjectAltName=DNS:{HOST}", "-keyout", str(key)]
    _run([*command, "-out", str(certificate)], "make a certificate")
    return key


def copy_image(source: str, target: str) -> None:
    """Copy an image between two places as skopeo names them, byte for byte.

    Raises: MissingError.
    """
    options = ["--quiet", "--src-tls-verify=false", "--dest-tls-verify=false"]
    _run(["skopeo", "copy", *options, source, target], "copy the image")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_COMMAND_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise MissingError(f"cannot {what}: {done.stderr.strip()[-500:]}")
