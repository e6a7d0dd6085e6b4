"""The record of a worker's start that the next start uses."""

import os
import sys
from pathlib import Path

import pytest

from bootseer.served.preload import PYTHON_VARIABLE, VARIABLE, record


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", "-u", "train.py", "-x"], ["-u", "train.py"]),
        (["python", "-m", "tool.train", "a"], ["-m", "tool.train"]),
        (["python", "-u", "-m", "tool.train"], ["-u", "-m", "tool.train"]),
        (["python", "train.py"], ["train.py"]),
        (["python", "-X", "dev", "train.py"], None),
        (["python", "-c", "pass"], None),
        (["python"], None),
    ],
)
def test_only_plain_programs_are_served(command: list[str], words: list[str] | None) -> None:
    assert record.program_words(command) == words


def _document(
    monkeypatch: pytest.MonkeyPatch, began: dict[str, str], last: object = None
) -> dict[str, object]:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", "train.py", "a"])
    known = record.digests_of({"PATH": "/bin", "GONE": "1"}, "salt")
    plan = {"salt": "salt", "variables": known, "program": last}
    found = record.make_record(began, plan)
    assert found is not None
    return found


def test_secrets_and_what_says_which_worker_it_is_are_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = {"WANDB_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "DB_PASSWORD": "s3cret"}
    began = {"PATH": "/bin", "RANK": "7", "TORCHELASTIC_RUN_ID": "x", "RUN": "1", **secrets}
    found = _document(monkeypatch, began)
    assert found["extra"] == {"RUN": "1"}
    assert found["missing"] == ["GONE"]
    assert found["varying"] == sorted(secrets)
    assert "s3cret" not in repr(found)
    again = _document(monkeypatch, {**began, "RUN": "2"}, found)
    assert again["varying"] == sorted([*secrets, "RUN"])
    assert _document(monkeypatch, {**began, "RUN": "2"}, again)["varying"] == again["varying"]


def test_modules_of_the_program_itself_are_not_written() -> None:
    names = record.library_modules()
    assert "json" in names
    assert not [name for name in names if name.split(".")[0] in ("tests", "bootseer", "__main__")]


def test_an_interpreter_that_the_job_names_itself_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh")
    shim.chmod(0o700)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setenv("PYTHON_EXEC", "/opt/python")
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    record.prepare_launcher(os.environ)
    assert (os.environ["PYTHON_EXEC"], os.environ.get(PYTHON_VARIABLE)) == ("/opt/python", None)
    monkeypatch.delenv("PYTHON_EXEC")
    record.prepare_launcher(os.environ)
    assert os.environ["PYTHON_EXEC"] == str(shim)
    monkeypatch.delenv("PYTHON_EXEC")
    monkeypatch.setattr(os, "access", lambda *_: False)
    record.prepare_launcher(os.environ)
    assert "PYTHON_EXEC" not in os.environ
