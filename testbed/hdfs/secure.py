"""`SecureHdfs`: a `MiniHdfs` that requires Kerberos, with its KDC and one user.

Calls and blocks are encrypted, and blocks require tokens.
"""

from pathlib import Path

from bootseer.base.closing import Closing
from testbed.hdfs.cluster import MiniHdfs
from testbed.hdfs.kdc import REALM, SERVICE, MiniKdc

USER = f"trainer@{REALM}"
_KINDS = ("namenode", "datanode")
# Settings of the servers and of clients.
_SHARED = {
    "hadoop.security.authentication": "kerberos",
    "hadoop.rpc.protection": "privacy",
    "dfs.data.transfer.protection": "privacy",
    "dfs.encrypt.data.transfer.cipher.suites": "AES/CTR/NoPadding",
    "dfs.namenode.kerberos.principal": SERVICE,
    "dfs.datanode.kerberos.principal": SERVICE,
}
_SERVERS = {
    "hadoop.security.authorization": "true",
    "dfs.block.access.token.enable": "true",
    # Secure DataNodes without root.
    "ignore.secure.ports.for.testing": "true",
}


class SecureHdfs(Closing):
    """A running HDFS; clients need `environment`, and a ticket by the user's `keytab`."""

    def __init__(self, home: Path) -> None:
        """Start the KDC and the HDFS. Raises: MissingError, RuntimeError."""
        self.kdc = MiniKdc(home / "kdc")
        try:
            self.keytab = self.kdc.add_principal(USER)
            keytabs = {f"dfs.{kind}.keytab.file": str(self.kdc.keytab) for kind in _KINDS}
            self.hdfs = MiniHdfs(
                home / "hdfs",
                datanode_count=1,
                conf={**_SHARED, **_SERVERS, **keytabs},
                heap="256m",
                java_options=[f"-Djava.security.krb5.conf={self.kdc.krb5_conf}"],
            ).start()
        except BaseException:
            self.kdc.close()
            raise
        self._conf_folder = home / "conf"
        self._conf_folder.mkdir()
        entries = (
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in _SHARED.items()
        )
        text = f"<configuration>{''.join(entries)}</configuration>"
        (self._conf_folder / "core-site.xml").write_text(text, encoding="utf-8")

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the environment of clients whose tickets are in `cache`."""
        return {**self.kdc.environment(cache), "HADOOP_CONF_DIR": str(self._conf_folder)}

    def kinit(self, cache: Path, *, lifetime: str = "1h") -> None:
        """Put a ticket of the user into `cache`."""
        self.kdc.kinit(USER, self.keytab, cache, lifetime=lifetime)

    def close(self) -> None:
        """Stop the servers and remove the data. Idempotent."""
        self.hdfs.stop()
        self.kdc.close()
