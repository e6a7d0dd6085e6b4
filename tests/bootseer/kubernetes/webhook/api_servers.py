"""API servers for the webhook: a real one, if its binaries are here, and a stand-in.

The stand-in has resourceVersion, JSON patches and rights.
"""

import contextlib
import http.server
import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import urllib3

from bootseer.kubernetes.webhook.certificate import make_pair
from testbed.containers.chart import objects, render
from testbed.kubernetes.programs import KEPT, cache_folder
from testbed.needs import MissingError
from testbed.servers.registry import free_port
from testbed.waiting import wait_for
from tests.bootseer.kubernetes.webhook.json_patch import PatchError, applied

NAMESPACE, NAME = "bootseer-system", "bootseer-webhook"
SECRET = f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}"
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
CONFIGURATION = f"{CONFIGURATIONS}/{NAME}"
_ADMIN, _WEBHOOK = "admin-token", "webhook-token"
_RULES = [
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", NAME, ["get", "patch"]),
    ("storage.k8s.io", "csidrivers", "csi.bootseer.io", ["get"]),
    ("node.k8s.io", "runtimeclasses", "bootseer", ["get"]),
]


def configuration() -> dict[str, Any]:
    """Return the webhook's configuration as in the chart."""
    kind = "MutatingWebhookConfiguration"
    return next(one for one in objects(render()) if one["kind"] == kind)


class ApiServer:
    """Address of an API server, and the files of a service account for it."""

    def __init__(self, port: int, authority: Path, folder: Path) -> None:
        self.port = port
        self.account = folder / "account"
        self.account.mkdir()
        shutil.copy(authority, self.account / "ca.crt")
        (self.account / "namespace").write_text(NAMESPACE)
        (self.account / "token").write_text(_WEBHOOK + "\n")
        self.environ = {
            "KUBERNETES_SERVICE_HOST": "localhost",
            "KUBERNETES_SERVICE_PORT": str(port),
        }
        self.flags = (
            f"--kube-apiserver=https://localhost:{port}",
            f"--kube-token={_ADMIN}",
            f"--kube-ca-file={authority}",
        )
        """Helm's flags for an administrator."""
        self._http = urllib3.PoolManager(ca_certs=str(authority), retries=False)

    def ask(self, method: str, path: str, document: Any = None) -> Any:
        """Make a request as an administrator."""
        response = self._http.request(
            method,
            f"https://localhost:{self.port}{path}",
            json=document,
            headers={"Authorization": f"Bearer {_ADMIN}", "Content-Type": "application/json"},
        )
        assert response.status < 300, (response.status, response.data)
        return json.loads(response.data)

    def install(self) -> None:
        """Create the chart's objects for the webhook."""
        self.ask("POST", "/api/v1/namespaces", _named("v1", "Namespace", NAMESPACE))
        _grant(self)
        secret = _named("v1", "Secret", NAME)
        self.ask("POST", SECRET.rpartition("/")[0], secret)
        self.ask("POST", CONFIGURATIONS, configuration())

    def install_service(self, address: str, port: int) -> None:
        """Create the webhook's Service, for one that runs on this machine."""
        below = f"/api/v1/namespaces/{NAMESPACE}"
        named = {"port": 443, "targetPort": port, "name": "https"}
        service = {**_named("v1", "Service", NAME), "spec": {"ports": [named]}}
        self.ask("POST", f"{below}/services", service)
        subset = {"addresses": [{"ip": address}], "ports": [{"port": port, "name": "https"}]}
        endpoints = {**_named("v1", "Endpoints", NAME), "subsets": [subset]}
        self.ask("POST", f"{below}/endpoints", endpoints)

    def install_node_parts(self) -> None:
        """Create the CSI driver's object and the runtime class."""
        driver = _named("storage.k8s.io/v1", "CSIDriver", "csi.bootseer.io")
        spec = {"attachRequired": False, "volumeLifecycleModes": ["Ephemeral"]}
        self.ask("POST", "/apis/storage.k8s.io/v1/csidrivers", {**driver, "spec": spec})
        known = _named("node.k8s.io/v1", "RuntimeClass", "bootseer")
        self.ask("POST", "/apis/node.k8s.io/v1/runtimeclasses", {**known, "handler": "bootseer"})

    def hooks(self) -> dict[str, dict[str, Any]]:
        """Return the entries of the webhook's configuration, by their names."""
        found = self.ask("GET", CONFIGURATION)["webhooks"]
        return {hook["name"]: hook for hook in found}

    def bundle(self) -> str:
        """Return the certificates that the server trusts, in Base64; empty before the first."""
        (found,) = {one["clientConfig"].get("caBundle", "") for one in self.hooks().values()}
        return str(found)


def _named(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


@contextlib.contextmanager
def stand_in(folder: Path) -> Iterator[ApiServer]:
    """Yield a server that keeps objects, compares versions, and gives the webhook its rights
    only."""
    certificate = _certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = http.server.ThreadingHTTPServer(("localhost", 0), _Objects)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    _Objects.found.clear()
    try:
        yield ApiServer(server.server_port, folder / "ca.pem", folder)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _certificate(folder: Path) -> Path:
    """Make a key and its certificate in one file, with `ca.pem` beside it; return the file."""
    pair = make_pair(["localhost"], datetime.now(UTC))
    (folder / "ca.pem").write_bytes(pair.trusted)
    found = folder / "pair.pem"
    found.write_bytes(pair.key + pair.certificate)
    return found


class _Objects(http.server.BaseHTTPRequestHandler):
    found: ClassVar[dict[str, dict[str, Any]]] = {}
    version = 0
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        document = json.loads(self.rfile.read(length) or b"null")
        with self.lock:
            status, answer = self._do(document)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _do(self, document: Any) -> tuple[int, Any]:
        path, token = self.path, self.headers.get("Authorization", "")
        if token == f"Bearer {_WEBHOOK}" and not self._may():
            return 403, {"kind": "Status"}
        if self.command == "POST":
            if f"{path}/{document['metadata']['name']}" in self.found:
                return 409, {"kind": "Status"}
            return 201, self._keep(f"{path}/{document['metadata']['name']}", document)
        if path not in self.found:
            return 404, {"kind": "Status"}
        if self.command == "DELETE":
            return 200, self.found.pop(path)
        version = self.found[path]["metadata"]["resourceVersion"]
        if self.command == "PUT":
            if document["metadata"].get("resourceVersion") != version:
                return 409, {"kind": "Status"}
            return 200, self._keep(path, document)
        if self.command == "PATCH":
            try:
                return 200, self._keep(path, applied(self.found[path], document))
            except PatchError:
                return 422, {"kind": "Status"}
        return 200, self.found[path]

    def _may(self) -> bool:
        allowed = {SECRET: ("GET", "PUT"), CONFIGURATION: ("GET", "PATCH")}
        return (
            self.command in allowed.get(self.path, ())
            or (self.command == "GET" and self.path.endswith(("/csi.bootseer.io", "/bootseer")))
            or (self.command == "POST" and self.path == SECRET.rpartition("/")[0])
        )

    def _keep(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        type(self).version += 1
        metadata = {**document["metadata"], "resourceVersion": str(self.version)}
        self.found[path] = {**document, "metadata": metadata}
        return self.found[path]

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def real(folder: Path) -> Iterator[ApiServer]:
    """Yield etcd and kube-apiserver with the webhook's rights and no others.

    Only `make test-kubernetes` asks for it: it takes half a minute of processor time to begin.

    Raises: MissingError without their binaries.
    """
    if not os.environ.get("BOOTSEER_TEST_API_SERVER"):
        raise MissingError("`make test-kubernetes` alone runs a real kube-apiserver")
    binary, etcd = (
        shutil.which(name, path=f"{cache_folder() / KEPT}:{os.environ['PATH']}")
        for name in ("kube-apiserver", "etcd")
    )
    if not binary or not etcd:
        raise MissingError("there is no kube-apiserver, or no etcd")
    etcd_port, peer_port, port = free_port(), free_port(), free_port()
    url, peer_url = f"http://127.0.0.1:{etcd_port}", f"http://127.0.0.1:{peer_port}"
    pair = _certificate(folder)
    (folder / "tokens.csv").write_text(
        f'{_ADMIN},admin,1,"system:masters"\n'
        f"{_WEBHOOK},system:serviceaccount:{NAMESPACE}:{NAME},2\n"
    )
    commands: list[list[str | Path]] = [
        [
            *(etcd, "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--name", "e"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", f"e={peer_url}"),
        ],
        [
            *(binary, f"--etcd-servers={url}", f"--secure-port={port}", "--bind-address=127.0.0.1"),
            *(f"--tls-cert-file={pair}", f"--tls-private-key-file={pair}"),
            f"--token-auth-file={folder / 'tokens.csv'}",
            *("--authorization-mode=RBAC", "--allow-privileged=true"),
            "--service-cluster-ip-range=10.99.0.0/24",
            *("--service-account-issuer=https://k8s", "--api-audiences=api"),
            *(f"--service-account-signing-key-file={pair}", f"--service-account-key-file={pair}"),
            # It then calls the endpoints of a service, without a kube-proxy.
            *("--disable-admission-plugins=ServiceAccount", "--enable-aggregator-routing=true"),
        ],
    ]
    with contextlib.ExitStack() as undo:
        for place, command in enumerate(commands):
            log = undo.enter_context((folder / f"{place}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            undo.callback(_end, process)
        authority = folder / "ca.pem"
        wait_for(lambda: _is_ready(port, authority), "an API server", timeout_s=120)
        yield ApiServer(port, authority, folder)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_ready(port: int, authority: Path) -> bool:
    try:
        http = urllib3.PoolManager(ca_certs=str(authority), retries=False)
        where = f"https://localhost:{port}/readyz"
        headers = {"Authorization": f"Bearer {_ADMIN}"}
        return bool(http.request("GET", where, headers=headers).status == 200)
    except (urllib3.exceptions.HTTPError, OSError):
        return False


def _grant(server: ApiServer) -> None:
    """Grant the rights of the chart."""
    rbac, version = "/apis/rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io/v1"
    rules = [
        {"apiGroups": [group], "resources": [kind], "resourceNames": [name], "verbs": verbs}
        for group, kind, name, verbs in _RULES
    ]
    rules.append({"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]})
    secrets = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [NAME]}
    subject = {"kind": "User", "name": f"system:serviceaccount:{NAMESPACE}:{NAME}"}
    below = f"{rbac}/namespaces/{NAMESPACE}"
    for at, kind, found in (
        (rbac, "ClusterRole", rules),
        (below, "Role", [{**secrets, "verbs": ["get", "update"]}]),
    ):
        server.ask("POST", f"{at}/{kind.lower()}s", {**_named(version, kind, NAME), "rules": found})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": NAME}
        binding = {**_named(version, f"{kind}Binding", NAME), "roleRef": reference}
        server.ask("POST", f"{at}/{kind.lower()}bindings", {**binding, "subjects": [subject]})
