"""Building the package writes nothing into its checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from testbed.needs import MissingError
from testbed.paths import REPOSITORY


@pytest.mark.needs("root", modules=["setuptools"])
def test_a_checkout_that_cannot_be_written_can_be_installed(tmp_path: Path) -> None:
    """Regression: setuptools made `build` and `bootseer.egg-info` in it, as it does by default."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        raise MissingError("no mount namespace can be made here")
    script = (
        f"mount --bind {REPOSITORY} {REPOSITORY} && mount -o remount,bind,ro {REPOSITORY} && "
        f"cd {REPOSITORY} && "
        f"! touch here 2> /dev/null && exec {sys.executable} -B -m pip wheel --quiet --no-deps "
        f"--disable-pip-version-check --no-build-isolation --wheel-dir {tmp_path} ."
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("bootseer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    # The targets of the three links, without anything beside them.
    assert {"bootseer/__main__.py", "bootseer/fuse/kernel/wire.py", "bootseer/py.typed"} <= names
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"bootseer"}
