"""Misspelt URLs are refused, as they would become new, empty folders."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.base.urls import absolute_url
from bootseer.errors import InvalidInputError
from bootseer.store.paths import split_scheme


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("s3//bucket/ckpt", "s3://bucket/ckpt"),
        ("s3:/bucket", "s3://bucket"),
        ("hdfs//namenode:8020/x", "hdfs://namenode:8020/x"),
        ("hdfs:namenode/x", "hdfs://namenode/x"),
        ("arrow_hdfs//n/x", "arrow_hdfs://n/x"),
        ("file:/mnt/store", "file:///mnt/store"),
        ("file//mnt/store", "file:///mnt/store"),
    ],
)
def test_a_slip_of_the_pen_is_refused_with_what_is_meant(text: str, meant: str) -> None:
    for check in (absolute_url, split_scheme):
        with pytest.raises(InvalidInputError, match=re.escape(f"is {meant} meant?")):
            check(text)


@pytest.mark.parametrize("text", ["./s3//x", "/s3//x", "data//x", "s3", "s3/x", "file", "a:b/c"])
def test_folders_stay_folders(text: str) -> None:
    assert absolute_url(text) == str(Path(text).absolute())
    assert split_scheme(text) == ""


def test_no_secret_is_shown() -> None:
    with pytest.raises(InvalidInputError) as caught:
        absolute_url("s3:/key:secret@bucket/x?token=abc")
    assert "abc" not in str(caught.value)


def test_run_refuses_before_it_makes_anything(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bootseer", "run"),
            *("--checkpoint", f"s3//b/c:{tmp_path}/mnt", "--", "true"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert "is s3://b/c meant?" in done.stderr
    assert list(tmp_path.iterdir()) == []
