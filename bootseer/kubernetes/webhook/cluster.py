"""What the cluster has of Bootseer: asked of the API server, and remembered for moments.

Any thread. A pod's creation waits for this: each object is asked for by one thread at a time, with
the API client's deadline. Where the API server does not answer, what it last said holds.
"""

import logging
import threading
import time
from typing import Any

from bootseer.errors import BootseerError
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.plan import DRIVER, RUNTIME_CLASS, Cluster

_log = logging.getLogger(__name__)

ASK_S = 1.0
"""The API client's deadline: the API server that has asked waits three seconds, and two
objects are asked for."""
_AGE_MAX_S = 2.0
"""A pod that names a runtime class which is gone is refused: short, and one request for a burst of
pods."""


class Known:
    """An object of the cluster, as it was lately."""

    def __init__(self, api: Api, path: str) -> None:
        self._api = api
        self._path = path
        self._lock = threading.Lock()
        self._asked_s = float("-inf")
        self._found: dict[str, Any] | None = None

    def get(self) -> dict[str, Any] | None:
        """The object; None where there is none, or where nobody ever said so."""
        with self._lock:
            if time.monotonic() - self._asked_s > _AGE_MAX_S:
                try:
                    self._found = self._api.get(self._path)
                except BootseerError as error:
                    _log.warning("%s; going on with what was known", error)
                self._asked_s = time.monotonic()
            return self._found


class ClusterView:
    """What the webhook's plan has to know."""

    def __init__(self, api: Api, store_url: str) -> None:
        self._store_url = store_url
        self._driver = Known(api, f"/apis/storage.k8s.io/v1/csidrivers/{DRIVER}")
        self._class = Known(api, f"/apis/node.k8s.io/v1/runtimeclasses/{RUNTIME_CLASS}")

    def __call__(self) -> Cluster:
        runtime_class = self._class.get() or {}
        handler = runtime_class.get("handler")
        return Cluster(
            has_driver=self._driver.get() is not None,
            handler=handler if isinstance(handler, str) else "",
            store_url=self._store_url,
        )
