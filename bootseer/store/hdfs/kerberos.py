"""What goes wrong with Kerberos, in words; the clients do the work (hdfs-native by libgssapi)."""

import ctypes
import re

from bootseer.errors import (
    BootseerError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
)

LIBRARY = "libgssapi_krb5.so.2"
# GSSAPIError(codes, number, "general text: what it is about"): as Rust shows it.
_ERROR = re.compile(r'GSSAPIError\(.*?, \d+, "(.*)', re.DOTALL)
_GENERAL = re.compile(r".*(?:more information|unavailable or inaccessible|supplied): ?", re.DOTALL)
_NO_KDC = "Cannot contact any KDC"
_SERVER = re.compile(r'SaslException", "(.*)', re.DOTALL)
# As Hadoop's own client says it.
_JAVA_ERRORS = ("Client cannot authenticate via:", "GSS initiate failed")
_REASON_MAX_CHARACTERS = 200


def check_library() -> None:
    """Raises: UnsupportedError: this machine lacks what hdfs-native needs for Kerberos."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UnsupportedError(
            f"Kerberos needs {LIBRARY}, which cannot be loaded: install libgssapi-krb5-2 (Debian) "
            "or krb5-libs (Red Hat)"
        ) from error


def kerberos_failure(text: str) -> tuple[type[BootseerError], str] | None:
    """The kind of failure and its reason, if Kerberos is what a client's `text` is about."""
    if match := _ERROR.search(text):
        reason = _plain(_GENERAL.sub("", match[1]))
        if _NO_KDC in reason:
            return UnavailableError, f"no Kerberos server answers ({reason})"
        return (
            PermissionDeniedError,
            f"no Kerberos ticket that can be used ({reason}): run kinit, or let KRB5_CLIENT_KTNAME "
            "name a keytab",
        )
    if match := _SERVER.search(text):
        reason = _plain(match[1])
        return PermissionDeniedError, f"the server does not accept the Kerberos ticket ({reason})"
    if any(words in text for words in _JAVA_ERRORS):
        return PermissionDeniedError, "no Kerberos ticket that can be used: run kinit"
    return None


def _plain(text: str) -> str:
    text = " ".join(text.removesuffix('")').replace('\\"', '"').replace("\\n", " ").split())
    return text[:_REASON_MAX_CHARACTERS]
