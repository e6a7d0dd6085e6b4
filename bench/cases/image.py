"""Starting a program on a node that has never used its image.

The four cases differ in the program and in the rate of the loopback.
"""

import contextlib
from collections.abc import Callable, Iterator

from bench.containers.measure import session
from bench.containers.site import Peer, PeersSite, open_site
from bench.model import (
    Case,
    Column,
    Ratio,
    Session,
    TakeSample,
    Target,
    Variant,
    Workspace,
    at_most,
    ratio,
)
from bench.peers.bootseer_containerd import BootseerSnapshotter
from bench.peers.bootseer_image import Bootseer, ImageMode
from bench.peers.containerd import ContainerdPeer, LocalContainerd
from bench.peers.soci import Soci
from bench.peers.stargz import Stargz
from testbed.images.layout import OciLayout
from testbed.images.torch_image import TAGS, torch_image
from testbed.images.workloads import PANDAS, SHELL, TORCH, Workload

_OURS: tuple[Peer, ...] = (
    Bootseer("unindexed", ImageMode.UNINDEXED),
    Bootseer("seek points", ImageMode.SEEK_POINTS),
    Bootseer("lazy", ImageMode.LAZY),
    Bootseer("record", ImageMode.RECORD),
    Bootseer("replay", ImageMode.REPLAY),
    BootseerSnapshotter("replay containerd", "bookworm"),
    Bootseer("replay rebuilt", ImageMode.REBUILT),
    Bootseer("replay x8", ImageMode.REPLAY, count=8),
    Bootseer("all local", ImageMode.LOCAL),
)
_PEERS: tuple[Peer, ...] = (
    ContainerdPeer("containerd 1.6", "bookworm"),
    ContainerdPeer("containerd 2.1", "forky"),
    Soci("bookworm"),
    Soci("bookworm", is_indexed=False),
    Stargz("bookworm"),
    LocalContainerd("containerd local", "bookworm"),
)


def _case(name: str, workload: Workload, rate_mbit: int, targets: tuple[Ratio, ...]) -> Case:
    """Return a case with every way of starting `workload` behind a line of `rate_mbit`."""
    return Case(
        name=name,
        description=(
            f"A new node starts `{workload.shell_words}` in a container of an image of 1.2 GB "
            f"that lies in a registry behind {rate_mbit} Mbit/s."
        ),
        prepare=_prepare(workload, rate_mbit),
        variants=tuple(
            Variant(peer.name, peer.description, _session(peer)) for peer in (*_PEERS, *_OURS)
        ),
        ratios=targets,
        columns=(
            Column("start s", "wall_s"),
            Column("MB over the line", "moved_bytes", scale=1e-6, digits=1),
            Column("CPU s", "node_cpu_s"),
        ),
        runs=3,
        quick_runs=1,
        warmups=0,
        audience="reader" if workload == TORCH else "us",
    )


def _prepare(
    workload: Workload, rate_mbit: int
) -> Callable[[Workspace], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def prepare(workspace: Workspace) -> Iterator[None]:
        layout = torch_image(workspace.kept, workspace.say)
        with open_site(workspace, layout, workload, rate_mbit, (*_PEERS, *_OURS)) as site:
            layers = OciLayout(layout).layers(TAGS[0])
            stored, plain = (
                " + ".join(f"{size / 1e6:.0f}" for size in sizes)
                for sizes in (
                    [layer.stored_bytes for layer in layers],
                    [layer.tar_bytes for layer in layers],
                )
            )
            workspace.shared["site"] = site
            workspace.shared["notes"] = [
                f"The image's layers are {plain} MB, as gzip {stored} MB; docker-registry 2.8.2 "
                "and the store, an HDFS of one DataNode, keep their content in memory behind a "
                f"loopback shaped to {rate_mbit} Mbit/s by a token bucket",
                "Each start is on a new node: namespaces and a folder of its own, daemons started "
                "but never used, content stores and caches empty, page cache dropped",
                "Bytes are all that crossed the line in both ways until the command had ended; "
                "CPU is that of client, daemons and container; registry and store are not in it, "
                "but share the machine's cores",
            ]
            yield

    return prepare


def _session(peer: Peer) -> Session:
    @contextlib.contextmanager
    def variant(workspace: Workspace) -> Iterator[TakeSample]:
        site: PeersSite = workspace.shared["site"]
        with session(site, peer) as take:
            yield take

    return variant


def _time(top: str, bottom: str, target: Target | None = None) -> Ratio:
    return ratio(top, bottom, "wall_s", "time", target)


def _bytes(top: str, bottom: str, target: Target | None = None) -> Ratio:
    return ratio(top, bottom, "moved_bytes", "bytes", target)


_UNRECORDED = (
    _time("seek points", "soci", at_most(1)),
    _bytes("seek points", "soci", at_most(1)),
    _time("lazy", "soci", at_most(1)),
    _time("record", "lazy", at_most(1.1)),
)
_OTHERWISE = (
    _time("unindexed", "containerd 1.6", at_most(1.05)),
    _time("unindexed", "soci", at_most(1)),
    _time("unindexed", "soci unindexed", at_most(0.6)),
    _time("replay rebuilt", "replay"),
)
_UNLIMITED = (
    _time("replay", "soci"),
    _time("replay", "containerd 1.6"),
    _time("replay", "containerd 2.1"),
    _time("replay", "containerd local"),
    _bytes("replay", "soci"),
)


def _limited(local: Target | None) -> tuple[Ratio, ...]:
    return (
        _time("replay", "soci", at_most(0.5)),
        _time("replay", "containerd 1.6", at_most(0.125)),
        _time("replay", "containerd 2.1", at_most(0.125)),
        _time("replay", "containerd local", local),
        _bytes("replay", "soci", at_most(1 / 3)),
    )


CASES = (
    _case("image", TORCH, 1000, (*_limited(at_most(1.4)), *_UNRECORDED, *_OTHERWISE)),
    # On a slow line, moving less bytes counts more.
    _case("image-slow-line", TORCH, 200, (*_limited(None), *_UNRECORDED, *_OTHERWISE)),
    _case("image-pandas", PANDAS, 1000, (*_UNLIMITED, *_UNRECORDED)),
    # The program needs a very small part of the image.
    _case(
        "image-shell",
        SHELL,
        1000,
        (_time("replay", "estargz"), *_UNLIMITED, *_UNRECORDED),
    ),
)
