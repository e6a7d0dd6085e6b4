"""Keeps a lease while a long set-up runs: a thread that renews it.

A lost lease is no error here: the snapshot is published by an atomic create, so that two writers
cost time, never correctness.
"""

import logging
import threading
from typing import Self

from bootseer.errors import BootseerError, BusyError
from bootseer.store.objects.lease import Lease

logger = logging.getLogger(__name__)

_JOIN_S = 5.0


class LeaseRenewal:
    """`with LeaseRenewal(lease, ttl_s): ...` renews three times per `ttl_s`, then releases."""

    def __init__(self, lease: Lease, ttl_s: float) -> None:
        self._lease = lease
        self._pause_s = ttl_s / 3
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)

    def _renew(self) -> None:
        while not self._stop.wait(self._pause_s):
            try:
                self._lease.renew()
            except BusyError as error:
                logger.warning("%s; another node may run the same set-up", error)
                return
            except (BootseerError, OSError) as error:
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
