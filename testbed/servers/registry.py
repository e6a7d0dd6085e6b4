"""A real registry (Debian's docker-registry) on a free loopback port."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testbed.hdfs.cluster import unassigned_ports
from testbed.images.building import run_tool
from testbed.needs import MissingError
from testbed.waiting import is_listening, wait_started

PROGRAM = "docker-registry"


@dataclass(frozen=True)
class Registry:
    """A running registry; `host` is 127.0.0.1:PORT."""

    host: str
    root: Path

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def push_layout(self, layout: Path, tag: str, name: str, login: str = "") -> str:
        """Copy the image `tag` of an OCI layout, with all its platforms, to the registry.

        `name` is REPOSITORY:TAG. Return the image's reference, HOST/NAME.
        """
        where = f"{self.host}/{name}"
        credentials = ("--dest-creds", login) if login else ()
        run_tool(
            *("skopeo", "--insecure-policy", "copy", "--quiet", "--all", "--preserve-digests"),
            *("--dest-tls-verify=false", *credentials),
            *(f"oci:{layout}:{tag}", f"docker://{where}"),
        )
        return where


def free_port() -> int:
    """Return a port that no outgoing connection is given: it stays free until it is bound."""
    (port,) = unassigned_ports(1)
    return port


@contextlib.contextmanager
def running_registry(
    root: Path, auth: dict[str, Any] | None = None, tls: dict[str, Any] | None = None
) -> Iterator[Registry]:
    """Yield a registry that keeps its files under `root`.

    `auth` and `tls` are these parts of its configuration.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise MissingError(f"{PROGRAM} is not installed")
    root.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    config = {
        "version": "0.1",
        "log": {"level": "warn"},
        "storage": {
            "filesystem": {"rootdirectory": str(root / "data")},
            "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": host, "relativeurls": True, **({"tls": tls} if tls else {})},
    }
    if auth:
        config["auth"] = auth
    # YAML reads JSON.
    (root / "config.yml").write_text(json.dumps(config))
    with (root / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "serve", str(root / "config.yml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        wait_started(
            process, lambda: is_listening(int(host.rpartition(":")[2])), (root / "log").read_text
        )
        yield Registry(host, root)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def htpasswd_auth(root: Path, user: str, password: str) -> dict[str, Any]:
    """Return the registry's configuration for Basic authentication by this user and password."""
    if shutil.which("htpasswd") is None:
        raise MissingError("htpasswd (apache2-utils) is not installed")
    root.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["htpasswd", "-Bbni", user], input=password, capture_output=True, text=True, check=False
    )
    if done.returncode:  # older versions want the password on the command line
        done = subprocess.run(
            ["htpasswd", "-Bbn", user, password], capture_output=True, text=True, check=True
        )
    (root / "htpasswd").write_text(done.stdout)
    return {"htpasswd": {"realm": "tests", "path": str(root / "htpasswd")}}


class TokenServer:
    """Server of tokens that the registry accepts.

    It gives a token for `user` and `password` (GET), or for `refresh_token` (POST). `requests`
    holds the parameters of requests, without secrets.
    """

    def __init__(self, root: Path, user: str, password: str, refresh_token: str = "") -> None:
        if shutil.which("openssl") is None:
            raise MissingError("openssl is not installed")
        self._root = root
        root.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
                *("-subj", "/CN=tests", "-keyout", str(root / "key.pem")),
                *("-out", str(root / "cert.pem")),
            ],
            check=True,
            capture_output=True,
        )
        self.user, self.password, self.refresh_token = user, password, refresh_token
        self.expires_in = 300
        self.requests: list[tuple[str, dict[str, list[str]]]] = []
        self._server = serve(self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/token"

    @property
    def auth(self) -> dict[str, Any]:
        """Registry's configuration for tokens of this server."""
        return {
            "token": {
                "realm": self.url,
                "service": "tests",
                "issuer": "tests",
                "rootcertbundle": str(self._root / "cert.pem"),
            }
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                said = f"Basic {_base64(f'{server.user}:{server.password}'.encode())}"
                self._answer("GET", query, self.headers.get("Authorization") == said)

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                said = form.pop("refresh_token", [""])[0]
                self._answer("POST", form, bool(said) and said == server.refresh_token)

            def _answer(self, method: str, query: dict[str, list[str]], known: bool) -> None:
                server.requests.append((method, query))
                if not known:
                    self.reply(401, b"{}")
                    return
                key = "token" if method == "GET" else "access_token"
                document = {key: server._token(query), "expires_in": server.expires_in}
                self.reply(200, json.dumps(document).encode())

        return Handler

    def _token(self, query: dict[str, list[str]]) -> str:
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.split(":", 2)
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        pem = (self._root / "cert.pem").read_text()
        certificate = "".join(pem.split("-----")[2].split())
        now = int(time.time())
        head = {"typ": "JWT", "alg": "RS256", "x5c": [certificate]}
        claims: dict[str, Any] = {
            "iss": "tests",
            "sub": self.user,
            "aud": "tests",
            "access": access,
        }
        claims |= {"exp": now + 300, "nbf": now - 10, "iat": now, "jti": os.urandom(8).hex()}
        parts = [_base64url(json.dumps(part).encode()) for part in (head, claims)]
        signed = ".".join(parts)
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self._root / "key.pem")],
            input=signed.encode(),
            capture_output=True,
            check=True,
        ).stdout
        return f"{signed}.{_base64url(signature)}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class QuietHandler(BaseHTTPRequestHandler):
    """Handler of HTTP/1.1 that logs nothing."""

    protocol_version = "HTTP/1.1"
    timeout = 60
    # Without this, a body waits up to 40 ms for the client to acknowledge the header.
    disable_nagle_algorithm = True

    def log_message(self, *arguments: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of clients that have closed their connection."""


def serve(handler: type[BaseHTTPRequestHandler], address: str = "127.0.0.1") -> ThreadingHTTPServer:
    """Start a server on a free port of loopback; end it by shutdown() and server_close()."""
    server = _Server((address, 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server
