"""A real HDFS whose DataNodes have limited rates, and operations on its files between measurements.

Owns the JVM and the rates of the DataNodes. One thread at a time.
"""

import contextlib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.checkpoint.limits import DataNodeLinks, Limiter
from bench.checkpoint.placement import Moved
from bench.machine.tmpfs import tmpfs
from bench.model import Workspace
from testbed.hdfs.cluster import MiniHdfs
from testbed.needs import MissingError

_REQUEST_DEADLINE_S = 30
# Memory of two JVMs, a mount and a client, with their caches.
_BESIDE_BYTES = 4 * 2**30
_CONF = {
    # The default of HDFS.
    "dfs.blocksize": "134217728",
    "dfs.datanode.max.transfer.threads": "512",
    # Deleted blocks must be gone before the next run writes as many again.
    "dfs.namenode.startup.delay.block.deletion.sec": "0",
    "dfs.block.invalidate.limit": "10000",
    "dfs.permissions.enabled": "false",
}


@contextlib.contextmanager
def data_folder(workspace: Workspace, size_bytes: int) -> Iterator[tuple[Path, str]]:
    """Yield a folder in which DataNodes keep up to `size_bytes`, and a note on it for the result.

    The folder is in memory if there is enough: DataNodes sync each block at its end, and on a disk
    that all of them share, writes would wait for the disk and not for the links.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tmpfs(workspace.directory, size_bytes, _BESIDE_BYTES))
            note = "DataNodes keep blocks in memory (tmpfs)"
        except MissingError as reason:
            folder = workspace.directory
            note = f"DataNodes sync blocks to one disk, which writes wait for ({reason})"
        yield folder, note


class CappedHdfs:
    """A NameNode and `count` DataNodes, limited to `bytes_per_s` in each direction by `limiter`.

    Without rate and limiter there are no limits and no counts.
    """

    def __init__(
        self,
        home: Path,
        count: int,
        bytes_per_s: float | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        assert (bytes_per_s is None) == (limiter is None), "a rate needs a limiter"
        self.count = count
        self.bytes_per_s = bytes_per_s
        self.rates: list[float | None] = [bytes_per_s] * count
        separate_addresses = limiter is not None and limiter.separate_addresses
        self._hdfs = MiniHdfs(
            home,
            datanode_count=count,
            conf=_CONF,
            separate_addresses=separate_addresses,
            heap="768m",
            is_measured=True,
        )
        self._limiter = limiter
        self._links: DataNodeLinks | None = None
        self._stack = contextlib.ExitStack()
        self._client: Any = None
        self.written: dict[str, int] = {}
        """Sizes of the written files by path."""

    @property
    def url(self) -> str:
        """URL hdfs://HOST:PORT."""
        return self._hdfs.url

    @property
    def address(self) -> str:
        """HOST:PORT of the NameNode."""
        return self._hdfs.url.removeprefix("hdfs://")

    @property
    def client(self) -> Any:
        """hdfs-native client of this process."""
        if self._client is None:
            import hdfs_native

            self._client = hdfs_native.Client(self.url)
        return self._client

    def moved(self) -> Moved:
        """Return the bytes over each DataNode's link so far."""
        if self._links is None:
            return Moved((0,) * self.count, (0,) * self.count)
        return self._links.moved()

    def set_rates(self, rates: Sequence[float | None]) -> None:
        """Set the DataNodes' rates from now on, in bytes/s; None removes a limit."""
        if self._links is not None:
            self._links.set_rates(rates)
            self.rates = list(rates)

    @contextlib.contextmanager
    def at_rates(self, rates: Sequence[float | None]) -> Iterator[None]:
        """Set other rates for the length of the block."""
        before = list(self.rates)
        self.set_rates(rates)
        try:
            yield
        finally:
            self.set_rates(before)

    def uncapped(self) -> contextlib.AbstractContextManager[None]:
        """Remove all limits for the length of the block."""
        return self.at_rates([None] * self.count)

    def empty_folder(self, folder: str) -> None:
        """Make `folder` (absolute) exist and be empty."""
        self.client.delete(folder, True)
        self.client.mkdirs(folder, 0o755, True)
        for path in [path for path in self.written if path.startswith(folder + "/")]:
            del self.written[path]

    def files(self, folder: str) -> list[str]:
        """Return all files below `folder` (absolute), hidden ones included."""
        found: list[str] = []
        for status in self.client.list_status(folder):
            found += self.files(status.path) if status.isdir else [status.path]
        return found

    def set_erasure_coding(self, folder: str, policy: str) -> None:
        """Code files that are written to `folder` from now on. Raises: OSError."""
        self.client.mkdirs(folder, 0o755, True)
        for path, query in (
            ("/", f"op=ENABLEECPOLICY&ecpolicy={policy}"),
            (folder, f"op=SETECPOLICY&ecpolicy={policy}"),
        ):
            url = f"http://{self._hdfs.http_address}/webhdfs/v1{path}?user.name=hdfs&{query}"
            # Without a proxy, for an address of this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            request = urllib.request.Request(url, method="PUT")
            opener.open(request, timeout=_REQUEST_DEADLINE_S).close()

    def __enter__(self) -> Self:
        """Start the servers. Raises: MissingError."""
        try:
            self._hdfs.start()
        except MissingError as error:
            raise MissingError(f"no HDFS: {error}") from error
        except RuntimeError as error:
            raise MissingError(f"HDFS did not start: {str(error)[:300]}") from error
        with contextlib.ExitStack() as stack:
            stack.callback(self._hdfs.stop)
            if self._limiter is not None and self.bytes_per_s is not None:
                links = self._limiter.links(self._hdfs.datanode_ports, self.bytes_per_s)
                self._links = stack.enter_context(links)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
