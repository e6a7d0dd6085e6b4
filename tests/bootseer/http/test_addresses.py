"""Addresses that a server may redirect to, and from where they can be reached."""

import pytest

from bootseer.http.addresses import Reach, is_loopback, may_redirect, reach_of


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
        assert {target for target in Reach if may_redirect(registry, target)} == targets


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.9.9.9:5000", "[::1]:5000"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["localhost.evil.com", "128.0.0.1", "127.0.0.1.nip.io", "[::2]:1"])
def test_another_machine(host: str) -> None:
    assert not is_loopback(host)
