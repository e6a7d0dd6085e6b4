"""Documents that promise, and name the tests which hold them to it."""

import re

from testbed.paths import REPOSITORY


def check_promises(promises: str) -> None:
    """Every paragraph of text (several lines; no heading, no table) names tests, which exist."""
    existing = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        # "=": a state machine.
        existing.update(
            re.findall(r"^(?:def )?(test_\w+)(?:\(| = )", path.read_text(encoding="utf-8"), re.M)
        )
    for paragraph in promises.split("\n\n"):
        if paragraph.startswith(("#", "|")) or not paragraph.strip() or "\n" not in paragraph:
            continue
        named = re.findall(r"`(test_\w+)`", paragraph)
        assert named, f"no test is named in: {paragraph[:80]}"
        assert set(named) <= existing, set(named) - existing
