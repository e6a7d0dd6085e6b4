"""`MiniKdc`: a real Kerberos realm (MIT's krb5kdc) with users and keytabs, on loopback.

Its configuration, database and credential caches are in one folder; the machine's Kerberos is
neither read nor written. Up in a tenth of a second. The KDC ends with its parent process.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bootseer.base.closing import Closing
from testbed.hdfs.cluster import unassigned_ports
from testbed.needs import MissingError
from testbed.waiting import is_listening, wait_for

REALM = "BOOTSEER.TEST"
SERVICE = f"hdfs/localhost@{REALM}"
_PASSWORD = "only-of-this-test"
_DEADLINE_S = 20
_TOOLS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit", "setpriv")
_PACKAGES = "krb5-kdc, krb5-admin-server and krb5-user"
# Ordinary users' search paths lack administrators' tools.
_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

_KRB5_CONF = """[libdefaults]
default_realm = {realm}
dns_lookup_kdc = false
dns_lookup_realm = false
dns_canonicalize_hostname = false
rdns = false
udp_preference_limit = 1
[realms]
{realm} = {{
kdc = 127.0.0.1:{port}
}}
"""
_KDC_CONF = """[kdcdefaults]
kdc_listen = 127.0.0.1:{port}
kdc_tcp_listen = 127.0.0.1:{port}
[realms]
{realm} = {{
database_name = {home}/principals
key_stash_file = {home}/stash
max_life = 1d
max_renewable_life = 7d
}}
[logging]
kdc = FILE:{home}/kdc.log
"""


class MiniKdc(Closing):
    """A running KDC of one realm with the service `SERVICE`, whose key is in `keytab`."""

    def __init__(self, home: Path) -> None:
        """Start the KDC. Raises: MissingError."""
        missing = [tool for tool in _TOOLS if shutil.which(tool, path=_SEARCH_PATH) is None]
        if missing:
            raise MissingError(f"no {', '.join(missing)}: install {_PACKAGES}")
        self.home = home
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        (port,) = unassigned_ports(1)
        self.krb5_conf = home / "krb5.conf"
        self.krb5_conf.write_text(_KRB5_CONF.format(realm=REALM, port=port))
        (home / "kdc.conf").write_text(_KDC_CONF.format(realm=REALM, port=port, home=home))
        self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", _PASSWORD)
        self.keytab = self.add_principal(SERVICE)
        # -n: stay in the foreground.
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", self._tool("krb5kdc"), "-n", "-r", REALM],
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: is_listening(port), "a KDC that listens", timeout_s=_DEADLINE_S)

    def add_principal(self, name: str) -> Path:
        """Add a principal with a random key; return its keytab."""
        keytab = self.home / f"{name.partition('@')[0].replace('/', '-')}.keytab"
        self._run("kadmin.local", "-r", REALM, "addprinc", "-randkey", name)
        self._run("kadmin.local", "-r", REALM, "ktadd", "-k", str(keytab), name)
        return keytab

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of clients whose tickets are in `cache`."""
        return {"KRB5_CONFIG": str(self.krb5_conf), "KRB5CCNAME": f"FILE:{cache}"}

    def kinit(self, name: str, keytab: Path, cache: Path, *, lifetime: str = "1h") -> None:
        """Get a ticket as a user does."""
        self._run(
            "kinit", "-l", lifetime, "-r", "1d", "-k", "-t", str(keytab), name,
            more=self.environment(cache),
        )  # fmt: skip

    def close(self) -> None:
        """Stop the KDC; its folder stays. Idempotent."""
        self._process.terminate()
        self._process.wait(_DEADLINE_S)

    def _tool(self, name: str) -> str:
        return shutil.which(name, path=_SEARCH_PATH) or name

    def _environment(self) -> dict[str, str]:
        paths = {"KRB5_CONFIG": self.krb5_conf, "KRB5_KDC_PROFILE": self.home / "kdc.conf"}
        return {**os.environ, **{name: str(path) for name, path in paths.items()}}

    def _run(self, tool: str, *arguments: str, more: Mapping[str, str] | None = None) -> None:
        subprocess.run(
            [self._tool(tool), *arguments],
            env={**self._environment(), **(more or {})},
            check=True,
            capture_output=True,
            timeout=_DEADLINE_S,
        )
