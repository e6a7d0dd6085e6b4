"""Containers without root: a user namespace over a FUSE mount by fusermount3."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.settings.config import Settings
from testbed.mounts.image_mounts import index, settings_at
from testbed.mounts.sweeping import sweep
from testbed.users import folder_for_all_users, give_to_nobody, unprivileged, with_device_mode

pytestmark = pytest.mark.needs("fuse")


@pytest.fixture
def prefix() -> tuple[str, ...]:
    """Return the words that run a command as an ordinary user."""
    return unprivileged()


@pytest.fixture
def settings(prefix: tuple[str, ...], small_root: Path) -> Iterator[Settings]:
    with folder_for_all_users() as base:
        settings = settings_at(base)
        index(settings, small_root, "py:1")
        for name in ("store", "cache", "run"):
            (base / name).mkdir(exist_ok=True)
            give_to_nobody(base / name)
        yield settings
        sweep(settings.run_dir.parent, settings)


@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_a_command_runs_as_root_of_its_own_world(
    settings: Settings, prefix: tuple[str, ...], mode: int
) -> None:
    code = "import json, os; open('/etc/new', 'w'); os.chmod('/etc/new', 0o600)"
    code += "; print(json.dumps([os.getuid(), os.stat('/etc/passwd').st_uid, os.getpid()]))"
    flags = ["--store", settings.store_url, "--cache-dir", str(settings.cache_dir)]
    flags += ["--run-dir", str(settings.run_dir)]
    command = [
        *with_device_mode(mode),
        *prefix,
        sys.executable,
        "-m",
        "bootseer",
        *flags,
        "run",
        "--image",
        "py:1",
    ]
    done = subprocess.run(
        [*command, "--", "python3", "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    user, owner, _ = json.loads(done.stdout)
    assert (user, owner) == (0, 0)
