"""List of tests that are known to fail now and then: tests/quarantine.txt.

A quarantined test runs and its failure is shown, but does not fail the run. Lines are temporary: a
line older than DAYS_MAX fails the collection of all tests.
"""

from datetime import date, timedelta
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).parents[1] / "quarantine.txt"
DAYS_MAX = 14


class QuarantinedTest(NamedTuple):
    """Line of the list: a quarantined test."""

    since: date
    node_id: str
    """Path of the file, two colons and the function's name, for all of its parameters."""
    reason: str


def read(text: str, today: date) -> list[QuarantinedTest]:
    """Return the lines of a list: DATE NODE_ID REASON.

    Raises: ValueError if a line cannot be read, gives no reason, or is too old.
    """
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split(maxsplit=2)
        if len(words) < 3:
            raise ValueError(f"tests/quarantine.txt: {line!r} is not DATE NODE_ID REASON")
        since = date.fromisoformat(words[0])
        if today - since > timedelta(days=DAYS_MAX):
            raise ValueError(
                f"tests/quarantine.txt: {words[1]} is there for more than {DAYS_MAX} days: mend it"
            )
        found.append(QuarantinedTest(since, words[1], words[2]))
    return found
