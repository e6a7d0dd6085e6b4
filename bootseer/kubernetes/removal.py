"""The end of Bootseer's pods on a node: replaced, or removed with all the rest.

What is removed first waits for pods that still end, such as those of a Job that was deleted just
before: without the driver and the snapshotter a kubelet cannot take their volumes off, nor
containerd their containers, and they would never go.
"""

import logging
import time
from collections.abc import Callable

from bootseer.errors import BootseerError, PermissionDeniedError
from bootseer.kubernetes.api import ACCOUNT, Api

_log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""A removal of everything keeps an API server busy: every node asks it at once."""
_LOOK_S = 0.5


def is_removed(daemonset: str) -> bool:
    """Whether the API server knows no DaemonSet NAMESPACE/NAME any more. One that does not answer,
    and one that refuses to, is asked again for `PATIENCE_S`; only a refusal that lasts is taken
    for a removal. Never raises."""
    namespace, _, name = daemonset.partition("/")
    deadlines_s: dict[bool, float] = {}
    while True:
        try:
            found = Api(ACCOUNT).get(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}")
        except BootseerError as error:
            is_refusal = isinstance(error, PermissionDeniedError)
            now_s = time.monotonic()
            # A refusal after others is no lasting one yet.
            if now_s > deadlines_s.setdefault(is_refusal, now_s + PATIENCE_S):
                if is_refusal:
                    # What gave this pod the right to ask is gone with all the rest. A server that
                    # starts, or whose authorisation fails, refuses only for a while.
                    return True
                _log.warning("nobody says whether %s is there: %s", daemonset, error)
                return False
            time.sleep(_LOOK_S)
        else:
            return found is None or "deletionTimestamp" in found["metadata"]


def await_removal(
    daemonset: str | None, what: str, is_used: Callable[[], bool], patience_s: float
) -> bool:
    """Whether Bootseer is removed, and not only this pod replaced by one of `daemonset`; first
    waits until nothing is used, until `patience_s` after the call. Pods that have not ended by then
    are left to their users. Never raises."""
    # Time in which the API server was asked counts: a kubelet ends this pod after its grace period.
    deadline_s = time.monotonic() + patience_s
    if daemonset is not None and not is_removed(daemonset):
        _log.warning("%s may be there: nothing is removed", daemonset)
        return False
    try:
        while patience_s and is_used():
            if time.monotonic() > deadline_s:
                _log.warning(
                    "%s are still there after %g s; they end with errors", what, patience_s
                )
                break
            time.sleep(_LOOK_S)
    except BootseerError as error:
        _log.warning("nobody says whether %s are there: %s", what, error)
    return True
