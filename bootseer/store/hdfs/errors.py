"""What hdfs-native raises, as errors of ours. Pure (no I/O).

The client gives builtin exceptions for the three common cases and RuntimeError, whose text holds
the Java class, for all others: this is the one table of those texts.
"""

import re

from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    CorruptError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    QuotaExceededError,
    UnavailableError,
    from_oserror,
)
from bootseer.store.hdfs.kerberos import kerberos_failure

_OUT_OF_ROOM = "Resources are low on NN"
# The first text that is found decides. Order matters: HDFS reports a file in the place of a
# folder as an AccessControlException.
_TEXTS: tuple[tuple[str, type[BootseerError]], ...] = (
    ("ParentNotDirectoryException", InvalidInputError),
    ("(is not a directory)", NotFoundError),
    ("PathIsNotEmptyDirectoryException", AlreadyExistsError),
    ("AccessControlException", PermissionDeniedError),
    # Of space, of names, and by type of storage.
    ("QuotaExceededException", QuotaExceededError),
    ("QuotaByStorageTypeExceededException", QuotaExceededError),
    # The NameNode has put itself into safe mode.
    (_OUT_OF_ROOM, NoSpaceError),
    ("InvalidPathException", InvalidInputError),
    ("FSLimitException", InvalidInputError),
    ("must both be directories", InvalidInputError),
    ("is a directory or file under source", InvalidInputError),
    ("less than configured minimum value", InvalidInputError),
    ("ChecksumError", CorruptError),
)
# The trace of the server's stack, in both forms in which the client shows it.
_TRACE = re.compile(r"(\\n|\n)\s*(\\t|\t)?\s*at [\w$.]+\(.*", re.DOTALL)
_RPC = re.compile(r'RPCError\("[\w.$]*?([\w$]+)", "(.*)', re.DOTALL)
_REASON_MAX_CHARACTERS = 300
# A NameNode that was just started, or is about to become active, has done nothing of what it was
# asked, and will do it a little later.
_NOT_SERVING = ("SafeModeException", "RetriableException", "StandbyException")
# The connection was lost in the middle of a call, which may have been made.
_UNANSWERED = ("RPC listener disconnected",)
TOO_FEW_DATANODES = "could only be written to"
"""Too few were found for a block: the others are excluded, full, dead or too busy."""
_NO_DATANODE = re.compile(TOO_FEW_DATANODES + r" 0 of .*?There are (\d+) datanode")


def translate(error: BaseException, what: str) -> BootseerError:
    """`error` of hdfs-native as one of ours, `what` ("read hdfs://...") put before the reason.

    What is not in the table is UnavailableError: the server failed in a way that a later try,
    or another replica, may not.
    """
    if isinstance(error, BootseerError):
        return type(error)(f"cannot {what}: {error}")
    text = str(error)
    reason = _reason(text)
    message = f"cannot {what}: {reason}"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(message)
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(message)
    if isinstance(error, PermissionError):
        return PermissionDeniedError(message)
    if isinstance(error, UnicodeError):
        return InvalidInputError(f"cannot {what}: HDFS names are UTF-8")
    if isinstance(error, OSError) and error.errno:
        return from_oserror(error, what)
    if failure := kerberos_failure(text):
        return failure[0](f"cannot {what}: {failure[1]}")
    for part, kind in _TEXTS:
        if part in text:
            return kind(message)
    return UnavailableError(message)


def is_not_serving(error: BaseException | None) -> bool:
    """Whether `error` of hdfs-native, or of our own calls, says that a NameNode did nothing and
    should be asked again: it is in safe mode, starts, or is not the active one."""
    text = str(error)
    if _OUT_OF_ROOM in text:
        return False
    # Of a RetriableException, the class that it wraps comes in the message.
    match = _RPC.match(text)
    raised = match[1] if match else text.partition(":")[0]
    return any(name in raised for name in _NOT_SERVING)


def is_unanswered(error: BaseException | None) -> bool:
    """Whether `error` of hdfs-native says that a call had no answer, so that nobody knows whether
    it was made."""
    return any(part in str(error) for part in _UNANSWERED)


def refused_datanode_count(error: BaseException) -> int:
    """The number of DataNodes none of which was good enough for a block, where `error` says that;
    else 0."""
    match = _NO_DATANODE.search(str(error))
    return int(match[1]) if match else 0


def _reason(text: str) -> str:
    text = _TRACE.sub("", text)
    if match := _RPC.match(text):
        text = f"{match[1]}: {match[2]}"
    text = " ".join(text.replace("\\n", " ").split()).rstrip('")')
    if len(text) > _REASON_MAX_CHARACTERS:
        text = text[:_REASON_MAX_CHARACTERS] + "..."
    return text or "the HDFS client gave no reason"
