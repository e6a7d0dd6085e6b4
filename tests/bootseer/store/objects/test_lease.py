"""A lease has one holder at a time, and none for ever."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from bootseer.errors import BusyError, InvalidInputError
from bootseer.store import Lease, LeaseWatch, Store, open_store
from bootseer.store.local.backend import LocalBackend
from bootseer.store.objects import lease
from testbed.needs import MissingError
from testbed.waiting import wait_for
from tests.bootseer.store.using import race


@pytest.fixture
def exact_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the tolerance between clocks, so that tests do not wait for it: all share one
    clock."""
    monkeypatch.setattr(lease, "SKEW_S", 0.0)


def hold(store: Store, ttl_s: float = 60, owner: str = "me") -> Lease:
    held = store.lease("leases/x", ttl_s=ttl_s, owner=owner)
    assert held is not None
    return held


def hold_when_free(store: Store, owner: str, ttl_s: float = 60) -> Lease:
    held: list[Lease] = []

    def is_held() -> bool:
        held.extend(filter(None, [store.lease("leases/x", ttl_s=ttl_s, owner=owner)]))
        return bool(held)

    wait_for(is_held, "the end of the lease")
    return held[0]


def test_is_held_by_one_until_released(store: Store) -> None:
    first = hold(store)
    assert first.still_held
    assert 0 < first.remaining_s <= 60
    assert first.expires_at_ns > time.time_ns()
    assert store.lease("leases/x", ttl_s=60, owner="other") is None
    other = store.lease("leases/y", ttl_s=60, owner="other")
    assert other is not None
    first.release()
    first.release()
    assert not first.still_held
    with hold(store, owner="other") as second:
        assert second.owner == "other"
    hold(store, owner="third").release()
    other.release()
    assert list(store.list()) == []
    if store.backend.traits.one_step_rename:
        assert list(store.backend.list(".tmp")) == []


def test_a_lease_counts_from_before_its_record_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other nodes see the expiry in the record, however long its write took."""
    late_s = 0.0

    class Slow(LocalBackend):
        def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
            nonlocal late_s
            super().rename(source, target, overwrite=overwrite)
            late_s += 20

    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + late_s, time_ns=lambda: time.time_ns()
    )
    monkeypatch.setattr(lease, "time", clock)
    held = hold(Store(Slow(tmp_path / "root")), ttl_s=60)
    assert 0 < held.remaining_s <= 40
    held.renew()
    assert 0 < held.remaining_s <= 40


def test_a_lease_that_is_nearly_over_when_it_is_taken_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.0

    class Slow(LocalBackend):
        def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
            nonlocal late_s
            super().rename(source, target, overwrite=overwrite)
            late_s += 59

    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + late_s,
        time_ns=lambda: time.time_ns() + int(late_s * 1e9),
    )
    monkeypatch.setattr(lease, "time", clock)
    store = Store(Slow(tmp_path / "root"))
    hold(store, ttl_s=60)
    late_s += 100
    assert store.lease("leases/x", ttl_s=60, owner="other") is None
    kept = lease.decode(store.backend.read("leases/x"))
    assert kept is not None
    assert kept.owner == "me"


def test_one_of_many_gets_a_new_lease(store: Store) -> None:
    assert race(8, lambda i: store.lease("leases/x", ttl_s=60, owner=f"{i}") is not None) == 1


def test_one_of_many_takes_over_an_expired_lease(store: Store, exact_clocks: None) -> None:
    dead = hold(store, ttl_s=0.01)
    wait_for(lambda: not dead.still_held)
    assert race(8, lambda i: store.lease("leases/x", ttl_s=60, owner=f"{i}") is not None) == 1
    with pytest.raises(BusyError):
        dead.renew()
    dead.release()  # must not touch the successor's
    assert store.lease("leases/x", ttl_s=60, owner="late") is None


def test_is_not_taken_within_the_tolerance(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SKEW_S", 3600.0)
    held = hold(store, ttl_s=0.01)
    wait_for(lambda: not held.still_held)
    assert store.lease("leases/x", ttl_s=60, owner="other") is None


def test_who_waits_needs_no_clock_of_the_holders(
    store: Store, exact_clocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        now_ns = time.time_ns()
        patched.setattr(time, "time_ns", lambda: now_ns + 24 * 3600 * 10**9)
        dead = hold(store, ttl_s=0.2)
    watch = LeaseWatch()
    taken: list[Lease] = []

    def is_taken() -> bool:
        assert store.lease("leases/x", ttl_s=60, owner="asks once") is None
        taken.extend(filter(None, [store.lease("leases/x", ttl_s=60, owner="waits", watch=watch)]))
        return bool(taken)

    wait_for(is_taken, "the end of the dead lease")
    assert not dead.still_held
    with pytest.raises(BusyError):
        dead.renew()
    # The taker does not know of the new lease yet.
    assert store.lease("leases/x", ttl_s=60, owner="waits", watch=watch) is None


def test_a_watch_begins_anew_with_each_renewal() -> None:
    watch = LeaseWatch()
    record = lease.LeaseRecord("owner", "0" * 32, 1, 60 * 10**9)
    began = time.monotonic()
    assert not watch.has_expired(record, 1, began)
    assert not watch.has_expired(record, 1, began + 60)
    assert not watch.has_expired(record, 2, began + 3600)
    assert not watch.has_expired(record, 2, began + 60)
    # Within the tolerance between clocks.
    assert not watch.has_expired(record, 2, began + 60 + lease.SKEW_S / 2)
    assert watch.has_expired(record, 2, time.monotonic() + 60 + lease.SKEW_S)
    assert not watch.has_expired(replace(record, token="1" * 32), 2, began + 3600)
    # No record of ours is as long: it blocks nobody for ever.
    endless = replace(record, ttl_ns=10**30)
    assert not watch.has_expired(endless, 3, began)
    assert watch.has_expired(endless, 3, time.monotonic() + lease.TTL_MAX_S + lease.SKEW_S)


def test_a_renewed_lease_is_not_taken(store: Store, exact_clocks: None) -> None:
    held = hold(store)
    for _ in range(3):
        held.renew()
    before = held.expires_at_ns
    held.renew()
    assert held.expires_at_ns > before
    # The record itself is as it was: its expiry is not the one that counts.
    record = lease.decode(store.read("leases/x"))
    assert record is not None
    assert record.expires_at_ns < held.expires_at_ns
    assert store.lease("leases/x", ttl_s=60, owner="other") is None
    held.release()
    hold(store, owner="other")


def test_a_lost_lease_is_not_renewed(store: Store) -> None:
    held = hold(store)
    store.delete("leases/x")  # an operator breaks it
    successor = hold(store, owner="other")
    with pytest.raises(BusyError, match="lost"):
        held.renew()
    assert not held.still_held
    held.release()
    assert successor.still_held
    successor.renew()
    successor.release()
    with pytest.raises(BusyError, match="released"):
        successor.renew()


def test_releasing_a_broken_lease_leaves_the_next_one(store: Store) -> None:
    if not store.backend.traits.one_step_rename:
        raise MissingError("looks for a broken lease with each renewal only")
    held = hold(store)
    store.delete("leases/x")  # an operator breaks it
    successor = hold(store, owner="other")
    held.release()
    successor.renew()
    assert store.lease("leases/x", ttl_s=60, owner="third") is None


def die() -> None:
    raise ZeroDivisionError


class Stalled(LocalBackend):
    """Backend that calls `meanwhile` once, before a rename with this target and `overwrite`."""

    def __init__(self, root: Path, when: str) -> None:
        super().__init__(root)
        self._when = when
        self.meanwhile: Callable[[], object] = lambda: None

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        if re.search(self._when, f"{target} {overwrite}"):
            self._when = "never"
            self.meanwhile()
        super().rename(source, target, overwrite=overwrite)


def expired(store: Store) -> None:
    over = hold(store, ttl_s=0.01)
    wait_for(lambda: not over.still_held)


def test_a_stalled_taker_cannot_take_the_next_lease(tmp_path: Path, exact_clocks: None) -> None:
    """The taker has read the expired record, and continues after another one has taken the
    lease."""
    backend = Stalled(tmp_path / "root", "after-")
    late, other = Store(backend), Store(LocalBackend(tmp_path / "root"))
    expired(other)
    held: list[Lease] = []
    backend.meanwhile = lambda: held.append(hold(other, owner="winner"))
    assert late.lease("leases/x", ttl_s=60, owner="late") is None
    held[0].renew()
    assert held[0].still_held


def test_a_stalled_taker_cannot_take_a_lease_that_came_and_went(
    tmp_path: Path, exact_clocks: None
) -> None:
    """The successor's record looks expired by then, since its renewals are deleted."""
    backend = Stalled(tmp_path / "root", "after-")
    late, other = Store(backend), Store(LocalBackend(tmp_path / "root"))
    expired(other)
    held: list[Lease] = []

    def meanwhile() -> None:
        brief = hold(other, ttl_s=0.2, owner="brief")
        brief.renew()
        brief.release()
        held.append(hold(other, owner="next"))
        wait_for(lambda: time.time_ns() > brief.expires_at_ns + 10**9)

    backend.meanwhile = meanwhile
    assert late.lease("leases/x", ttl_s=60, owner="late") is None
    held[0].renew()


def test_a_taker_that_dies_half_way_costs_its_lease_only(
    tmp_path: Path, exact_clocks: None
) -> None:
    """If it dies between its two steps, the next taker continues from it, not from its
    predecessor."""
    store = Store(LocalBackend(tmp_path / "root"))
    expired(store)
    for owner in ("first", "second"):
        dying = Stalled(tmp_path / "root", "leases/x True")
        dying.meanwhile = die
        with pytest.raises(ZeroDivisionError):
            hold_when_free(Store(dying), owner, ttl_s=0.3)
    record = lease.decode(store.read("leases/x"))
    assert record is not None
    assert record.owner == "me"
    assert hold_when_free(store, "heir").owner == "heir"
    record = lease.decode(store.read("leases/x"))
    assert record is not None
    assert record.owner == "heir"
    assert store.lease("leases/x", ttl_s=60, owner="late") is None


def test_a_killed_holder_costs_its_lease_only(store_url: str, exact_clocks: None) -> None:
    code = (
        "import os, sys; from bootseer.store import open_store\n"
        "assert open_store(sys.argv[1]).lease('leases/x', ttl_s=1, owner='dead')\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, store_url], timeout=60)
    assert done.returncode == -9
    with open_store(store_url) as store:
        assert hold_when_free(store, "heir").owner == "heir"


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"owner": 1}'],
    ids=["empty", "null", "list", "no-fields", "not-text", "deep", "wrong-type"],
)
def test_what_is_no_record_blocks_nobody_for_ever(
    store_url: str, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(store_url) as store:
        store.publish("leases/x", data)
        assert store.lease("leases/x", ttl_s=60, owner="me") is None
        later_ns = time.time_ns() + 2 * 3600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: later_ns)
        assert store.lease("leases/x", ttl_s=60, owner="me") is not None


@pytest.mark.parametrize("ttl_s", [0, -1, 10**6, float("nan")])
def test_refuses_a_senseless_length(store_url: str, ttl_s: float) -> None:
    with open_store(store_url) as store, pytest.raises(InvalidInputError):
        store.lease("leases/x", ttl_s=ttl_s, owner="me")


def test_the_record_is_the_documented_one(store_url: str, tmp_path: Path) -> None:
    with open_store(store_url) as store:
        held = hold(store, ttl_s=30, owner="node-7")
        record = json.loads((tmp_path / "store/leases/x").read_bytes())
    assert sorted(record) == ["expires_at_ns", "owner", "token", "ttl_ns"]
    assert record["owner"] == "node-7"
    assert record["ttl_ns"] == 30 * 10**9
    assert record["expires_at_ns"] == held.expires_at_ns
