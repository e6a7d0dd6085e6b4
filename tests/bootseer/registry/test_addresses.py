"""Where a registry may send us: never to what only this node or its network can reach."""

import socket

import pytest

from bootseer.errors import PermissionDeniedError
from bootseer.registry import transport
from bootseer.registry.client import RegistryClient
from bootseer.registry.hosts import Host
from bootseer.registry.transport import Reach, may_lead, reach_of
from testbed.servers.registry import QuietHandler, serve


@pytest.mark.parametrize(
    ("address", "reach"),
    [
        ("8.8.8.8", Reach.EVERYBODY),
        ("2606:4700::1111", Reach.EVERYBODY),
        ("10.1.2.3", Reach.NETWORK),
        ("192.168.0.1", Reach.NETWORK),
        ("100.100.100.200", Reach.NETWORK),
        ("fd00:ec2::254", Reach.NETWORK),
        ("64:ff9b::a01:203", Reach.NETWORK),
        ("169.254.169.254", Reach.LINK),
        ("fe80::1%eth0", Reach.LINK),
        ("::ffff:169.254.169.254", Reach.LINK),
        ("64:ff9b::a9fe:a9fe", Reach.LINK),
        ("2002:a9fe:a9fe::1", Reach.LINK),
        ("127.0.0.1", Reach.MACHINE),
        ("::1", Reach.MACHINE),
        ("0.0.0.0", Reach.MACHINE),
        ("::ffff:127.0.0.1", Reach.MACHINE),
    ],
)
def test_who_reaches_an_address(address: str, reach: Reach) -> None:
    assert reach_of(address) is reach


def test_who_may_lead_where() -> None:
    allowed = {
        Reach.EVERYBODY: {Reach.EVERYBODY},
        Reach.NETWORK: {Reach.EVERYBODY, Reach.NETWORK},
        Reach.LINK: {Reach.EVERYBODY, Reach.NETWORK, Reach.LINK},
        Reach.MACHINE: {Reach.EVERYBODY, Reach.NETWORK, Reach.MACHINE},
    }
    for registry, targets in allowed.items():
        assert {target for target in Reach if may_lead(registry, target)} == targets


class _Registry(QuietHandler):
    """Redirects a manifest, or asks for a login elsewhere, as `target` says."""

    target = ""
    asks_for_login = False

    def do_GET(self) -> None:  # noqa: N802
        if self.asks_for_login:
            self.reply(401, b"{}", **{"WWW-Authenticate": f'Bearer realm="{self.target}"'})
        else:
            self.reply(307, b"{}", Location=self.target)


@pytest.mark.parametrize("asks_for_login", [False, True], ids=["redirect", "login"])
@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "2130706433", "inside.example"])
def test_a_registry_on_the_internet_leads_to_nothing_inside(
    monkeypatch: pytest.MonkeyPatch, name: str, asks_for_login: bool
) -> None:
    """Also where a name of its own means an address inside, which is known once it answers."""
    seen: list[str] = []

    class Inside(QuietHandler):
        def do_GET(self) -> None:  # noqa: N802
            seen.append(self.path)
            self.reply(200, b'{"token": "x"}')

    class Outside(_Registry):
        pass

    outside, inside = serve(Outside, "127.0.0.2"), serve(Inside)
    real = socket.getaddrinfo

    def resolve(host: str, *arguments: object, **options: object) -> object:
        own = "127.0.0.1" if host == "inside.example" else host
        return real(own, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(
        transport,
        "reach_of",
        lambda address: Reach.EVERYBODY if address == "127.0.0.2" else reach_of(address),
    )
    monkeypatch.setenv("no_proxy", "*")
    Outside.target = f"http://{name}:{inside.server_address[1]}/latest/meta-data/"
    Outside.asks_for_login = asks_for_login
    host = Host("r", f"http://127.0.0.2:{outside.server_address[1]}/v2")
    try:
        with (
            RegistryClient("a/b", [host], find_login=lambda *_: None, deadline_s=10) as client,
            pytest.raises(PermissionDeniedError, match=r"sends us to .* this machine.*refused"),
        ):
            client.manifest("v1")
    finally:
        for server in (outside, inside):
            server.shutdown()
            server.server_close()
    assert seen == []


def test_a_local_registry_does_not_lead_to_the_metadata_of_a_cloud() -> None:
    class Local(_Registry):
        target = "http://169.254.169.254/latest/meta-data/"

    server = serve(Local)
    try:
        host = Host("r", f"http://127.0.0.1:{server.server_address[1]}/v2")
        with (
            RegistryClient("a/b", [host], find_login=lambda *_: None, deadline_s=10) as client,
            pytest.raises(PermissionDeniedError, match="link-local"),
        ):
            client.manifest("v1")
    finally:
        server.shutdown()
        server.server_close()
