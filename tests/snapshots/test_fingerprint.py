import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.snapshots.fingerprint import (
    Part,
    command_part,
    fingerprint,
    variable_parts,
    without_credentials,
)

_PARTS = st.lists(st.builds(Part, st.text(max_size=8), st.text(max_size=8)), max_size=6)


def test_the_encoding_never_changes() -> None:
    """Keys live in stores: a release that computes others would miss every snapshot."""
    parts = [Part("salt", ""), Part("command", '["pip", "install", "x"]')]
    assert fingerprint(parts) == "47c89e17564996d8d04d54251ed0f531c7cead0153e36128d9674c38dd9e7617"


@given(_PARTS, _PARTS)
def test_equal_keys_mean_equal_parts(one: list[Part], other: list[Part]) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (sorted(one) == sorted(other))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://user:pass@host/simple", "https://host/simple"),
        ("https://token@host/simple", "https://host/simple"),
        ("https://host/a@b", "https://host/a@b"),
        ("git+https://u:p@h/x.git@v1", "git+https://h/x.git@v1"),
        ("https://u:p@ss@h/x", "https://h/x"),
        ("a https://u:p@h b http://v@i c", "a https://h b http://i c"),
        ("user@host", "user@host"),
    ],
)
def test_credentials_are_taken_out_of_urls(text: str, clean: str) -> None:
    assert without_credentials(text) == clean


def test_no_secret_is_in_a_part() -> None:
    environ = {
        "PIP_INDEX_URL": "https://me:hunter2@index/simple",
        "MY_TOKEN": "hunter2",
        "UNRELATED": "hunter2",
    }
    parts = [*variable_parts(environ, ["MY_TOKEN", "MISSING"])]
    parts.append(command_part(["pip", "install", "-i", "https://me:hunter2@index/simple", "x"]))
    assert "hunter2" not in repr(parts)
    assert {part.name for part in parts} == {
        "env PIP_INDEX_URL",
        "env MY_TOKEN",
        "env MISSING",
        "command",
    }


def test_declared_variables_decide() -> None:
    keys = {
        fingerprint(variable_parts(environ, ["CUDA"]))
        for environ in ({"CUDA": "12"}, {"CUDA": "13"}, {"CUDA": ""}, {})
    }
    assert len(keys) == 4
