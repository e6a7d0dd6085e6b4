"""Containers without root: a user namespace over a FUSE mount made by fusermount3."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.settings.config import Settings
from testbed.images.rootfs import python_root
from testbed.mounts.image_mounts import index, settings_at
from testbed.mounts.sweeping import sweep
from testbed.needs import MissingError, require
from testbed.others import folder_of_others

pytestmark = pytest.mark.needs("fuse")

NOBODY = 65534


@pytest.fixture
def settings() -> Iterator[Settings]:
    require("fuse", programs=["fusermount3"])
    if os.stat("/dev/fuse").st_mode & 0o006 != 0o006:
        raise MissingError("only root may open /dev/fuse on this machine")
    limit = Path("/proc/sys/user/max_user_namespaces")
    if not limit.exists() or not int(limit.read_text()):
        raise MissingError("this kernel has no user namespaces")
    with folder_of_others() as base:
        settings = settings_at(base)
        index(settings, python_root(base / "root"), "py:1")
        if os.geteuid() == 0:
            for name in ("store", "cache", "run"):
                (base / name).mkdir(exist_ok=True)
                subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", base / name], check=True)
        yield settings
        sweep(settings.run_dir.parent, settings)


def as_nobody(command: list[str]) -> list[str]:
    """Root may keep its interpreter where nobody else may look: let it be read, and no more."""
    if os.geteuid() != 0:
        return command
    require(programs=["setpriv"])
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    read = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return ["setpriv", *user, *read, *command]


def test_a_command_runs_as_root_of_its_own_world(settings: Settings) -> None:
    code = "import json, os; open('/etc/new', 'w'); os.chmod('/etc/new', 0o600)"
    code += "; print(json.dumps([os.getuid(), os.stat('/etc/passwd').st_uid, os.getpid()]))"
    flags = ["--store", settings.store_url, "--cache-dir", str(settings.cache_dir)]
    flags += ["--run-dir", str(settings.run_dir)]
    command = [sys.executable, "-m", "bootseer", *flags, "image", "run", "py:1"]
    done = subprocess.run(
        as_nobody([*command, "--", "python3", "-c", code]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 18:
        raise MissingError(f"this kernel does not allow it: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 0, 2]
