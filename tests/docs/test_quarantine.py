"""The list of quarantined tests."""

from datetime import date

import pytest

from tests.support import quarantine


def test_a_line_has_a_date_a_test_and_a_reason() -> None:
    text = "# comment\n\n2026-11-25 tests/a/test_b.py::test_c it races with the sweep\n"
    (line,) = quarantine.read(text, date(2026, 12, 9))
    assert line == (date(2026, 11, 25), "tests/a/test_b.py::test_c", "it races with the sweep")


@pytest.mark.parametrize(
    ("text", "today", "problem"),
    [
        ("2026-11-25 tests/a/test_b.py::test_c", date(2026, 11, 25), "not DATE"),
        ("yesterday tests/a/test_b.py::test_c why", date(2026, 11, 25), "isoformat"),
        ("2026-11-25 tests/a/test_b.py::test_c why", date(2026, 12, 10), "more than 14 days"),
    ],
)
def test_a_line_without_a_reason_or_too_old_is_refused(
    text: str, today: date, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        quarantine.read(text, today)


def test_the_list_can_be_read() -> None:
    assert isinstance(quarantine.read(quarantine.LIST.read_text(), date.today()), list)
