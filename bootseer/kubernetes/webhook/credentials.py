"""Keeps the pair that the webhook serves with, together with its other replicas and the API server.

The pair lies in a Secret, which whoever renews it replaces only as it was read. The API server is
told of the pair's authority before a replica serves with it: at the next look, so that every API
server has noticed. For one thread.
"""

import base64
import binascii
import datetime
import logging
from collections.abc import Callable
from typing import Any

from bootseer.errors import BootseerError, NotFoundError
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.certificates import Pair, is_due, make_pair, problem_of
from bootseer.kubernetes.webhook.plan import ANNOTATIONS

_log = logging.getLogger(__name__)

WEBHOOK = "pods.bootseer.io"
"""The configuration's entry for pods that start without the webhook where it is down. The other
entry is for pods that are labelled to wait: conditions are for the first only."""
_FIELDS = {"authorities": "ca.crt", "certificate": "tls.crt", "key": "tls.key"}
_CONDITION = {
    "name": "annotated",
    "expression": "has(object.metadata.annotations) && "
    f"[{', '.join(map(repr, ANNOTATIONS))}].exists(name, name in object.metadata.annotations)",
}
"""Pods without our annotations are not even sent, where the API server knows conditions (1.28)."""


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Credentials:
    """Of one replica."""

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        name: str,
        use: Callable[[Pair], None],
        clock: Callable[[], datetime.datetime] = _now,
    ) -> None:
        """`name`: of Service, Secret and configuration. `use` is given each pair to serve with."""
        self._api = api
        self._secret = f"/api/v1/namespaces/{namespace}/secrets/{name}"
        self._configuration = (
            "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + name
        )
        self._names = (f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.cluster.local")
        self._use = use
        self._clock = clock
        self._used: Pair | None = None
        self._has_asked_for_conditions = False
        self.is_ready = False
        """Whether API servers believe what this replica serves with."""

    def serve_alone(self) -> None:
        """Serve with a pair that nobody else knows: for the kubelet's probes, until there is
        another."""
        self._use(make_pair(self._names, self._clock()))

    def look(self) -> None:
        """Renew what is to be renewed, and serve with what the Secret has. Raises: BootseerError;
        what was served stays."""
        pair = self._stored_pair()
        was_told = self._tell(pair)
        if pair != self._used and (was_told or self._used is None):
            self._use(pair)
            self._used = pair
            _log.info("serving with the certificate in %s", self._secret)
        # Before the first of these it is told, and after a renewal the earlier one is believed.
        self.is_ready = self._used is not None

    def _stored_pair(self) -> Pair:
        secret = self._api.get(self._secret)
        if secret is None:
            raise NotFoundError(
                f"there is no {self._secret}; make an empty Secret of this name, or install the "
                "chart again"
            )
        now = self._clock()
        found = _pair_of(secret)
        problem = problem_of(found, self._names, now) if found else "it has none yet"
        if found and not problem and not is_due(found, now):
            return found
        _log.info("making a certificate for %s: %s", self._secret, problem or "it ends soon")
        pair = make_pair(self._names, now, found if found and not problem else None)
        secret["data"] = {**(secret.get("data") or {}), **_data_of(pair)}
        # Another replica may have been first: what it has made is found at the next look.
        self._api.replace(self._secret, secret)
        return pair

    def _tell(self, pair: Pair) -> bool:
        """Tell the API server whom to believe; whether it knew that already."""
        configuration = self._api.get(self._configuration) or {}
        hooks = configuration.get("webhooks")
        places = {
            hook.get("name"): (place, hook)
            for place, hook in enumerate(hooks if isinstance(hooks, list) else ())
            if isinstance(hook, dict)
        }
        if WEBHOOK not in places:
            raise NotFoundError(
                f"there is no webhook {WEBHOOK} at {self._configuration}; install the chart again"
            )
        bundle = base64.b64encode(pair.authorities).decode()
        untold = [
            place
            for place, hook in places.values()
            if (hook.get("clientConfig") or {}).get("caBundle") != bundle
        ]
        place, hook = places[WEBHOOK]
        if untold:
            told = {f"/webhooks/{one}/clientConfig/caBundle": bundle for one in untold}
            self._set(configuration, told)
        elif "matchConditions" not in hook and not self._has_asked_for_conditions:
            # Those that do not know the member leave it out. Asked once: nothing depends on it.
            self._has_asked_for_conditions = True
            self._set(configuration, {f"/webhooks/{place}/matchConditions": [_CONDITION]})
        return not untold

    def _set(self, configuration: dict[str, Any], values: dict[str, Any]) -> None:
        """Raises: BusyError, where somebody has changed the configuration since."""
        version = configuration["metadata"]["resourceVersion"]
        patch = [{"op": "test", "path": "/metadata/resourceVersion", "value": version}]
        patch += [{"op": "add", "path": path, "value": value} for path, value in values.items()]
        self._api.patch(self._configuration, patch)


def look_quietly(credentials: Credentials) -> None:
    """Look, and only log what fails: what was served stays."""
    try:
        credentials.look()
    except BootseerError as error:
        _log.warning("%s", error)


def _pair_of(secret: dict[str, Any]) -> Pair | None:
    data = secret.get("data")
    if not isinstance(data, dict):
        return None
    try:
        found = {key: base64.b64decode(data[name]) for key, name in _FIELDS.items()}
    except (KeyError, TypeError, binascii.Error):
        return None
    return Pair(**found)


def _data_of(pair: Pair) -> dict[str, str]:
    return {name: base64.b64encode(getattr(pair, key)).decode() for key, name in _FIELDS.items()}
