"""Connections to servers: certificates and proxies."""

import base64
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BootseerError, InvalidInputError, PermissionDeniedError
from bootseer.registry.client import RegistryClient
from bootseer.registry.documents import digest_of
from bootseer.registry.hosts import RegistryHost, load_hosts
from testbed.needs import require
from testbed.servers.registry import QuietHandler, Registry, running_registry, serve


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an authority (ca.pem) and the server and client pairs it signed.

    The pairs' files end in .pem and .key.
    """
    require(programs=["openssl"])
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "rsa:2048", "-nodes")
    openssl(
        "req", "-x509", *new, "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem"
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
    for name in ("server", "client"):
        openssl(
            "req", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", f"{name}.pem"),
        )
    return folder


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Registry]:
    """Yield a registry whose certificate only the authority of `certificates` vouches for."""
    tls = {"certificate": str(certificates / "server.pem"), "key": str(certificates / "server.key")}
    with running_registry(tmp_path_factory.mktemp("secured"), tls=tls) as running:
        yield running


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[Registry]:
    """Yield a registry that also requires a certificate of its clients."""
    tls = {
        "certificate": str(certificates / "server.pem"),
        "key": str(certificates / "server.key"),
        "clientcas": [str(certificates / "ca.pem")],
    }
    with running_registry(tmp_path_factory.mktemp("mutual"), tls=tls) as running:
        yield running


def ask(host: RegistryHost) -> object:
    with RegistryClient("a/b", [host], find_login=lambda *_: None, deadline_s=10) as client:
        try:
            return client.manifest("v1")
        except FileNotFoundError:
            return "reached"


def test_a_certificate_is_verified(secured: Registry, certificates: Path) -> None:
    host = RegistryHost(secured.host, f"https://{secured.host}/v2")
    with pytest.raises(PermissionDeniedError, match=r"not trusted .*hosts\.toml"):
        ask(host)
    assert ask(replace(host, ca_files=(certificates / "ca.pem",))) == "reached"
    assert ask(replace(host, verify=False)) == "reached"


def test_a_client_shows_its_certificate(mutual: Registry, certificates: Path) -> None:
    host = RegistryHost(
        mutual.host, f"https://{mutual.host}/v2", ca_files=(certificates / "ca.pem",)
    )
    with pytest.raises(BootseerError, match="cannot talk to"):
        ask(host)
    pair = (certificates / "client.pem", certificates / "client.key")
    assert ask(replace(host, client_certificates=(pair,))) == "reached"


def test_a_hosts_file_speaks_of_the_registry_itself(
    mutual: Registry, certificates: Path, tmp_path: Path
) -> None:
    """The configuration that containerd pulls with is enough."""
    folder = tmp_path / mutual.host
    folder.mkdir()
    for name in ("ca.pem", "client.pem", "client.key"):
        shutil.copy(certificates / name, folder)
    (folder / "hosts.toml").write_text(
        f"""
        server = "https://{mutual.host}"
        [host."https://{mutual.host}"]
        capabilities = ["pull", "resolve"]
        ca = "ca.pem"
        client = [["client.pem", "client.key"]]
        """
    )
    (host,) = load_hosts(mutual.host, tmp_path)
    assert ask(host) == "reached"


def test_a_folder_with_certificates_only_is_enough(
    mutual: Registry, certificates: Path, tmp_path: Path
) -> None:
    folder = tmp_path / mutual.host
    folder.mkdir()
    for name, here in (("ca.pem", "a.crt"), ("client.pem", "n.cert"), ("client.key", "n.key")):
        shutil.copy(certificates / name, folder / here)
    (host,) = load_hosts(mutual.host, tmp_path)
    # This machine's registries are spoken to in plain HTTP where no file says otherwise.
    assert ask(replace(host, base_url=f"https://{mutual.host}/v2")) == "reached"


def test_a_certificate_that_is_none(secured: Registry, tmp_path: Path) -> None:
    host = RegistryHost(
        secured.host, f"https://{secured.host}/v2", ca_files=(tmp_path / "absent.pem",)
    )
    with pytest.raises(InvalidInputError, match=r"absent\.pem"):
        ask(host)


def test_a_proxy_is_used_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    class Proxy(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            seen.append((self.path, self.headers.get("Proxy-Authorization")))
            self.reply(404, b"{}")

    server = serve(Proxy)
    try:
        port = server.server_address[1]
        monkeypatch.setenv("http_proxy", f"http://me:s3cret@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "direct.invalid")
        assert ask(RegistryHost("r.invalid", "http://r.invalid/v2")) == "reached"
    finally:
        server.shutdown()
        server.server_close()
    login = base64.b64encode(b"me:s3cret").decode()
    assert seen == [("http://r.invalid/v2/a/b/manifests/v1", f"Basic {login}")]


@pytest.mark.parametrize(
    ("status", "headers", "ask"),
    [
        (307, {"Location": "http://198.51.100.1/v2/a/x"}, lambda client: client.manifest("v1")),
        (
            200,
            {"Link": '<http://198.51.100.1/v2/a/x>; rel="next"'},
            lambda client: client.referrers(digest_of(b""), "a/b"),
        ),
        (
            202,
            {"Location": "http://198.51.100.1/v2/a/upload?state=1"},
            lambda client: client.push_blob(digest_of(b"x"), b"x"),
        ),
    ],
    ids=["redirect", "next page", "upload"],
)
def test_no_server_leads_us_to_where_nothing_is_encrypted(
    certificates: Path,
    status: int,
    headers: dict[str, str],
    ask: Callable[[RegistryClient], object],
) -> None:
    class Handler(QuietHandler):
        def do_HEAD(self) -> None:  # noqa: N802
            self.reply(404)

        def do_GET(self) -> None:  # noqa: N802
            self.reply(status, b"{}", **headers)

        def do_POST(self) -> None:  # noqa: N802
            self.reply(status, b"", **headers)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    server = serve(Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    try:
        name = f"127.0.0.1:{server.server_address[1]}"
        host = RegistryHost(name, f"https://{name}/v2", ca_files=(certificates / "ca.pem",))
        with (
            RegistryClient("a", [host], deadline_s=5) as client,
            pytest.raises(PermissionDeniedError, match="unencrypted"),
        ):
            ask(client)
    finally:
        server.shutdown()
        server.server_close()


def test_a_registry_on_this_machine_that_wants_tls_is_told_apart(
    secured: Registry, tmp_path: Path
) -> None:
    """Without a hosts file a request to it is unencrypted, as containerd's is."""
    (host,) = load_hosts(secured.host, tmp_path)
    assert host.base_url.startswith("http://")
    with pytest.raises(InvalidInputError, match="wants TLS") as caught:
        ask(host)
    assert f'server = "https://{secured.host}"' in str(caught.value)
    assert f"{secured.host}/hosts.toml in registry_hosts_dir" in str(caught.value)
