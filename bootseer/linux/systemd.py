"""Notification of systemd about a service's state (sd_notify(3)). Any thread."""

import logging
import os
import socket

_log = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send a state such as "READY=1", if NOTIFY_SOCKET names a socket. Never raises."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if not name:
        return
    address = f"\0{name[1:]}" if name.startswith("@") else name
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.connect(address)
            sender.sendall(state.encode())
    except OSError as error:
        _log.warning("cannot tell %s that we are %s: %s", name, state, error)
