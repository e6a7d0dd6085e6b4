"""The harness notices wrong errors, too much memory and too much time."""

from pathlib import Path

import pytest
from hypothesis import strategies as st

from tests.fuzz import harness
from tests.fuzz.harness import FuzzError, Target, fuzz


def _raises(data: bytes) -> None:
    raise KeyError(data)


def _takes_memory(data: bytes) -> None:
    bytearray(2**30)


def _takes_time(data: bytes) -> None:
    while True:
        pass


@pytest.mark.parametrize("read", [_raises, _takes_memory, _takes_time])
def test_a_failure_is_noticed_and_its_input_kept(
    read: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "FAILURES", tmp_path / "fuzz")
    target = Target("x", st.just(b"input"), read, (ValueError,), memory_bytes=2**27)  # type: ignore[arg-type]
    with pytest.raises(FuzzError, match=r"replay it: .* -m tests\.fuzz x "):
        fuzz(target, 5, 1, cpu_s=1)
    (kept,) = (tmp_path / "fuzz").iterdir()
    assert kept.read_bytes() == b"input"


def test_a_documented_error_is_no_failure() -> None:
    fuzz(Target("x", st.binary(), _raises, (KeyError,)), 5, 1, cpu_s=5)
