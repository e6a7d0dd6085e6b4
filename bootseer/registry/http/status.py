"""What a server's answer says about asking again. Pure."""

import email.utils
from datetime import UTC, datetime

_TRANSIENT = frozenset((408, 425, 429, 500, 502, 503, 504))


def is_transient(status: int) -> bool:
    """Whether the same request may succeed later."""
    return status in _TRANSIENT


def retry_after_s(header: str | None, now: datetime) -> float:
    """Seconds that `Retry-After` asks for (RFC 9110, 10.2.3): a number or a date; 0 where it says
    nothing that can be understood."""
    text = (header or "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - now).total_seconds())
