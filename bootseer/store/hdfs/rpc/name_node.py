"""The NameNode to call past hdfs-native: where it is, and whether it takes calls from us.

Owns the answer to the latter, asked once; one that wants Kerberos is hdfs-native's alone.
Thread-safe.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from msgspec.structs import replace

from bootseer.base.redact import public_url
from bootseer.errors import BootseerError, PermissionDeniedError, UnavailableError
from bootseer.store.hdfs.kerberos import check_library
from bootseer.store.hdfs.rpc.calls import UNANSWERED, NameNode
from bootseer.store.hdfs.rpc.frames import NotHadoopError, RpcError
from bootseer.transfer.policy import OUTAGE_DEADLINES, UNTIL_DEADLINE, Attempts

_log = logging.getLogger(__name__)

_DEFAULT_PORT = 8020
_HURRIED_S = 5.0
_CHECK_S = 2.0
_REFUSAL = "SIMPLE authentication is not enabled"
_NAMES, _ADDRESS = "dfs.ha.namenodes.", "dfs.namenode.rpc-address."
_CONFIG_FILES = ("core-site.xml", "hdfs-site.xml")
_REACH_S = 10.0
"""For a NameNode that is being restarted, or a resolver; what lasts longer is a wrong address."""
_CONNECT_S = 3.0


class FoundNameNode:
    """Finds the NameNode of one cluster that takes calls from us."""

    def __init__(self, cluster: str, deadline_s: float) -> None:
        """`cluster`: `hdfs://HOST:PORT` or `hdfs://NAMESERVICE`."""
        self._cluster = cluster
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._asked = False
        self._wants_kerberos = False
        self._name_node: NameNode | None = None
        self._names: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise what hdfs-native would retry until a deadline, without a word about the reason.

        Raises: UnavailableError: no server takes connections where the NameNode should be, or it is
        something else; UnsupportedError: the library for Kerberos is missing;
        PermissionDeniedError: the NameNode wants Kerberos, and no configuration says so.
        """
        with self._lock:
            if not self._asked:
                config = _configuration()
                if _is_secure(config):
                    self._reach(config)
                    self._asked = True
                    check_library()
                elif error := self._ask(
                    config, min(_CHECK_S, self._deadline_s / 2), attempts_max=1
                ):
                    self._reach(config)
                    self._say_why(error)
            if self._wants_kerberos:
                raise PermissionDeniedError(
                    f"{self._cluster} wants Kerberos: let HADOOP_CONF_DIR name the folder of its "
                    "core-site.xml and hdfs-site.xml"
                )

    def get(self) -> NameNode | None:
        """None where no NameNode is known, or takes calls from us: no where it wants Kerberos."""
        with self._lock:
            if not self._asked:
                self._ask(_configuration(), self._deadline_s)
                self._asked = True
            return self._name_node

    def _ask(
        self, config: dict[str, str], deadline_s: float, attempts_max: int | None = None
    ) -> BootseerError | None:
        """Find out, if a NameNode answers; else why not."""
        found = _find(self._cluster, config, self._deadline_s)
        if found is None:
            return None
        try:
            replace(found, deadline_s=deadline_s).ask(attempts_max)
        except RpcError as error:
            self._asked = True
            self._wants_kerberos = _REFUSAL in str(error)
        except BootseerError as error:
            return error
        else:
            self._asked, self._name_node = True, found
            self._names = _names(self._cluster, config)
        return None

    def _reach(self, config: dict[str, str]) -> None:
        hint = f"check the URL {public_url(self._cluster)}"
        if urlsplit(self._cluster).port is None and not _names(self._cluster, config):
            hint += (
                ", or, for a nameservice, that HADOOP_CONF_DIR names the folder of hdfs-site.xml"
            )
        await_reachable(_addresses(self._cluster, config), self._deadline_s, hint)

    def _say_why(self, error: BootseerError) -> None:
        """It takes connections, and the question was not answered."""
        if isinstance(error.__cause__, NotHadoopError):
            raise UnavailableError(
                f"{error}; check the port of {public_url(self._cluster)}: the NameNode's RPC has "
                "mostly 8020, its web pages have another one"
            ) from error
        cluster = public_url(self._cluster)
        _log.warning("waiting up to %g s for %s: %s", self._deadline_s, cluster, error)

    def refusal(self) -> OSError | None:
        """Why none of the NameNodes takes a connection now; None: one of them does.

        hdfs-native goes on trying to connect, so that a NameNode that is down looks to its caller
        like one that hangs.
        """
        refusal: OSError | None = None
        for address in _addresses(self._cluster, _configuration()):
            try:
                socket.create_connection(address, _CHECK_S).close()
            except OSError as error:
                refusal = error
            else:
                return None
        return refusal

    def patient(self) -> NameNode | None:
        """As `get`, for the calls of a write, which is lost if they fail: NameNodes that do not
        answer are asked until the deadline."""
        name_node = self.get()
        if name_node is None:
            return None
        deadline_s = OUTAGE_DEADLINES * self._deadline_s
        return replace(name_node, deadline_s=deadline_s, is_patient=True)

    def hurried(self) -> NameNode | None:
        """As `get`, for questions whose answers are worth no long wait."""
        name_node = self.get()
        if name_node is None:
            return None
        return replace(name_node, deadline_s=min(self._deadline_s, _HURRIED_S))

    def order(self) -> dict[str, str]:
        """The entry of the configuration that puts the active NameNode first; empty where only one,
        or none, is known. hdfs-native waits for ever for one that is silent."""
        with self._lock:
            if self._name_node is None or len(self._names) < 2:
                return {}
            first = self._name_node.failover.first
            names = self._names[first:] + self._names[:first]
            return {_NAMES + (urlsplit(self._cluster).hostname or ""): ",".join(names)}

    def has_left(self, order: dict[str, str]) -> bool:
        """Whether another one is active now than when `order` was told."""
        name_node = self.hurried() if order else None
        if name_node is None:
            return False
        try:
            name_node.ask()
        except UNANSWERED:
            return False
        return self.order() != order


def _names(cluster: str, config: dict[str, str]) -> tuple[str, ...]:
    """The NameNodes of a nameservice; empty for `hdfs://HOST:PORT`."""
    parts = urlsplit(cluster)
    host = parts.hostname or ""
    names = config.get(_NAMES + host, "") if parts.port is None else ""
    known = (name.strip() for name in names.split(","))
    return tuple(name for name in known if f"{_ADDRESS}{host}.{name}" in config)


def _find(cluster: str, config: dict[str, str], deadline_s: float) -> NameNode | None:
    if _is_secure(config):
        return None
    user = os.environ.get("HADOOP_USER_NAME") or _user()
    by_name = config.get("dfs.client.use.datanode.hostname") == "true"
    return NameNode(_addresses(cluster, config), user, deadline_s, by_name)


def _addresses(cluster: str, config: dict[str, str]) -> tuple[tuple[str, int], ...]:
    """The addresses of all NameNodes of a nameservice."""
    parts = urlsplit(cluster)
    host = parts.hostname or ""
    found = [_address(config[f"{_ADDRESS}{host}.{name}"]) for name in _names(cluster, config)]
    return tuple(found) or ((host, parts.port or _DEFAULT_PORT),)


def _user() -> str:
    import getpass  # Loads terminals' code.

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # In a pod, a user often has a number only.
        return str(os.geteuid())


def _is_secure(config: dict[str, str]) -> bool:
    return config.get("hadoop.security.authentication", "simple") != "simple"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    return (host, int(port)) if host and port.isdigit() else (text, _DEFAULT_PORT)


def _configuration() -> dict[str, str]:
    """The site's Hadoop configuration, from where hdfs-native reads it too."""
    folder = os.environ.get("HADOOP_CONF_DIR")
    if folder is None and (home := os.environ.get("HADOOP_HOME")):
        folder = f"{home}/etc/hadoop"
    values: dict[str, str] = {}
    if not folder:
        return values
    # Here, since most have none, and every start of a job loads this module.
    import xml.etree.ElementTree as ET

    for name in _CONFIG_FILES:
        try:
            root = ET.parse(Path(folder) / name).getroot()
        except (OSError, ET.ParseError):
            continue
        for entry in root.iter("property"):
            key, value = entry.findtext("name"), entry.findtext("value")
            if key and value:
                values[key.strip()] = value.strip()
    return values


def await_reachable(addresses: Sequence[tuple[str, int]], deadline_s: float, hint: str) -> None:
    """Return when one of the addresses takes a connection. Says what is waited for: hdfs-native
    goes on trying for a minute, and does not say.

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
