"""An HTTP server of one file whose connections starve, break or hang, as a test chooses.

It records the requested ranges. To a registry's client it looks like a registry with one blob.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from bootseer.base.closing import Closing
from testbed.servers.registry import QuietHandler, serve

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True)
class AnswerFault:
    """Fault of one answer after `after_bytes` of its body."""

    after_bytes: int
    trickle_s: float = -1.0
    """Seconds between the pieces that follow; below 0, the connection is closed."""
    trickle_bytes: int = 1
    """Size of these pieces."""


Choose: TypeAlias = Callable[[int, int], AnswerFault | None]
"""`choose(number of the request, first requested byte)` returns the fault of the answer, if any."""


@dataclass
class StarvingServer(Closing):
    """Server of `data` under any path; a context manager."""

    data: bytes
    choose: Choose = lambda number, start: None
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """The [start, end) of each range request, in the order of arrival."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        server = self

        class Handler(QuietHandler):
            def _get(self) -> None:
                server._answer(self)

            do_GET = do_HEAD = _get  # noqa: N815

        self._server = serve(Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"
        self.url = f"http://{self.host}"

    def _answer(self, handler: QuietHandler) -> None:
        found = _RANGE.fullmatch(handler.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        end = min(int(found[2]) + 1 if found and found[2] else len(self.data), len(self.data))
        if start >= end:
            handler.reply(416, b"", **{"Content-Range": f"bytes */{len(self.data)}"})
            return
        handler.send_response(206 if found else 200)
        handler.send_header("Content-Length", str(end - start))
        handler.send_header("Accept-Ranges", "bytes")
        if found:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(self.data)}")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        with self._lock:
            fault = self.choose(len(self.ranges), start)
            self.ranges.append((start, end))
        until = end if fault is None else min(end, start + fault.after_bytes)
        at = start
        while at < until:
            at += self._send(handler, at, min(until, at + _PIECE_BYTES))
        if fault is None or until == end:
            return
        handler.close_connection = True
        # Real connections break some time after their last bytes, which the client has taken by
        # then.
        self._stopped.wait(0.0 if fault.trickle_s >= 0 else 0.5)
        while fault.trickle_s >= 0 and at < end and not self._stopped.wait(fault.trickle_s):
            at += self._send(handler, at, min(end, at + fault.trickle_bytes))

    def _send(self, handler: QuietHandler, start: int, end: int) -> int:
        handler.wfile.write(self.data[start:end])
        handler.wfile.flush()
        return end - start

    def close(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
