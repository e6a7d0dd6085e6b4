"""Challenges: how a registry asks for a login."""

from hypothesis import given
from hypothesis import strategies as st

from bootseer.registry.tokens import parse_challenges


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
