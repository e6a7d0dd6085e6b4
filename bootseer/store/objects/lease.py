"""Leases: which of many nodes does something, with an end that needs no help.

The one step that a lease needs of the storage is an exclusive create. Format and proof sketch:
`docs/format/store.md`. The rules that make two holders impossible while clocks differ by less than
`SKEW_S`:

- A lease is the object at its key: {owner, token, expires_at_ns, ttl_ns}, made by an exclusive
  create. A renewal is a second object, named by the token, so that a holder that was asleep cannot
  write over the lease of its successor.
- A holder counts a renewal only if it was confirmed before the lease would have expired. Others
  look at the clock *first*, then read the record: past the expiry plus `SKEW_S` they see every
  renewal that its holder counts.
- So does who has seen the same record and renewal for the length of the lease, by a clock of its
  own: whatever the wall clock of the holder said (`LeaseWatch`).
- A taker creates, exclusively, the *successor* of the record that is over: an object named by its
  token, with the record of the taker. So each record has one successor at most. Then the taker
  replaces the object at the key by its own record. If it dies in between, others follow the record
  at the key to its successor, and take over from that when it has expired.
- The key is replaced or deleted only by who surely holds the lease then, with `SKEW_S` to spare for
  a request that is on its way.

A lease is advice about who should do the work, not a lock on the result: the work still ends in
an atomic publish. Thread-safe.
"""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Annotated, Self

from msgspec import Meta, Struct, to_builtins

from bootseer.base.documents import Form
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.store.backend import Backend
from bootseer.store.objects.publish import TEMPORARY, publish_object

logger = logging.getLogger(__name__)

# What clocks of two nodes may differ by, plus the time a request may be on its way. Nodes of a
# cluster run NTP (tens of milliseconds); 2 s also covers a node that has just booted.
SKEW_S = 2.0
# Well below the age at which the sweep removes renewals and successors (a day).
TTL_MAX_S = 12 * 3600
_NS = 1_000_000_000
_AGREE_TIMES = 9
# Each taker that died before it replaced the key adds one.
_SUCCESSORS_MAX = 64
_Time = Annotated[int, Meta(ge=-(2**63 - 1), le=2**63 - 1)]
_JOIN_S = 5.0


class Record(Struct, frozen=True):
    """What a lease's object says."""

    owner: str
    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    expires_at_ns: _Time
    ttl_ns: _Time

    def encode(self) -> bytes:
        """As canonical JSON."""
        return json.dumps(to_builtins(self), sort_keys=True).encode()


_FORM: Form[Record] = Form(type=Record, size_max=16 << 10)


def decode(data: bytes) -> Record | None:
    """The record in `data`, or None for anything else. Pure."""
    try:
        return _FORM.decode(data, "a lease")
    except CorruptError:
        return None


class Lease:
    """A lease that this process holds, until it is released, lost or expired."""

    def __init__(self, backend: Backend, key: str, record: Record, valid_until: float) -> None:
        self.key = key
        self.owner = record.owner
        self._backend = backend
        self._record = record
        # Counted on this node's monotonic clock, from before the record was written: a wall
        # clock that is set meanwhile cannot prolong a lease.
        self._valid_until = valid_until
        self._released = False
        self._has_renewal = False
        self._lock = threading.Lock()

    @property
    def expires_at_ns(self) -> int:
        """When others may take the lease: wall clock, nanoseconds since 1970."""
        return self._record.expires_at_ns

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease is surely held; 0 when it is lost."""
        return 0.0 if self._released else max(0.0, self._valid_until - time.monotonic())

    @property
    def still_held(self) -> bool:
        """Whether the lease is surely held now, by the clock and without asking the store."""
        return self.remaining_s > 0

    def renew(self) -> None:
        """Hold the lease for another `ttl_s` from now.

        Raises: BusyError when it is lost: expired, released or taken over. What it protects must
        then be given up.
        """
        with self._lock:
            if not self.still_held:
                raise BusyError(f"the lease {self._backend.url}/{self.key} expired or was released")
            started = time.monotonic()
            record = Record(
                self.owner,
                self._record.token,
                time.time_ns() + self._record.ttl_ns,
                self._record.ttl_ns,
            )
            self._has_renewal = True
            publish_object(self._backend, _renewal(record.token), record.encode(), replace=True)
            if not self._is_at_key() or not self.still_held:
                self._released = True
                raise BusyError(
                    f"the lease {self._backend.url}/{self.key} was lost to another node"
                )
            self._record = record
            self._valid_until = started + record.ttl_ns / _NS

    def release(self) -> None:
        """Give the lease up. Idempotent; a lease that another holder took over stays theirs.

        Too close to its end the lease is left to expire.
        """
        with self._lock:
            if self._released:
                return
            # Elsewhere a request costs money, and a person who broke this lease has read there that
            # its end may break the next one, too.
            is_ours = not self._backend.traits.one_step_rename or self._is_at_key()
            if is_ours and self.remaining_s > _spare_s(self._record):
                self._backend.delete_files([self.key])
            self._released = True
            if self._has_renewal:
                self._backend.delete_files([_renewal(self._record.token)])

    def _is_at_key(self) -> bool:
        """Tell whether the key has this lease: a person may have broken it by deleting the key."""
        current = _read(self._backend, self.key)
        return current is not None and current.token == self._record.token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LeaseWatch:
    """What one waiter has seen of another holder's lease, and since when by its own clock. One
    thread."""

    def __init__(self) -> None:
        self.owner = ""
        """Who holds it, as far as it was asked."""
        # By token: the expiry that was seen last, and since when. A taker that died before it
        # replaced the key leaves two records to be looked at.
        self._seen: dict[str, tuple[int, float]] = {}

    def is_over(self, record: Record, expires_at_ns: int, asked_at: float) -> bool:
        """Whether the lease, as it was read after `asked_at` (monotonic), was the same for so long
        that its holder no longer counts it as held."""
        self.owner = record.owner
        seen_ns, since = self._seen.get(record.token, (None, 0.0))
        if seen_ns != expires_at_ns:
            self._seen[record.token] = expires_at_ns, time.monotonic()
            return False
        # What another program wrote there may be no length of ours.
        ttl_s = min(max(record.ttl_ns / _NS, 0.0), TTL_MAX_S)
        return asked_at > since + ttl_s + SKEW_S


def acquire(
    backend: Backend, key: str, *, ttl_s: float, owner: str, watch: LeaseWatch | None = None
) -> Lease | None:
    """See `Store.lease`. It does not wait for a holder."""
    if not 0 < ttl_s <= TTL_MAX_S:
        raise InvalidInputError(f"a lease of {ttl_s} s is not between 0 s and {TTL_MAX_S} s")
    # Twice: once more after a lease that ended meanwhile.
    for _ in range(2):
        started = time.monotonic()
        record = _new_record(owner, ttl_s)
        if publish_object(backend, key, record.encode(), replace=False):
            return Lease(backend, key, record, started + ttl_s)
        now_ns = time.time_ns()  # before the reads: see the module's second rule
        current = _read(backend, key)
        for _ in range(_SUCCESSORS_MAX):
            if current is None:
                break
            renewed = _read(backend, _renewal(current.token))
            expires_at_ns = max(current.expires_at_ns, renewed.expires_at_ns if renewed else 0)
            if now_ns < expires_at_ns + int(SKEW_S * _NS) and not (
                watch is not None and watch.is_over(current, expires_at_ns, started)
            ):
                return None
            if _succeed(backend, key, current.token, record, started):
                logger.info("took over the lease %s/%s from %s", backend.url, key, current.owner)
                return Lease(backend, key, record, started + ttl_s)
            current = _read(backend, _successor(current.token))
    return None


def agree(
    backend: Backend, key: str, *, ttl_s: float, owner: str, is_over: Callable[[str], bool]
) -> str:
    """A token that all get who ask within `ttl_s` of the first one: that of a lease which nobody
    renews or gives up. `is_over`: whether the caller had this one before, and begins another.

    Raises: BusyError where others end as fast as this one asks.
    """
    for _ in range(_AGREE_TIMES):
        now_ns = time.time_ns()
        current = _read(backend, key)
        for _ in range(_SUCCESSORS_MAX):
            if current is None:
                acquire(backend, key, ttl_s=ttl_s, owner=owner)
                break
            is_old = current.expires_at_ns + int(SKEW_S * _NS) < now_ns
            if not is_old and not is_over(current.token):
                return current.token
            started = time.monotonic()
            if _succeed(backend, key, current.token, _new_record(owner, ttl_s), started):
                break
            current = _read(backend, _successor(current.token))
    raise BusyError(f"{backend.url}/{key} changes all the time")


def _new_record(owner: str, ttl_s: float) -> Record:
    ttl_ns = int(ttl_s * _NS)
    return Record(owner, os.urandom(16).hex(), time.time_ns() + ttl_ns, ttl_ns)


def _spare_s(record: Record) -> float:
    """Return how long before its end the holder of a lease touches the key no more."""
    return min(SKEW_S, record.ttl_ns / _NS / 4)


def _succeed(backend: Backend, key: str, token: str, record: Record, started: float) -> bool:
    """Take over from the lease `token`, which is over; False when another did so.

    `started`: when the record was made (monotonic).
    """
    if not publish_object(backend, _successor(token), record.encode(), replace=False):
        return False
    if started + record.ttl_ns / _NS - time.monotonic() <= _spare_s(record):
        # Others follow the successor, which expires.
        return False
    publish_object(backend, key, record.encode(), replace=True)
    return True


def _read(backend: Backend, path: str) -> Record | None:
    """The record at `path`; None where there is none.

    What is no record (no release wrote it: a stray file) counts as a lease of an hour from its
    last change, so that it blocks no node for ever.
    """
    try:
        data = backend.read(path, 0, _FORM.size_max)
        record = decode(data)
        if record is None:
            made_ns = backend.stat(path).modified_ns
            token = hashlib.sha256(data).hexdigest()[:32]
            record = Record("unknown", token, made_ns + 3600 * _NS, 3600 * _NS)
    except NotFoundError:
        return None
    return record


def _successor(token: str) -> str:
    return f"{TEMPORARY}/after-{token}"


def _renewal(token: str) -> str:
    return f"{TEMPORARY}/renewed-{token}"


class LeaseRenewal:
    """`with LeaseRenewal(lease, ttl_s): ...` renews three times per `ttl_s`, by a thread of its
    own, then releases. A lost lease is no error: the snapshot is published by an atomic create, so
    that two writers cost time, never correctness."""

    def __init__(self, lease: Lease, ttl_s: float) -> None:
        self._lease = lease
        self._pause_s = ttl_s / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)

    def _renew(self) -> None:
        while not self._stop.wait(self._pause_s):
            try:
                self._lease.renew()
            except (BootseerError, OSError) as error:
                if not self._lease.still_held:
                    logger.warning("%s; another node may run the same set-up", error)
                    return
                # The next renewal may still come in time.
                logger.info("cannot renew the lease yet: %s", error)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)
        try:
            self._lease.release()
        except (BootseerError, OSError) as problem:
            logger.info("cannot release the lease, it will expire: %s", problem)
