"""An error that crosses to another process is the same error there."""

import json

import pytest

from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    SetupFailedError,
    UnavailableError,
    exit_code_of,
)
from bootseer.served.json_errors import error_from_json, error_to_json


@pytest.mark.parametrize("kind", [BootseerError, CorruptError, NotFoundError, UnavailableError])
def test_our_errors_come_back_as_they_were(kind: type[BootseerError]) -> None:
    back = error_from_json(json.loads(json.dumps(error_to_json(kind("no x"), "the server"))))
    assert (type(back), str(back)) == (kind, "no x")


def test_a_commands_exit_code_comes_along() -> None:
    back = error_from_json(error_to_json(SetupFailedError("no tool", 127), "the run"))
    assert type(back) is SetupFailedError
    assert exit_code_of(back) == 127


def test_other_errors_name_who_failed() -> None:
    back = error_from_json(error_to_json(KeyError("x"), "the server"))
    assert type(back) is UnavailableError
    assert str(back) == "the server failed: KeyError('x')"


def test_no_credentials_and_no_long_text() -> None:
    document = error_to_json(BootseerError("\0" * 10**6 + "x"), "the server")
    assert len(json.dumps(document)) < 2**16
    document = error_to_json(BootseerError("cannot read s3://key:secret@host/x"), "the server")
    assert "secret" not in document["message"]


@pytest.mark.parametrize("name", ["os", "from_oserror", "SetupFailedError", "Nothing", 3, None])
def test_names_that_are_no_error_of_ours(name: object) -> None:
    assert type(error_from_json({"error": name, "message": "x"})) is UnavailableError
