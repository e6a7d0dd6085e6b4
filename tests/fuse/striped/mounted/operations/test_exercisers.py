"""Public file-system exercisers on a real mount: fsx (in Python), and fio's verification."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from testbed.mounts.fuse_mount import check_python, run
from testbed.needs import MissingError
from tests.fuse.striped.support.mounting import checkpoints

pytestmark = pytest.mark.needs("fuse")

UNIT = 64 * 2**10
SMALL = {"stripe_unit_bytes": UNIT, "stripe_count": 3}


def test_fsx(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    with checkpoints(tmp_path, mountpoint, local_url, **SMALL):
        command = [sys.executable, "-m", "tests.fuse.striped.support.fsx"]
        done = run([*command, mountpoint, tmp_path, "1", "250", str(UNIT)])
        assert done.returncode == 0, done.stderr


FIO = """
[global]
directory={directory}
size=12m
bs=160k
verify=crc32c
verify_fatal=1
do_verify={verify}
fallocate=none
end_fsync=1
overwrite=0
file_append=0
create_on_open=1
thread=0

[save]
rw={rw}
numjobs=3
{more}
"""


def test_fio_verifies_what_it_wrote(tmp_path: Path, mountpoint: Path, local_url: str) -> None:
    fio = shutil.which("fio")
    if fio is None:
        raise MissingError("fio is not installed")
    with checkpoints(tmp_path, mountpoint, local_url):
        job = tmp_path / "job"
        for rw, more in (("write", ""), ("read", "verify_only=0"), ("randread", "bs=160k")):
            job.write_text(
                FIO.format(directory=mountpoint, verify=int(rw != "randwrite"), rw=rw, more=more)
            )
            done = run([fio, "--output-format=terse", "--eta=never", str(job)])
            assert done.returncode == 0, f"{rw}: {done.stdout}\n{done.stderr}"
            assert "err=" not in done.stderr


EMPTIED = """
import os, sys
path = sys.argv[1]
for number in range(40):
    open(path, "w").close()
    with open(path, "a") as file:
        file.write(f"line {number}")
    assert open(path).read() == f"line {number}", number
    open(path, "w").close()
    assert open(path).read() == "", number
    os.unlink(path)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    with open(path, "w") as file:
        file.write("x" * number)
    assert os.stat(path).st_size == number
    os.unlink(path)
    open(path, "w").close()
    os.truncate(path, number)
    assert os.stat(path).st_size == number
    with open(path, "w") as file:
        file.write("x" * number)
    assert open(path).read() == "x" * number, number
"""


def test_what_was_emptied_and_closed_is_empty_for_the_next_open(
    tmp_path: Path, mountpoint: Path, local_url: str
) -> None:
    with checkpoints(tmp_path, mountpoint, local_url):
        check_python(EMPTIED, mountpoint / "f")
        assert os.listdir(tmp_path / "stored") != []
