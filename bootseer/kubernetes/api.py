"""Client of the cluster's API server, with the service account of this pod. Thread-safe.

Every request has a deadline for the head of its answer and one for the body, and is tried once:
callers ask again later. The token is read for each request, since the kubelet replaces it; it
appears in no log and no error.
"""

import json
import os
from pathlib import Path
from typing import Any

from bootseer.base.documents import DocumentFormat
from bootseer.errors import (
    BootseerError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from bootseer.http.transport import HttpServer, Transport

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Directory of the service account's token, certificate and namespace in a pod."""
_OBJECT: DocumentFormat[dict[str, Any]] = DocumentFormat(
    type=dict[str, Any], what="an object", size_max=4 * 1024 * 1024, is_foreign=True
)


class Api:
    """Client of the API server that the pod's environment variables name."""

    def __init__(self, account: Path, timeout_s: float = 2.0) -> None:
        """Make a client with the service account in a directory, and a deadline for each request.

        Raises: InvalidInputError if this process does not run in a pod with a service account.
        """
        self._url = _server(os.environ.get("KUBERNETES_SERVICE_HOST", ""))
        self._account = account
        self._timeout_s = timeout_s
        authority = account / "ca.crt"
        try:
            authority.read_bytes()
            self.namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise InvalidInputError(
                f"cannot read {account}: {error.strerror}; run this in a pod with a service account"
            ) from error
        self._transport = Transport(
            HttpServer(
                "the API server",
                self._url,
                ca_files=(authority,),
                trusts_ca_files_alone=True,
                proxy="",
            ),
            timeout_s,
        )

    def get(self, path: str) -> dict[str, Any] | None:
        """Return the object at `path`, or None if there is none.

        Raises: UnavailableError, PermissionDeniedError.
        """
        try:
            return self._ask("GET", path)
        except NotFoundError:
            return None

    def replace(self, path: str, document: dict[str, Any]) -> None:
        """Replace the object at `path` unless its resourceVersion has changed.

        Raises: BusyError if it has; NotFoundError, UnavailableError, PermissionDeniedError.
        """
        self._ask("PUT", path, document, "application/json")

    def create(self, path: str, document: dict[str, Any]) -> None:
        """Create an object in the collection at `path`.

        Raises: BusyError if the name is taken; NotFoundError, UnavailableError,
            PermissionDeniedError.
        """
        self._ask("POST", path, document, "application/json")

    def patch(self, path: str, operations: list[dict[str, Any]]) -> None:
        """Change an object by a JSON patch (RFC 6902).

        Raises: BusyError if a test in the patch fails; NotFoundError, UnavailableError,
            PermissionDeniedError.
        """
        self._ask("PATCH", path, operations, "application/json-patch+json")

    def _ask(
        self, method: str, path: str, document: Any = None, content_type: str = ""
    ) -> dict[str, Any]:
        where = f"{self._url}{path}"
        try:
            token = (self._account / "token").read_text().strip()
        except OSError as error:
            raise UnavailableError(f"cannot {method} {where}: {error.strerror}") from None
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        body = None
        if content_type:
            headers["Content-Type"] = content_type
            body = json.dumps(document).encode()
        try:
            with self._transport.request(method, where, headers, body) as response:
                data = response.read_all(_OBJECT.size_max, self._timeout_s)
        except BootseerError as error:
            raise UnavailableError(f"cannot {method} {where}: {error}") from None
        status = response.status
        if status == 404:
            raise NotFoundError(f"there is no {where}")
        if status in (401, 403):
            raise PermissionDeniedError(
                f"the API server refuses to {method} {where} ({status}); give the service account "
                "this right"
            )
        # A failed test of a patch is 422; Kubernetes 1.20 answers 500.
        if status in (409, 422) or (method == "PATCH" and status == 500):
            raise BusyError(f"{where} was changed by another program meanwhile")
        if not 200 <= status < 300:
            raise UnavailableError(f"cannot {method} {where}: the API server answers {status}")
        return _OBJECT.decode(data, where)


def _server(host: str) -> str:
    if not host:
        raise InvalidInputError("KUBERNETES_SERVICE_HOST is not set; run this in a pod")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"
