"""The key of a start: valid secrets, and a different key for each start."""

import os
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, InvalidInputError
from bootseer.fanout.keys import key_of, new_secret, parse_secret, read_key_file


def test_a_secret_is_32_random_bytes() -> None:
    first, second = (parse_secret(new_secret(), "it") for _ in range(2))
    assert len(first) == 32
    assert first != second
    assert parse_secret(first.hex().encode() + b"\n", "it") == first


@pytest.mark.parametrize("text", [b"", b"00", b"zz" * 32, b"00" * 31, b"00" * 33, b"\xff" * 64])
def test_what_is_no_secret_is_not_shown(text: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"\Athe variable is no key") as raised:
        parse_secret(text, "the variable")
    assert text.decode("latin-1") not in str(raised.value) or not text or text == b"00"


def test_a_key_file_is_of_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(new_secret())
    file.chmod(0o600)
    assert len(read_key_file(file)) == 32
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(InvalidInputError, match="mode 0600"):
            read_key_file(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "missing", "."):
        with pytest.raises(BootseerError):
            read_key_file(tmp_path / name)


def test_another_start_has_another_key() -> None:
    starts = [("j", "1", "0"), ("j", "1", "1"), ("j", "2", "0"), ("k", "1", "0")]
    keys = {key_of(bytes(32), b"list", *start) for start in starts}
    keys |= {key_of(bytes(32), b"tsil", *starts[0]), key_of(b"\1" * 32, b"list", *starts[0])}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}
