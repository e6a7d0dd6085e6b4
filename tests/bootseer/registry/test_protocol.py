"""Challenges and waits: the pure parts of talking to a registry."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.registry.tokens import parse_challenges
from bootseer.registry.transport import retry_after_s

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def test_a_bearer_challenge() -> None:
    (challenge,) = parse_challenges(
        'Bearer realm="https://auth.io/token?x=1",service="r.io", scope="repository:a/b:pull,push"'
    )
    assert challenge.scheme == "bearer"
    assert challenge.parameters == {
        "realm": "https://auth.io/token?x=1",
        "service": "r.io",
        "scope": "repository:a/b:pull,push",
    }


def test_several_challenges_in_one_header() -> None:
    found = parse_challenges('Negotiate, Basic realm="a \\"quoted\\" one", BEARER Realm=x')
    assert [(c.scheme, dict(c.parameters)) for c in found] == [
        ("negotiate", {}),
        ("basic", {"realm": 'a "quoted" one'}),
        ("bearer", {"realm": "x"}),
    ]


@given(st.text(max_size=80))
def test_any_challenge_is_read(text: str) -> None:
    assert all(challenge.scheme for challenge in parse_challenges(text))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0),
        ("", 0),
        ("7", 7),
        (" 120 ", 120),
        ("-3", 0),
        ("soon", 0),
        ("Thu, 01 Jan 2026 12:01:00 GMT", 60),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0),
        ("٣", 0),
        ("9" * 400, 999_999_999),
        ("Mon, 01 Jan 2024 00:00:00 +99999999999999999999", 0),
        ("Mon, 01 Jan 9999999999999999999999 00:00:00 GMT", 0),
    ],
)
def test_retry_after_in_seconds_or_as_a_date(header: str | None, seconds: float) -> None:
    assert retry_after_s(header, NOW) == seconds
