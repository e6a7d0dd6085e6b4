"""Leases: objects that give a task to one of many nodes, and expire by themselves.

The storage must offer an exclusive create, nothing more. docs/format/store.md has the format and a
proof sketch. These rules exclude two holders at once while clocks differ by less than `SKEW_S`:

- A lease is the object at its key: {owner, token, expires_at_ns, ttl_ns}, made by an exclusive
  create. A renewal is a second object, named by the token, so that a holder that was suspended
  cannot overwrite the lease of its successor.
- A holder counts a renewal only if the storage confirmed it before the lease would have expired.
  Other nodes read the clock *first*, then the record: after the expiry plus `SKEW_S` they see every
  renewal that the holder counts.
- A waiter whose own clock has measured the length of the lease while record and renewal stayed the
  same sees every counted renewal too, whatever the holder's wall clock says (`LeaseWatch`).
- To take over an expired record, a node exclusively creates the record's *successor*: an object
  named by the expired token that contains the node's own record. So a record has at most one
  successor. Then the node replaces the object at the key by its own record. If it dies in between,
  others follow the record at the key to its successor, and take over from the successor when that
  has expired.
- Only a node that surely holds the lease replaces or deletes the object at the key, and only while
  the lease is valid for `SKEW_S` more, the time that a request may be on its way.

A lease says who should do a task; it does not lock the result: the task ends in an atomic publish.
Thread-safe.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Annotated, Self

from msgspec import Meta, Struct, to_builtins

from bootseer.base.documents import DocumentFormat
from bootseer.base.short_digest import short_digest
from bootseer.errors import (
    BootseerError,
    BusyError,
    CorruptError,
    InvalidInputError,
    NotFoundError,
)
from bootseer.store.backend import Backend
from bootseer.store.objects.publish import publish_object
from bootseer.store.paths import TEMPORARY

logger = logging.getLogger(__name__)

# Largest difference of two nodes' clocks plus the time that a request may be on its way. NTP keeps
# clocks within tens of milliseconds; 2 s also covers a node that has just booted.
SKEW_S = 2.0
# Well below the age at which the sweep removes renewals and successors (a day).
TTL_MAX_S = 12 * 3600
_NS = 1_000_000_000
_AGREE_TIMES = 9
# Longest chain of successors that is followed. Each node that died before it replaced the object at
# the key adds one.
_SUCCESSORS_MAX = 64
_Time = Annotated[int, Meta(ge=-(2**63 - 1), le=2**63 - 1)]
_JOIN_S = 5.0


class LeaseRecord(Struct, frozen=True):
    """Content of a lease's object."""

    owner: str
    token: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    expires_at_ns: _Time
    ttl_ns: _Time

    def encode(self) -> bytes:
        """Return the record as canonical JSON."""
        return json.dumps(to_builtins(self), sort_keys=True).encode()


_FORM: DocumentFormat[LeaseRecord] = DocumentFormat(type=LeaseRecord, size_max=16 << 10)


def decode(data: bytes) -> LeaseRecord | None:
    """Return the record in `data`, or None if it is not a record. Pure."""
    try:
        return _FORM.decode(data, "a lease")
    except CorruptError:
        return None


class Lease:
    """Lease that this process holds until it is released, lost or expired."""

    def __init__(self, backend: Backend, key: str, record: LeaseRecord, valid_until: float) -> None:
        self.key = key
        self.owner = record.owner
        self._backend = backend
        self._record = record
        # By the monotonic clock, from before the record was written, so that a change of the wall
        # clock cannot prolong the lease.
        self._valid_until = valid_until
        self._released = False
        self._has_renewal = False
        self._lock = threading.Lock()

    @property
    def expires_at_ns(self) -> int:
        """Time at which other nodes may take the lease, in nanoseconds since 1970."""
        return self._record.expires_at_ns

    @property
    def remaining_s(self) -> float:
        """Seconds for which the lease is surely held; 0 if it is lost."""
        return 0.0 if self._released else max(0.0, self._valid_until - time.monotonic())

    @property
    def still_held(self) -> bool:
        """Whether the lease is surely held now, by the clock and without a request."""
        return self.remaining_s > 0

    def renew(self) -> None:
        """Extend the lease to `ttl_s` from now.

        Raises: BusyError if it is lost (expired, released or taken over). The holder must then stop
        the protected work.
        """
        with self._lock:
            if not self.still_held:
                raise BusyError(f"the lease {self._backend.url}/{self.key} expired or was released")
            started = time.monotonic()
            record = LeaseRecord(
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
        """Release the lease, or leave it to expire if its end is near. Idempotent.

        A lease that another node has taken over is not touched.
        """
        with self._lock:
            if self._released:
                return
            # A bucket charges for the extra request, so there the key is deleted without a check. A
            # person who breaks a lease by deleting its key is warned of that in the documentation.
            is_ours = not self._backend.traits.one_step_rename or self._is_at_key()
            if is_ours and self.remaining_s > _spare_s(self._record):
                self._backend.delete_files([self.key])
            self._released = True
            if self._has_renewal:
                self._backend.delete_files([_renewal(self._record.token)])

    def _is_at_key(self) -> bool:
        """Return whether the object at the key is this lease; a person may have deleted it."""
        current = _read(self._backend, self.key)
        return current is not None and current.token == self._record.token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LeaseWatch:
    """Observations of another node's lease by one waiter, timed by its own clock. One thread."""

    def __init__(self) -> None:
        self.owner = ""
        """Owner of the lease when it was last read."""
        # By token: the last expiry, and the time at which it was first seen. There are two records
        # to observe if a node died before it replaced the object at the key.
        self._seen: dict[str, tuple[int, float]] = {}

    def has_expired(self, record: LeaseRecord, expires_at_ns: int, asked_at: float) -> bool:
        """Note a record that was read after `asked_at` (monotonic); return whether it has expired.

        It has expired if it stayed the same for so long that its holder counts it as lost.
        """
        self.owner = record.owner
        seen_ns, since = self._seen.get(record.token, (None, 0.0))
        if seen_ns != expires_at_ns:
            self._seen[record.token] = expires_at_ns, time.monotonic()
            return False
        # Another program may have written any length.
        ttl_s = min(max(record.ttl_ns / _NS, 0.0), TTL_MAX_S)
        return asked_at > since + ttl_s + SKEW_S


def acquire(
    backend: Backend, key: str, *, ttl_s: float, owner: str, watch: LeaseWatch | None = None
) -> Lease | None:
    """Take the lease at `key`, or return None while another node holds it; see `Store.lease`."""
    if not 0 < ttl_s <= TTL_MAX_S:
        raise InvalidInputError(f"a lease of {ttl_s} s is not between 0 s and {TTL_MAX_S} s")
    # The second round is for a lease that ended during the first.
    for _ in range(2):
        started = time.monotonic()
        record = _new_record(owner, ttl_s)
        if publish_object(backend, key, record.encode(), replace=False):
            return Lease(backend, key, record, started + ttl_s)
        now_ns = time.time_ns()  # before the reads; see the second rule of the module
        current = _read(backend, key)
        for _ in range(_SUCCESSORS_MAX):
            if current is None:
                break
            renewed = _read(backend, _renewal(current.token))
            expires_at_ns = max(current.expires_at_ns, renewed.expires_at_ns if renewed else 0)
            if now_ns < expires_at_ns + int(SKEW_S * _NS) and not (
                watch is not None and watch.has_expired(current, expires_at_ns, started)
            ):
                return None
            if _take_over(backend, key, current.token, record, started):
                logger.info("took over the lease %s/%s from %s", backend.url, key, current.owner)
                return Lease(backend, key, record, started + ttl_s)
            current = _read(backend, _successor(current.token))
    return None


def agree_on_token(
    backend: Backend, key: str, *, ttl_s: float, owner: str, is_used: Callable[[str], bool]
) -> str:
    """Return a token that is the same for all callers within `ttl_s` of the first one.

    The token is that of a lease which no one renews or releases. `is_used` says whether the caller
    has used a token before, and needs another.

    Raises: BusyError if other nodes replace the lease again and again.
    """
    for _ in range(_AGREE_TIMES):
        now_ns = time.time_ns()
        current = _read(backend, key)
        for _ in range(_SUCCESSORS_MAX):
            if current is None:
                acquire(backend, key, ttl_s=ttl_s, owner=owner)
                break
            is_old = current.expires_at_ns + int(SKEW_S * _NS) < now_ns
            if not is_old and not is_used(current.token):
                return current.token
            started = time.monotonic()
            if _take_over(backend, key, current.token, _new_record(owner, ttl_s), started):
                break
            current = _read(backend, _successor(current.token))
    raise BusyError(f"{backend.url}/{key} was replaced {_AGREE_TIMES} times while it was read")


def _new_record(owner: str, ttl_s: float) -> LeaseRecord:
    ttl_ns = int(ttl_s * _NS)
    return LeaseRecord(owner, os.urandom(16).hex(), time.time_ns() + ttl_ns, ttl_ns)


def _spare_s(record: LeaseRecord) -> float:
    """Return how long before the end of a lease its holder stops writing to the key."""
    return min(SKEW_S, record.ttl_ns / _NS / 4)


def _take_over(backend: Backend, key: str, token: str, record: LeaseRecord, started: float) -> bool:
    """Take over the expired lease `token`; return False if another node did.

    `started` is the time at which `record` was made (monotonic).
    """
    if not publish_object(backend, _successor(token), record.encode(), replace=False):
        return False
    if started + record.ttl_ns / _NS - time.monotonic() <= _spare_s(record):
        # The new lease is nearly over already. Other nodes find the successor, which expires.
        return False
    publish_object(backend, key, record.encode(), replace=True)
    return True


def _read(backend: Backend, path: str) -> LeaseRecord | None:
    """Return the record at `path`, or None if there is no object.

    An object that is not a record (a stray file) counts as a lease of one hour from its last
    change, so that it blocks no node for ever.
    """
    try:
        data = backend.read(path, 0, _FORM.size_max)
        record = decode(data)
        if record is None:
            made_ns = backend.stat(path).modified_ns
            token = short_digest(data)[:32]
            record = LeaseRecord("unknown", token, made_ns + 3600 * _NS, 3600 * _NS)
    except NotFoundError:
        return None
    return record


def _successor(token: str) -> str:
    return f"{TEMPORARY}/after-{token}"


def _renewal(token: str) -> str:
    return f"{TEMPORARY}/renewed-{token}"


class LeaseRenewal:
    """Context manager that renews a lease three times per `ttl_s` in a thread, then releases it.

    A lost lease is logged and is not an error: the result of the task is published atomically, so
    that two holders cost time only.
    """

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
                    logger.warning("%s; another node may do the same work", error)
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
