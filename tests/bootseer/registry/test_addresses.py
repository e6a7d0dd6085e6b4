"""A registry can redirect to no address that only this node or its network reaches."""

import socket

import pytest

from bootseer.errors import PermissionDeniedError
from bootseer.http import transport
from bootseer.http.addresses import Reach, reach_of
from bootseer.registry.client import RegistryClient
from bootseer.registry.hosts import RegistryHost
from testbed.servers.registry import QuietHandler, serve


class _Registry(QuietHandler):
    """Server that redirects a manifest or a login to another address, as `target` says."""

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
    """A public name may resolve to an address inside, which is known only once it is connected."""
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
    host = RegistryHost("r", f"http://127.0.0.2:{outside.server_address[1]}/v2")
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
        host = RegistryHost("r", f"http://127.0.0.1:{server.server_address[1]}/v2")
        with (
            RegistryClient("a/b", [host], find_login=lambda *_: None, deadline_s=10) as client,
            pytest.raises(PermissionDeniedError, match="link-local"),
        ):
            client.manifest("v1")
    finally:
        server.shutdown()
        server.server_close()
