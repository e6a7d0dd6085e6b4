"""Errors keep their type and text when they are sent to another process."""

import pytest

from bootseer.base.documents import from_line, to_line
from bootseer.base.json_errors import ErrorDocument, decode_error, encode_error
from bootseer.errors import (
    BootseerError,
    CorruptError,
    NotFoundError,
    SetupFailedError,
    UnavailableError,
    exit_code_of,
)


@pytest.mark.parametrize("kind", [BootseerError, CorruptError, NotFoundError, UnavailableError])
def test_our_errors_come_back_as_they_were(kind: type[BootseerError]) -> None:
    back = decode_error(from_line(to_line(encode_error(kind("no x"), "the server")), ErrorDocument))
    assert (type(back), str(back)) == (kind, "no x")


def test_a_commands_exit_code_comes_along() -> None:
    back = decode_error(encode_error(SetupFailedError("no tool", 127), "the run"))
    assert type(back) is SetupFailedError
    assert exit_code_of(back) == 127


def test_other_errors_name_who_failed() -> None:
    back = decode_error(encode_error(KeyError("x"), "the server"))
    assert type(back) is UnavailableError
    assert str(back) == "the server failed: KeyError('x')"


def test_no_credentials_and_no_long_text() -> None:
    failure = encode_error(BootseerError("\0" * 10**6 + "x"), "the server")
    assert len(to_line(failure)) < 2**16
    failure = encode_error(BootseerError("cannot read s3://key:secret@host/x"), "the server")
    assert "secret" not in failure.message


@pytest.mark.parametrize("name", ["os", "from_oserror", "SetupFailedError", "Nothing", ""])
def test_names_that_are_no_error_of_ours(name: str) -> None:
    assert type(decode_error(ErrorDocument(name, "x"))) is UnavailableError
