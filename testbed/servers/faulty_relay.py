"""An HTTP relay before a registry that fails as broken networks and servers do."""

import http.client
import json
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from bootseer.base.closing import Closing
from bootseer.registry.documents import digest_of
from testbed.servers.registry import QuietHandler, serve

_PIECE_BYTES = 64 * 1024


@dataclass
class Fault:
    """Fault of the first `times` requests whose "METHOD PATH" matches `when`."""

    when: str
    times: int = 1
    status: int = 0
    """Status to answer with instead of asking the registry."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of the answer with `status`."""
    body: bytes = b"{}"
    """Body of the answer with `status`."""
    cut_after_bytes: int = -1
    """Number of body bytes after which the connection is closed."""
    truncate_bytes: int = -1
    """Length that is announced and sent instead of the body's."""
    flip_at: int = -1
    """Position of a byte of the body in which one bit is changed."""
    trickle_s: float = 0.0
    """Seconds between single bytes of the body."""
    trickle_head: bool = False
    """Send the head byte by byte, too."""
    ignore_range: bool = False
    """Send the whole body in spite of a range, as servers without ranges do."""
    lose: bool = False
    """Pass the request on, and close the connection instead of an answer."""
    hang_s: float = 0.0
    """Seconds before the answer."""


@dataclass(frozen=True)
class Seen:
    """Request that arrived."""

    method: str
    path: str
    headers: dict[str, str]


class FaultyRelay(Closing):
    """Relay to `upstream` (host:port), as a context manager; append to `faults` while it runs."""

    def __init__(self, upstream: str, faults: list[Fault] | None = None) -> None:
        self.upstream = upstream
        self.faults = faults or []
        self.seen: list[Seen] = []
        self.refused_tokens: set[str] = set()
        """Authorization values that are answered 401 although the registry accepts them."""
        self.challenge = ""
        """WWW-Authenticate of these answers."""
        self.ignores_conditions = False
        """Whether requests lose their `If-None-Match` and `If-Match`."""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        relay = self

        class Handler(QuietHandler):
            def _relay(self) -> None:
                relay._handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = _relay  # noqa: N815

        self._server = serve(Handler)
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    def count(self, pattern: str) -> int:
        """Return the number of requests so far that match."""
        with self._lock:
            return sum(bool(re.search(pattern, f"{s.method} {s.path}")) for s in self.seen)

    def revoke(self) -> None:
        """Refuse every token seen so far, as if it had expired."""
        with self._lock:
            self.refused_tokens |= {s.headers.get("authorization", "") for s in self.seen} - {""}

    def _fault(self, line: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.when, line):
                    fault.times -= 1
                    return fault
        return None

    def _more_headers(self, handler: QuietHandler, body: bytes) -> dict[str, str]:
        """Return headers to add to the registry's answer."""
        return {}

    def _handle(self, handler: QuietHandler) -> None:
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", "0")))
        with self._lock:
            self.seen.append(Seen(handler.command, handler.path, headers))
            refused = headers.get("authorization") in self.refused_tokens
        if refused:
            handler.reply(401, b"{}", WWW_Authenticate=self.challenge)
            return
        self._respond(handler, headers, body)

    def _respond(self, handler: QuietHandler, headers: dict[str, str], body: bytes) -> None:
        fault = self._fault(f"{handler.command} {handler.path}") or Fault("")
        self._stopped.wait(fault.hang_s)
        if fault.status:
            handler.reply(fault.status, fault.body, **fault.headers)
            return
        if self.ignores_conditions:
            headers.pop("if-none-match", None)
            headers.pop("if-match", None)
        if fault.ignore_range:
            headers.pop("range", None)
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        try:
            connection.request(handler.command, handler.path, body or None, headers)
            answer = connection.getresponse()
            for name, value in self._more_headers(handler, body).items():
                answer.headers[name] = value
            self._answer(handler, answer, fault)
        except (OSError, http.client.HTTPException):
            handler.close_connection = True
        finally:
            connection.close()

    def _answer(
        self, handler: QuietHandler, answer: http.client.HTTPResponse, fault: Fault
    ) -> None:
        if fault.lose:
            handler.close_connection = True
            return
        length = int(answer.headers.get("Content-Length") or 0)
        if fault.truncate_bytes >= 0:
            length = min(length, fault.truncate_bytes)
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                lines.append(f"{name}: {value}")
        lines.append(f"Content-Length: {length}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._send(handler, head, fault.trickle_s if fault.trickle_head else 0.0)
        if handler.command == "HEAD":
            return
        sent = 0
        while sent < length:
            piece = answer.read(min(_PIECE_BYTES, length - sent))
            if not piece:
                break
            if sent <= fault.flip_at < sent + len(piece):
                changed = bytearray(piece)
                changed[fault.flip_at - sent] ^= 1
                piece = bytes(changed)
            if 0 <= fault.cut_after_bytes < sent + len(piece):
                handler.wfile.write(piece[: fault.cut_after_bytes - sent])
                handler.close_connection = True
                return
            self._send(handler, piece, fault.trickle_s)
            sent += len(piece)
        handler.close_connection = handler.close_connection or sent < length

    def _send(self, handler: QuietHandler, data: bytes, trickle_s: float) -> None:
        if not trickle_s:
            handler.wfile.write(data)
            return
        handler.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = time.monotonic() + 60
        for number in range(len(data)):
            if self._stopped.wait(trickle_s) or time.monotonic() > ends:
                raise OSError("stopped")
            handler.wfile.write(data[number : number + 1])

    def close(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()


class ReferrersRelay(FaultyRelay):
    """Relay that adds the referrers API (distribution specification 1.1) to a registry without it.

    The lists hold the manifests pushed through the relay, in pages of two.
    """

    _PAGE_COUNT = 2

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._referrers: dict[str, dict[str, dict[str, Any]]] = {}
        """Descriptors by digest, by subject."""

    def _respond(self, handler: QuietHandler, headers: dict[str, str], body: bytes) -> None:
        path, _, query = handler.path.partition("?")
        if "/referrers/" in path and handler.command == "GET":
            start = int(parse_qs(query).get("from", ["0"])[0])
            found = list(self._referrers.get(path.rpartition("/")[2], {}).values())
            document = {"schemaVersion": 2, "manifests": found[start : start + self._PAGE_COUNT]}
            link = {}
            if start + self._PAGE_COUNT < len(found):
                link = {"Link": f'<{path}?from={start + self._PAGE_COUNT}>; rel="next"'}
            handler.reply(200, json.dumps(document).encode(), **link)
            return
        if handler.command == "DELETE":
            # Before the answer, since the client may ask for the list right after it.
            for descriptors in self._referrers.values():
                descriptors.pop(path.rpartition("/")[2], None)
        super()._respond(handler, headers, body)

    def _more_headers(self, handler: QuietHandler, body: bytes) -> dict[str, str]:
        if handler.command != "PUT" or "/manifests/" not in handler.path:
            return {}
        manifest = json.loads(body)
        if "subject" not in manifest:
            return {}
        subject = manifest["subject"]["digest"]
        digest = digest_of(body)
        self._referrers.setdefault(subject, {})[digest] = {
            "mediaType": manifest["mediaType"],
            "digest": digest,
            "size": len(body),
            "artifactType": manifest["artifactType"],
            "annotations": manifest["annotations"],
        }
        return {"OCI-Subject": subject}
