"""Starts of one peer on nodes that have never used the image."""

import contextlib
import time
from collections.abc import Iterator

from bench.containers.site import Peer, PeersSite
from bench.machine.page_cache import evict_everything
from bench.model import Sample, TakeSample
from testbed.needs import MissingError

START_DEADLINE_S = 300.0


@contextlib.contextmanager
def session(site: PeersSite, peer: Peer) -> Iterator[TakeSample]:
    """Prepare the peer once, and yield a function that starts it on a new node.

    Raises: MissingError.
    """
    if peer.name in site.missing:
        raise MissingError(f"not available: {site.missing[peer.name]}")
    site.line.set_rate(None)
    try:
        peer.prepare(site)
    except RuntimeError as error:
        raise MissingError(str(error)) from error
    yield lambda: take(site, peer)


def take(site: PeersSite, peer: Peer) -> Sample:
    """Measure one start from the command to its end.

    Bytes are all that crossed the loopback meanwhile; CPU is the node's: of client, daemons and
    container. Raises: RuntimeError if anything fails or the output is not the expected one.
    """
    site.line.set_rate(None)
    with site.node(peer.name.replace(" ", "-")) as node:
        peer.start(site, node)
        command = peer.launch(site, node)
        how = evict_everything([])
        if how != "drop_caches":
            raise RuntimeError("the page cache cannot be dropped, so no node is cold")
        site.line.set_rate(site.rate_mbit)
        before_bytes, before_cpu_s = site.line.received_bytes(), node.cpu_s()
        started_s = time.monotonic()
        output = node.run(command, timeout_s=START_DEADLINE_S)
        wall_s = time.monotonic() - started_s
        cpu_s = node.cpu_s() - before_cpu_s
        moved_bytes = site.line.received_bytes() - before_bytes
        words = output.split()
        if not words or set(words) != {site.workload.output}:
            raise RuntimeError(
                f"{peer.name} printed {output[-200:]!r} instead of {site.workload.output!r}"
            )
        site.line.set_rate(None)
        figures = peer.settle(site, node)
    return Sample(wall_s, {"node": cpu_s}, moved_bytes, figures)
