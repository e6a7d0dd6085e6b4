"""The webhook's key and certificate: who trusts it, its renewal, and refused ones."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from bootseer.kubernetes.webhook.certificate import VALIDITY, Pair, is_due, make_pair, problem_of

NAMES = ["bootseer-webhook.bootseer-system.svc"]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_a_new_pair_is_usable_until_it_is_due() -> None:
    pair = make_pair(NAMES, NOW)
    assert problem_of(pair, NAMES, NOW) == ""
    assert not is_due(pair, NOW + VALIDITY / 2)
    assert is_due(pair, NOW + VALIDITY * 0.7)
    assert problem_of(pair, NAMES, NOW + VALIDITY) == "the certificate has expired"
    assert problem_of(pair, ["other.svc"], NOW) == "the certificate is for another name"


def test_after_a_renewal_the_pair_before_is_believed_too() -> None:
    first = make_pair(NAMES, NOW)
    second = make_pair(NAMES, NOW + timedelta(days=60), first)
    third = make_pair(NAMES, NOW + timedelta(days=80), second)
    assert _trusted(second)[1:] == _trusted(first)
    # Not those before: the list would grow for ever.
    assert _trusted(third)[1:] == _trusted(second)[:1]
    late = make_pair(NAMES, NOW + VALIDITY, first)
    assert len(_trusted(late)) == 1


@pytest.mark.parametrize("part", ["trusted", "certificate", "key"])
@pytest.mark.parametrize("other", [b"", b"x", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_damaged_pairs_are_refused(part: str, other: bytes) -> None:
    pair = replace(make_pair(NAMES, NOW), **{part: other})
    assert "cannot be read" in problem_of(pair, NAMES, NOW)


def test_parts_of_two_pairs_are_refused() -> None:
    one, other = make_pair(NAMES, NOW), make_pair(NAMES, NOW)
    assert (
        problem_of(replace(one, key=other.key), NAMES, NOW)
        == "the key belongs to another certificate"
    )
    untold = replace(one, trusted=other.trusted)
    assert problem_of(untold, NAMES, NOW) == "the certificate is not the trusted one"


def _trusted(pair: Pair) -> list[str]:
    end = "-----END CERTIFICATE-----\n"
    return [one + end for one in pair.trusted.decode().split(end) if one]
