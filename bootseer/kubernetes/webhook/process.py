"""The webhook's process: a server, and a look at its certificate every few seconds. Main thread."""

import functools
import signal
import threading
from collections.abc import Callable

from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.certificate import Certificate
from bootseer.kubernetes.webhook.cluster import ClusterView, KeySecrets
from bootseer.kubernetes.webhook.review import answer
from bootseer.kubernetes.webhook.server import WebhookServer

_LOOK_S = 10.0
_LEAVE_S = 3.0
"""API servers go on asking a replica for so long after it was told to end."""
_STOP_SIGNALS = frozenset((signal.SIGTERM, signal.SIGINT))


def serve(
    api: Api,
    *,
    port: int,
    namespace: str,
    name: str,
    store_url: str,
    on_ready: Callable[[int], None],
) -> None:
    """Answer reviews until SIGTERM or SIGINT. `on_ready` is called with the port when API servers
    believe this replica.

    Raises: OSError, where the port cannot be had.
    """
    # In every thread that is to be: only `sigtimedwait` gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    view, secrets = ClusterView(api, store_url), KeySecrets(api)
    answers = functools.partial(answer, cluster=view, keep_secret=secrets.keep)
    server = WebhookServer(port, answers, lambda: keys.is_ready)
    keys = Certificate(api, namespace=namespace, name=name, use=server.use)
    keys.serve_alone()
    serving = threading.Thread(target=server.serve_forever, name="serving", daemon=True)
    serving.start()
    is_said = False
    while True:
        keys.look_quietly()
        if keys.is_ready and not is_said:
            on_ready(server.server_port)
            is_said = True
        if signal.sigtimedwait(_STOP_SIGNALS, _LOOK_S if keys.is_ready else 1.0):
            break
    keys.is_ready = False
    signal.sigtimedwait(_STOP_SIGNALS, _LEAVE_S)
    server.shutdown()
    server.server_close()
