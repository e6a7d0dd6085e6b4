"""A lease has one holder at a time, and none for ever."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import BusyError, InvalidInputError
from bootseer.store import Lease, LeaseWatch, Store, open_store
from bootseer.store.local.backend import LocalBackend
from bootseer.store.objects import lease
from testbed.needs import MissingError
from tests.bootseer.store.using import race

TTL_S = 60.0


class Clock:
    """Clocks of the leases in this process, which a test sets ahead."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.wall_ahead_s = 0.0
        """Seconds by which the wall clock alone is ahead."""

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s

    def time_ns(self) -> int:
        return time.time_ns() + int((self.ahead_s + self.wall_ahead_s) * 1e9)

    def pass_lease(self) -> None:
        """Let the time of a lease pass, and the tolerance between clocks."""
        self.ahead_s += TTL_S + lease.SKEW_S + 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lease, "time", clock)
    return clock


def hold(store: Store, owner: str = "me") -> Lease:
    held = store.lease("leases/x", ttl_s=TTL_S, owner=owner)
    assert held is not None
    return held


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


class Slow(LocalBackend):
    """Backend whose renames take `rename_s`."""

    def __init__(self, root: Path, clock: Clock, rename_s: float) -> None:
        super().__init__(root)
        self._clock = clock
        self._rename_s = rename_s

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        super().rename(source, target, overwrite=overwrite)
        self._clock.ahead_s += self._rename_s


def test_a_lease_counts_from_before_its_record_was_written(tmp_path: Path, clock: Clock) -> None:
    """Other nodes see the expiry in the record, however long its write took."""
    held = hold(Store(Slow(tmp_path / "root", clock, 20)))
    assert 0 < held.remaining_s <= 40
    held.renew()
    assert 0 < held.remaining_s <= 40


def test_a_lease_that_is_nearly_over_when_it_is_taken_is_left(tmp_path: Path, clock: Clock) -> None:
    store = Store(Slow(tmp_path / "root", clock, 59))
    hold(store)
    clock.pass_lease()
    assert store.lease("leases/x", ttl_s=60, owner="other") is None
    kept = lease.decode(store.backend.read("leases/x"))
    assert kept is not None
    assert kept.owner == "me"


def test_one_of_many_gets_a_new_lease(store: Store) -> None:
    assert race(8, lambda i: store.lease("leases/x", ttl_s=60, owner=f"{i}") is not None) == 1


def test_one_of_many_takes_over_an_expired_lease(store: Store, clock: Clock) -> None:
    dead = hold(store)
    clock.pass_lease()
    assert race(8, lambda i: store.lease("leases/x", ttl_s=60, owner=f"{i}") is not None) == 1
    with pytest.raises(BusyError):
        dead.renew()
    dead.release()  # must not touch the successor's
    assert store.lease("leases/x", ttl_s=60, owner="late") is None


def test_is_not_taken_within_the_tolerance(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "SKEW_S", 3600.0)
    held = hold(store)
    clock.ahead_s += 3600
    assert not held.still_held
    assert store.lease("leases/x", ttl_s=60, owner="other") is None


def test_who_waits_needs_no_clock_of_the_holders(store: Store, clock: Clock) -> None:
    clock.wall_ahead_s = 24 * 3600.0
    dead = hold(store)
    clock.wall_ahead_s = 0.0
    watch = LeaseWatch()
    for is_over in (False, True):
        assert store.lease("leases/x", ttl_s=60, owner="asks once") is None
        taken = store.lease("leases/x", ttl_s=60, owner="waits", watch=watch)
        assert (taken is not None) is is_over
        if not is_over:
            clock.pass_lease()
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


def test_a_renewed_lease_is_not_taken(store: Store, clock: Clock) -> None:
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
    for _ in range(3):
        clock.ahead_s += TTL_S / 2
        held.renew()
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


def test_a_stalled_taker_cannot_take_the_next_lease(tmp_path: Path, clock: Clock) -> None:
    """The taker has read the expired record, and continues after another one has taken the
    lease."""
    backend = Stalled(tmp_path / "root", "after-")
    late, other = Store(backend), Store(LocalBackend(tmp_path / "root"))
    hold(other)
    clock.pass_lease()
    held: list[Lease] = []
    backend.meanwhile = lambda: held.append(hold(other, owner="winner"))
    assert late.lease("leases/x", ttl_s=60, owner="late") is None
    held[0].renew()
    assert held[0].still_held


def test_a_stalled_taker_cannot_take_a_lease_that_came_and_went(
    tmp_path: Path, clock: Clock
) -> None:
    """The successor's record looks expired by then, since its renewals are deleted."""
    backend = Stalled(tmp_path / "root", "after-")
    late, other = Store(backend), Store(LocalBackend(tmp_path / "root"))
    hold(other)
    clock.pass_lease()
    held: list[Lease] = []

    def meanwhile() -> None:
        brief = hold(other, owner="brief")
        brief.renew()
        brief.release()
        held.append(hold(other, owner="next"))
        # The next holder renews its lease while the record of the brief one expires.
        for _ in range(4):
            clock.ahead_s += TTL_S / 2
            held[0].renew()

    backend.meanwhile = meanwhile
    assert late.lease("leases/x", ttl_s=60, owner="late") is None
    held[0].renew()


def test_a_taker_that_dies_half_way_costs_its_lease_only(tmp_path: Path, clock: Clock) -> None:
    """If it dies between its two steps, the next taker continues from it, not from its
    predecessor."""
    store = Store(LocalBackend(tmp_path / "root"))
    hold(store)
    for owner in ("first", "second"):
        clock.pass_lease()
        dying = Stalled(tmp_path / "root", "leases/x True")
        dying.meanwhile = die
        with pytest.raises(ZeroDivisionError):
            hold(Store(dying), owner)
    record = lease.decode(store.read("leases/x"))
    assert record is not None
    assert record.owner == "me"
    assert store.lease("leases/x", ttl_s=60, owner="early") is None
    clock.pass_lease()
    hold(store, "heir")
    record = lease.decode(store.read("leases/x"))
    assert record is not None
    assert record.owner == "heir"
    assert store.lease("leases/x", ttl_s=60, owner="late") is None


def test_a_killed_holder_costs_its_lease_only(store_url: str, clock: Clock) -> None:
    code = (
        "import os, sys; from bootseer.store import open_store\n"
        "assert open_store(sys.argv[1]).lease('leases/x', ttl_s=60, owner='dead')\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, store_url], timeout=60)
    assert done.returncode == -9
    with open_store(store_url) as store:
        assert store.lease("leases/x", ttl_s=60, owner="early") is None
        clock.pass_lease()
        hold(store, "heir")


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
        held = hold(store, owner="node-7")
        record = json.loads((tmp_path / "store/leases/x").read_bytes())
    assert sorted(record) == ["expires_at_ns", "owner", "token", "ttl_ns"]
    assert record["owner"] == "node-7"
    assert record["ttl_ns"] == TTL_S * 1e9
    assert record["expires_at_ns"] == held.expires_at_ns
