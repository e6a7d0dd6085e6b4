"""Addresses that nodes note in the store for each other."""

from pathlib import Path

import pytest

from bootseer.fanout.addresses import NotedAddresses
from bootseer.store import open_store

START = ("team.llm", "7", "0")


def test_a_node_that_moved_is_found_where_it_is_now(tmp_path: Path) -> None:
    with open_store(tmp_path.as_uri()) as store:
        first, second = (NotedAddresses(store, START, 27000) for _ in range(2))
        first.note(3, "10.0.0.3", "n9")
        assert second.name(3) == "3"
        assert second.find(3) == ("10.0.0.3", 27000)
        assert second.name(3) == "n9"
        first.note(3, "fd00::7", "n7")
        assert second.find(3) == ("10.0.0.3", 27000)
        second.forget(3)
        assert second.find(3) == ("fd00::7", 27000)
        assert second.name(3) == "n7"
        with pytest.raises(ConnectionRefusedError):
            NotedAddresses(store, ("team.llm", "8", "0"), 27000).find(3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"attacker.example n3",
        b"\xff",
        b"1" * 1000,
        b"10.0.0.3",
        b"10.0.0.3 \x1b[31mn3",
        b"10.0.0.3 n3\n",
    ],
)
def test_what_is_no_address_is_nobody_s(tmp_path: Path, data: bytes) -> None:
    with open_store(tmp_path.as_uri()) as store:
        store.publish("leases/nodes/team.llm/7/0/3", data)
        with pytest.raises(ConnectionRefusedError):
            NotedAddresses(store, START, 27000).find(3)
