"""Translation of obstore's exceptions into Bootseer's errors.

obstore's exceptions have the server's answer in their text only; this module parses the text. The
codes are those of "Error responses" in Amazon S3's reference, which Ceph RGW and MinIO send too. An
answer to HEAD has no body, and so no code. Pure; any thread.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from bootseer.base.redact import redact
from bootseer.base.wait_budget import RefusedError
from bootseer.errors import (
    AlreadyExistsError,
    BootseerError,
    DeadlineError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnsupportedError,
    from_oserror,
)
from bootseer.transfer.policy import is_transient

_HEAD = re.compile(r"Error performing (?:[A-Z]+) ((https?://[^/\s]+)\S*) in ")
_STATUS = re.compile(r"status code: (\d{3})[^:]*:? ?(.*)", re.DOTALL)
_CODE = re.compile(r"<Code>(\w+)</Code>|\(code: (\w+)\)|\"(?:reason|code)\": ?\"(\w+)\"")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_REQUEST_ID = re.compile(r"<RequestId>([\w/+=.-]{1,128})</RequestId>")
_REASON = re.compile(
    r"Connection refused|Connection reset|[Nn]etwork is unreachable|No route to host|dns error"
    r"|invalid peer certificate: \w+|certificate verify failed"
    r"|connection closed before message completed|error decoding response body|IncompleteMessage"
)
# A bucket in another region; obstore does not pass the server's answer on.
_REDIRECT = "Received redirect without LOCATION"
_TIMED_OUT = re.compile(r"\bTimedOut\b|operation timed out|deadline has elapsed")
# Azure answers a range beyond the end in a way that obstore takes for a part of the range.
_BEYOND_END = re.compile(r"Wanted range starting at \d+, but object was only")
_ODD_NAME = re.compile("Encountered object with invalid path: ")
_DEBUG = "\n\nDebug source"
# Metadata services, which obstore asks for credentials when none were given.
_METADATA = ("169.254.169.254", "[fd00:ec2::254]", "metadata.google.internal")
_BUSY_CODES = frozenset(("SlowDown", "ServiceUnavailable", "RequestTimeout", "InternalError"))
# Azure reports an existing object with 409, S3 with 412.
_EXISTS_CODES = ("BlobAlreadyExists", "BucketAlreadyExists")
_ADVICE = {
    "AccessDenied": "the credentials do not allow it (docs/stores/s3.md has the least policy)",
    "ExpiredToken": "the credentials have expired: renew them",
    "InvalidAccessKeyId": "the server does not know this access key",
    "InvalidToken": "the session token is wrong",
    "RequestTimeTooSkewed": "the clock of this node is wrong: set it",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "TokenRefreshRequired": "the credentials have expired: renew them",
}
NO_CREDENTIALS = (
    "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give the node or the pod a role"
)


class ServerAnswer(Struct, frozen=True):
    """Error response of a server; 0 or "" for each field that is missing."""

    status: int = 0
    code: str = ""
    message: str = ""
    request_id: str = ""
    endpoint: str = ""

    def __str__(self) -> str:
        shown = f"{self.status} {self.code}".strip()
        return f"{shown} (request id {self.request_id})" if self.request_id else shown


def parse_answer(error: BaseException) -> ServerAnswer:
    """Parse the server's answer from the text of an exception of obstore."""
    text = str(error).partition(_DEBUG)[0]
    head, status = _HEAD.search(text), _STATUS.search(text)
    body = status[2] if status else text
    code = _CODE.search(body)
    message, request_id = _MESSAGE.search(body), _REQUEST_ID.search(body)
    return ServerAnswer(
        status=int(status[1]) if status else 0,
        code=next(filter(None, code.groups())) if code else "",
        message=message[1] if message else "",
        request_id=request_id[1] if request_id else "",
        endpoint=head[2] if head else "",
    )


def is_conflict(answer: ServerAnswer) -> bool:
    """Return whether another writer uses the same key now (S3: ConditionalRequestConflict)."""
    return answer.status == 409 and answer.code not in _EXISTS_CODES


def is_no_bucket(answer: ServerAnswer) -> bool:
    """Return whether the bucket does not exist."""
    return answer.code in ("NoSuchBucket", "ContainerNotFound")


def is_beyond_end(error: BaseException) -> bool:
    """Return whether the requested range begins at or beyond the end of the object."""
    return parse_answer(error).status == 416 or _BEYOND_END.search(str(error)) is not None


def is_odd_name(error: BaseException) -> bool:
    """Return whether a listing met a key that obstore does not accept as a path.

    Such a key has an empty component, "." or "..", or control characters.
    """
    return _ODD_NAME.search(str(error)) is not None


@contextmanager
def translated_errors(what: str, bucket: str) -> Iterator[None]:
    """Raise obstore's exceptions from the block as Bootseer's errors (see `translate`).

    Some answers make obstore panic, and Rust's PanicException is not an Exception.
    """
    try:
        yield
    except BootseerError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise translate(error, what, bucket) from error
        raise


def translate(error: BaseException, what: str, bucket: str) -> BootseerError:
    """Return the error to raise for an exception of obstore.

    `what` names the operation, as in "read s3://bucket/key".
    """
    answer = parse_answer(error)
    text = str(error)
    if any(host in text for host in _METADATA):
        return PermissionDeniedError(f"cannot {what}: {NO_CREDENTIALS}")
    where = f"{what} at {answer.endpoint}" if answer.endpoint else what
    name = type(error).__name__
    if is_no_bucket(answer):
        return InvalidInputError(
            f"cannot {where}: there is no bucket {bucket}; create it, or correct the URL"
        )
    is_elsewhere = answer.status in (301, 307) or answer.code == "AuthorizationHeaderMalformed"
    if is_elsewhere or _REDIRECT in text:
        return InvalidInputError(
            f"cannot {where}: the bucket {bucket} lies in another region; set AWS_REGION"
            f" ({answer.message or answer})"
        )
    if is_odd_name(error):
        odd = _ODD_NAME.split(text.partition("\n")[0])[-1]
        return UnsupportedError(
            f"cannot {where}: an object has a name that is not a valid path, which prevents the "
            f"listing; rename or delete it ({redact(odd)[:200]!r})"
        )
    if isinstance(error, FileNotFoundError):
        return NotFoundError(f"cannot {where}: it does not exist")
    if name in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExistsError(f"cannot {where}: it exists already")
    if is_transient(answer.status) or answer.code in _BUSY_CODES:
        return UnavailableError(f"cannot {where}: {answer}")
    is_refused = name in ("PermissionDeniedError", "UnauthenticatedError")
    if is_refused or answer.status in (401, 403) or answer.code in _ADVICE:
        advice = _ADVICE.get(answer.code) or redact(answer.message) or _ADVICE["AccessDenied"]
        return PermissionDeniedError(f"cannot {where}: {answer}: {advice}")
    if name in ("NotSupportedError", "NotImplementedError"):
        return UnsupportedError(f"cannot {where}: the storage has no such call")
    if answer.status:
        return UnavailableError(f"cannot {where}: {answer} {redact(answer.message)}".rstrip())
    if isinstance(error, OSError) and error.errno:
        return from_oserror(error, what)
    if _TIMED_OUT.search(text):
        return DeadlineError(f"cannot {where}: no answer in time")
    reason = _REASON.search(text)
    if reason and reason[0] == "Connection refused":
        return RefusedError(f"cannot {where}: {reason[0]}")
    first = redact(text.partition("\n")[0])[:300]
    return UnavailableError(f"cannot {where}: {reason[0] if reason else first}")
