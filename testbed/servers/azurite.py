"""Azurite, Microsoft's emulator of Azure's storage, in a process of its own on loopback.

`make test` does not install it (`npm install azurite` takes 190 MB): its tests are skipped where
`azurite-blob` is not in the PATH.
"""

import base64
import contextlib
import hashlib
import hmac
import subprocess
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate

from testbed.hdfs.cluster import unassigned_ports
from testbed.needs import require
from testbed.waiting import is_listening, wait_started

_START_DEADLINE_S = 60
_VERSION = "2021-08-06"
# Both are from Azurite's manual and the same everywhere.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextlib.contextmanager
def azurite(container: str) -> Iterator[dict[str, str]]:
    """Yield the environment in which `az://CONTAINER/...` is a new container of an emulator.

    Raises: MissingError.
    """
    require(modules=["obstore"], programs=["azurite-blob"])
    (port,) = unassigned_ports(1)
    words = ["--blobPort", str(port), "--inMemoryPersistence", "--disableTelemetry"]
    process = subprocess.Popen(
        ["azurite-blob", *words, "--skipApiVersionCheck"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_started(
            process,
            lambda: is_listening(port),
            lambda: "Azurite ended",
            timeout_s=_START_DEADLINE_S,
        )
        url = f"http://127.0.0.1:{port}"
        _make_container(url, container)
        yield {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURITE_BLOB_STORAGE_URL": url,
        }
    finally:
        process.kill()
        process.wait(60)


def _make_container(url: str, name: str) -> None:
    """Make a container by a request signed by the account's shared key (Azure's reference)."""
    lines = f"x-ms-date:{(date := formatdate(usegmt=True))}\nx-ms-version:{_VERSION}\n"
    signed = "PUT" + "\n" * 12 + lines + f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.new(base64.b64decode(_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": _VERSION,
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Length": "0",
    }
    request = urllib.request.Request(
        f"{url}/{_ACCOUNT}/{name}?restype=container", method="PUT", headers=headers
    )
    urllib.request.urlopen(request, timeout=_START_DEADLINE_S).close()
