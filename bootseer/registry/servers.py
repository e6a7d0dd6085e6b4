"""The servers of one repository: which is asked when, and when all of them are asked again.

Alone owns the order (as configured, those that failed lately last) and the rounds, with growing
waits between. Thread-safe.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from bootseer.errors import (
    BootseerError,
    CorruptError,
    DeadlineError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.registry.hosts import Host
from bootseer.registry.http.retry import ATTEMPTS_MAX, TransientError, backoff_s
from bootseer.registry.login.credentials import Credential
from bootseer.registry.session import Session

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class Servers:
    """Sessions with all servers of a repository."""

    def __init__(
        self,
        repository: str,
        hosts: Sequence[Host],
        find_login: Callable[[str, str], Credential | None],
        deadline_s: float,
    ) -> None:
        own = next((host for host in hosts if host.is_registry), hosts[-1])
        self.name = f"{own.name}/{repository}"
        """For messages."""
        self._deadline_s = deadline_s
        self._sessions = [Session(host, repository, find_login, deadline_s) for host in hosts]

    def ask(
        self, capability: str, function: Callable[[Session], _Result], *, more_s: float = 0.0
    ) -> _Result:
        """What `function` returns for the first server with `capability` for which it succeeds.

        What the registry itself says (not found, no access) is final; what a mirror says is so
        only when nobody else knows better. No attempt begins later than the deadline and `more_s`.

        Raises: what `function` raised; UnsupportedError where
        no server has the capability.
        """
        started = time.monotonic()
        able = [s for s in self._sessions if capability in s.host.capabilities]
        if not able:
            raise UnsupportedError(f"no server of {self.name} is configured for {capability}")
        failures_count = 0
        while True:
            failures_count += 1
            error, wait_s = self._ask_each(able, function)
            if not isinstance(error, BootseerError):
                return error
            if wait_s is None:
                raise error
            _log.info("attempt %d: %s", failures_count, error)
            wait_s = max(wait_s, backoff_s(failures_count))
            left_s = started + self._deadline_s + more_s - time.monotonic()
            # A bit may flip on its way; what is wrong twice is stored like that.
            is_wrong = isinstance(error, CorruptError) and failures_count > 1
            if failures_count == ATTEMPTS_MAX or wait_s > left_s or is_wrong:
                raise error
            time.sleep(wait_s)

    def _ask_each(
        self, able: Sequence[Session], function: Callable[[Session], _Result]
    ) -> tuple[_Result | BootseerError, float | None]:
        """A result; or an error, and after how long to ask again (None: never)."""
        transient: BootseerError | None = None
        final: BootseerError | None = None
        waits_s: list[float] = []
        for session in sorted(able, key=lambda s: s.is_suspect):
            try:
                return function(session), None
            except (UnavailableError, DeadlineError, CorruptError) as error:
                session.note_failure()
                transient = error
                waits_s.append(error.retry_after_s if isinstance(error, TransientError) else 0.0)
            except BootseerError as error:
                if session.host.is_registry or session is able[-1]:
                    return error, None
                final = error
        if transient is not None:
            return transient, min(waits_s)
        assert final is not None
        return final, None

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        for session in self._sessions:
            session.close()
