"""The servers of one repository: which is asked when, and when all of them are asked again.

Alone owns the order (as configured, those that failed lately last) and the rounds. Thread-safe.
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
from bootseer.registry.credentials import Credential
from bootseer.registry.hosts import Host
from bootseer.registry.session import Session
from bootseer.transfer.policy import REQUEST, Attempts, Policy

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
        policy: Policy = REQUEST,
    ) -> None:
        """`policy`: how often all servers are asked in turn."""
        own = next((host for host in hosts if host.is_registry), hosts[-1])
        self.name = f"{own.name}/{repository}"
        """For messages."""
        self._deadline_s = deadline_s
        self.policy = policy
        self._sessions = [Session(host, repository, find_login, deadline_s) for host in hosts]

    def ask(
        self,
        capability: str,
        function: Callable[[Session], _Result],
        *,
        more_s: float = 0.0,
        policy: Policy | None = None,
        is_second: bool = False,
    ) -> _Result:
        """What `function` returns for the first server with `capability` for which it succeeds.

        What the registry itself says (not found, no access) is final; what a mirror says is so only
        when no other server knows better. No attempt begins later than the deadline and `more_s`.
        `is_second`: the first server is late with it, and asked last.

        Raises: what `function` raised; UnsupportedError where
        no server has the capability.
        """
        able = [s for s in self._sessions if capability in s.host.capabilities]
        if not able:
            raise UnsupportedError(f"no server of {self.name} is configured for {capability}")
        if is_second:
            able = [*able[1:], able[0]]
        attempts = Attempts(policy or self.policy, self._deadline_s + more_s)
        while True:
            error, is_final = self._ask_each(able, function)
            if not isinstance(error, BootseerError):
                return error
            pause_s = None if is_final else attempts.pause_s(error)
            if pause_s is None:
                raise error
            _log.info("attempt %d: %s", attempts.failures_count, error)
            time.sleep(pause_s)

    def _ask_each(
        self, able: Sequence[Session], function: Callable[[Session], _Result]
    ) -> tuple[_Result | BootseerError, bool]:
        """A result; or an error, and whether asking again would not change it."""
        transient: list[BootseerError] = []
        final: BootseerError | None = None
        for session in sorted(able, key=lambda s: s.is_suspect):
            try:
                return function(session), True
            except (UnavailableError, DeadlineError, CorruptError) as error:
                session.note_failure()
                transient.append(error)
            except BootseerError as error:
                if session.host.is_registry or session is able[-1]:
                    return error, True
                final = error
        if transient:
            # The one that asks for the shortest wait.
            return min(reversed(transient), key=lambda e: getattr(e, "retry_after_s", 0.0)), False
        assert final is not None
        return final, True

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        for session in self._sessions:
            session.close()
