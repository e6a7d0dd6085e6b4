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

_LOOK_S = 0.5


def is_removed(daemonset: str) -> bool:
    """Whether the API server knows no DaemonSet NAMESPACE/NAME any more. Never raises."""
    namespace, _, name = daemonset.partition("/")
    try:
        found = Api(ACCOUNT).get(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}")
    except PermissionDeniedError:
        # What gave this pod the right to ask is gone with all the rest.
        return True
    except BootseerError as error:
        _log.warning("nobody says whether %s is there: %s", daemonset, error)
        return False
    return found is None or "deletionTimestamp" in found["metadata"]


def wait_unused(what: str, is_used: Callable[[], bool], patience_s: float) -> None:
    """Until nothing is used, or so long; pods that have not ended by then are left to their
    users. Never raises."""
    deadline_s = time.monotonic() + patience_s
    try:
        while is_used():
            if time.monotonic() > deadline_s:
                _log.warning(
                    "%s are still there after %g s; they end with errors", what, patience_s
                )
                return
            time.sleep(_LOOK_S)
    except BootseerError as error:
        _log.warning("nobody says whether %s are there: %s", what, error)
