"""A real HDFS whose DataNodes are all capped, and what is done to its files beside a measurement.

Owns the JVM, the relays before the DataNodes and their rates. An HDFS without a limit has no relays
either, which cost CPU. One thread at a time.
"""

import contextlib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.checkpoint.placement import Moved
from bench.model import SkippedError
from tests.hdfs.classpath import CannotAssembleError
from tests.hdfs.cluster import MiniHdfs
from tests.hdfs.relay import Relays

_REQUEST_DEADLINE_S = 30
_CONF = {
    # HDFS's own default.
    "dfs.blocksize": "134217728",
    "dfs.datanode.max.transfer.threads": "512",
    # Deleted blocks are gone before the next run writes as many again.
    "dfs.namenode.startup.delay.block.deletion.sec": "0",
    "dfs.block.invalidate.limit": "10000",
    "dfs.permissions.enabled": "false",
}


class CappedHdfs:
    """One NameNode and `count` DataNodes of `bytes_per_s` each way.

    None: no limit for ever; nothing can be slowed down or counted then.
    """

    def __init__(self, home: Path, count: int, bytes_per_s: float | None) -> None:
        self.count = count
        self.bytes_per_s = bytes_per_s
        self.rates: list[float | None] = [bytes_per_s] * count
        apart = bytes_per_s is not None
        self._hdfs = MiniHdfs(home, datanode_count=count, conf=_CONF, apart=apart, heap="768m")
        self._relays: Relays | None = None
        self._client: Any = None
        self.written: dict[str, int] = {}
        """Sizes of the files that were written, by path."""

    @property
    def url(self) -> str:
        """hdfs://HOST:PORT."""
        return self._hdfs.url

    @property
    def address(self) -> str:
        """HOST:PORT of the NameNode."""
        return self._hdfs.url.removeprefix("hdfs://")

    @property
    def client(self) -> Any:
        """An hdfs-native client of this process."""
        if self._client is None:
            import hdfs_native

            self._client = hdfs_native.Client(self.url)
        return self._client

    def moved(self) -> Moved:
        """Bytes over each DataNode's link so far."""
        if self._relays is None:
            return Moved((0,) * self.count, (0,) * self.count)
        relays, each = self._relays, range(self.count)
        return Moved(tuple(map(relays.read_bytes, each)), tuple(map(relays.written_bytes, each)))

    def set_rates(self, rates: Sequence[float | None]) -> None:
        """In bytes/s, from now on."""
        if self._relays is None:
            return
        self.rates = list(rates)
        for index, rate in enumerate(rates):
            self._relays.set_rate(index, rate)

    @contextlib.contextmanager
    def at_rates(self, rates: Sequence[float | None]) -> Iterator[None]:
        """Other rates while the block lasts."""
        before = list(self.rates)
        self.set_rates(rates)
        try:
            yield
        finally:
            self.set_rates(before)

    def uncapped(self) -> contextlib.AbstractContextManager[None]:
        """No limits while the block lasts."""
        return self.at_rates([None] * self.count)

    def empty_folder(self, folder: str) -> None:
        """`folder` (absolute) exists and is empty."""
        self.client.delete(folder, True)
        self.client.mkdirs(folder, 0o755, True)
        for path in [path for path in self.written if path.startswith(folder + "/")]:
            del self.written[path]

    def files(self, folder: str) -> list[str]:
        """All files beneath `folder` (absolute), also hidden ones."""
        found: list[str] = []
        for status in self.client.list_status(folder):
            found += self.files(status.path) if status.isdir else [status.path]
        return found

    def set_erasure_coding(self, folder: str, policy: str) -> None:
        """Files written to `folder` from now on are coded. Raises: OSError."""
        self.client.mkdirs(folder, 0o755, True)
        for path, query in (
            ("/", f"op=ENABLEECPOLICY&ecpolicy={policy}"),
            (folder, f"op=SETECPOLICY&ecpolicy={policy}"),
        ):
            url = f"http://{self._hdfs.http_address}/webhdfs/v1{path}?user.name=hdfs&{query}"
            # No proxy is asked for an address of this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            request = urllib.request.Request(url, method="PUT")
            opener.open(request, timeout=_REQUEST_DEADLINE_S).close()

    def __enter__(self) -> Self:
        """Raises: SkippedError when there is no HDFS on this machine."""
        try:
            self._hdfs.start()
        except CannotAssembleError as error:
            raise SkippedError(f"no HDFS: {error}") from error
        except RuntimeError as error:
            raise SkippedError(f"HDFS did not start: {str(error)[:300]}") from error
        try:
            if self.bytes_per_s is not None:
                self._relays = Relays(self._hdfs.datanode_ports, self.bytes_per_s)
        except BaseException:
            self._hdfs.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._relays is not None:
            self._relays.close()
        self._hdfs.stop()
