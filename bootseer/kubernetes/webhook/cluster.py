"""What the cluster has of Bootseer: asked of the API server, and remembered for moments; and the
Secrets with keys that are made for jobs.

Any thread. A pod's creation waits for this: each object is asked for by one thread at a time, with
the API client's deadline. Where the API server does not answer, what it last said holds.
"""

import logging
import re
import threading
import time
from typing import Any

from bootseer.errors import BootseerError, BusyError
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.plan import DRIVER, RUNTIME_CLASS, Cluster, KeySecret

_log = logging.getLogger(__name__)

ASK_S = 0.9
"""The API client's deadline: the API server that has asked waits three seconds, two objects are
asked for, and one may be made."""
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


_KEPT_COUNT_MAX = 4096
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_MADE_S, _MADE_COUNT_MAX = 60.0, 120
"""So many Secrets are made in such a time: anybody who reaches the port may ask for some."""


class KeySecrets:
    """The Secrets that this replica has made, or knows of."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._known: dict[tuple[str, KeySecret], None] = {}
        self._made_s: list[float] = []

    def keep(self, namespace: str, secret: KeySecret) -> str:
        """Have the Secret in `namespace`; why that cannot be, empty where it is there."""
        if not _NAMESPACE.fullmatch(namespace):
            return "the pod has no namespace"
        now_s = time.monotonic()
        with self._lock:
            if (namespace, secret) in self._known:
                return ""
            self._made_s = [one for one in self._made_s if one > now_s - _MADE_S]
            if len(self._made_s) >= _MADE_COUNT_MAX:
                return "too many jobs ask for a key at once"
            self._made_s.append(now_s)
        try:
            self._api.create(f"/api/v1/namespaces/{namespace}/secrets", secret.document())
        except BusyError:
            pass  # Another replica, or an earlier pod of the job, has it made.
        except BootseerError as error:
            _log.warning("%s", error)
            return f"the Secret {secret.name} cannot be made"
        with self._lock:
            self._known[namespace, secret] = None
            while len(self._known) > _KEPT_COUNT_MAX:
                del self._known[next(iter(self._known))]
        return ""
