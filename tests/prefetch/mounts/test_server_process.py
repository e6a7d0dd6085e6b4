"""Server processes that are started before their plan is known."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from bootseer.errors import BootseerError, NotFoundError, exit_code_of
from bootseer.linux.processes import wait_readable
from bootseer.served.processes import TREE, start
from bootseer.served.service import log_path, read_state, services_dir
from testbed.mounts.image_mounts import bootseer, settings_at
from testbed.waiting import wait_for

_END_S = 30.0


def _children() -> set[int]:
    # Each thread lists its own children; those of other tests may end meanwhile.
    found: set[int] = set()
    for one in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, one.read_text().split()))
    return found


def test_a_server_that_nobody_needs_ends(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    with start(TREE, settings.run_dir) as process:
        assert process.pid in _children()
    assert process.pid not in _children()
    assert log_path(settings.run_dir, process.identity).stat().st_mode & 0o777 == 0o600
    assert not services_dir(settings.run_dir).exists()


def test_a_server_ends_with_whoever_began_it(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    code = f"""
import os, signal
from bootseer.served.processes import TREE, start
from testbed.mounts.image_mounts import settings_at
from pathlib import Path
process = start(TREE, settings_at(Path({str(tmp_path)!r})).run_dir, identity="orphan")
print(process.pid, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        watched = os.pidfd_open(int(one.stdout.readline()))
        one.send_signal(signal.SIGKILL)
    try:
        assert wait_readable([watched], _END_S)
    finally:
        os.close(watched)
    assert log_path(settings.run_dir, "orphan").read_text() == ""


@pytest.mark.needs("fuse")
def test_a_server_that_waits_for_its_index_ends_with_whoever_brings_it(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    code = f"""
import signal
from bootseer.prefetch.serve.plan import begin_serving
from testbed.mounts.image_mounts import bootseer, settings_at
from pathlib import Path
here = Path({str(tmp_path)!r})
(here / "tree").mkdir()
serving = begin_serving(settings_at(here), "image:1", "sha256:" + "0" * 64, here / "tree")
print(serving.plan.state_dir, flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        state_dir = Path(one.stdout.readline().strip())
        wait_for(lambda: read_state(state_dir), "the server's state")
        one.send_signal(signal.SIGKILL)
    wait_for(lambda: not state_dir.exists(), "the server's end")
    log = log_path(settings.run_dir, state_dir.name)
    wait_for(lambda: "read the index" in log.read_text(), "the reason in its log")
    assert "NotFoundError" not in log.read_text()


def test_an_image_that_is_not_there_leaves_no_server(tmp_path: Path) -> None:
    settings, before = settings_at(tmp_path), _children()
    # A sweep would remove a folder without a server, and a pull may take minutes.
    done = bootseer(settings, "run", "--image", "nobody:1", "--", "true")
    assert done.returncode == exit_code_of(NotFoundError(""))
    assert not _children() - before
    # Beside the folder of the attendant.
    assert not any(services_dir(settings.run_dir).glob("[0-9a-f]" * 16))


def test_no_folder_for_its_log(tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    settings.run_dir.write_text("a file")
    with pytest.raises(BootseerError, match="run"):
        start(TREE, settings.run_dir)


@pytest.mark.usefixtures("fresh_interpreters")
@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        (
            "bootseer.prefetch.container.container",
            ("prefetch.serve.server", "prefetch.sources", "prefetch.images.pull"),
        ),
        ("bootseer.prefetch.serve.plan", ("fuse.kernel.server", "blob", "store")),
        # The first read waits for the server.
        ("bootseer.prefetch.serve.server", ("lzma", "random", "shutil", "subprocess")),
    ],
)
def test_a_start_loads_no_more_than_it_needs(module: str, unwanted: tuple[str, ...]) -> None:
    """Every start of a container pays for each module."""
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    assert module in loaded
    for name in unwanted:
        begins = (f"{name}.", f"bootseer.{name}.")
        assert not [one for one in loaded if f"{one}.".startswith(begins)]
