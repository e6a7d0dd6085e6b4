"""Whether anybody takes connections where a NameNode should be, and if not, why: hdfs-native goes
on trying for a minute, and then does not say. Any thread.
"""

import logging
import socket
import time
from collections.abc import Sequence

from bootseer.errors import UnavailableError
from bootseer.transfer.policy import UNTIL_DEADLINE, Attempts

_log = logging.getLogger(__name__)

_REACH_S = 10.0
"""For a NameNode that is being restarted, or a resolver; what lasts longer is a wrong address."""
_CONNECT_S = 3.0


def await_reachable(addresses: Sequence[tuple[str, int]], deadline_s: float, hint: str) -> None:
    """Return when one of the addresses takes a connection. Says what is waited for.

    Raises: UnavailableError with the reason of each; `hint`: what else the user may look at.
    """
    limit_s = min(deadline_s, _REACH_S)
    attempts = Attempts(UNTIL_DEADLINE, limit_s)
    has_warned = False
    while True:
        failures: list[tuple[str, OSError]] = []
        for host, port in addresses:
            left_s = max(0.1, attempts.left_s)
            try:
                socket.create_connection((host, port), min(_CONNECT_S, left_s)).close()
                return
            except OSError as failure:
                failures.append((f"{host}:{port}", failure))
        reasons = ", ".join(f"{where}: {_reason(error)}" for where, error in failures)
        is_unknown = all(isinstance(e, socket.gaierror) and _is_final(e) for _, e in failures)
        error = UnavailableError(f"no NameNode can be reached ({reasons}); {hint}")
        pause_s = None if is_unknown else attempts.pause_s(error)
        if pause_s is None:
            raise error
        if not has_warned:
            has_warned = True
            _log.warning("waiting up to %g s for a NameNode (%s)", limit_s, reasons)
        time.sleep(pause_s)


def _is_final(error: socket.gaierror) -> bool:
    return error.errno != socket.EAI_AGAIN


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer to a connection"
    return error.strerror or str(error)
