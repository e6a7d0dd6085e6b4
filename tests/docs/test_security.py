"""Every promise of SECURITY.md has a test."""

from testbed.paths import REPOSITORY
from tests.support.named_tests import check_promises


def test_every_promise_names_a_test_that_exists() -> None:
    text = (REPOSITORY / "SECURITY.md").read_text(encoding="utf-8")
    promises = text.partition("\n## Promises")[2].partition("\n## ")[0]
    assert promises.count("\n\n") > 10
    check_promises(promises)
