"""Check of documents whose promises name the tests that hold them."""

import re

from testbed.paths import REPOSITORY


def check_promises(promises: str) -> None:
    """Assert that every paragraph of text names existing tests.

    Headings, tables and single lines are not checked.
    """
    existing = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        # "=": the test case of a state machine.
        existing.update(
            re.findall(r"^(?:def )?(test_\w+)(?:\(| = )", path.read_text(encoding="utf-8"), re.M)
        )
    for paragraph in promises.split("\n\n"):
        if paragraph.startswith(("#", "|")) or not paragraph.strip() or "\n" not in paragraph:
            continue
        named = re.findall(r"`(test_\w+)`", paragraph)
        assert named, f"no test is named in: {paragraph[:80]}"
        assert set(named) <= existing, set(named) - existing
