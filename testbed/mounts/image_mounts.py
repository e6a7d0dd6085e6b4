"""Mounted images for tests.

No function touches a mount in the test's own process: a reader that is stuck in a FUSE file system
cannot be killed, but its parent can go on.
"""

import base64
import contextlib
import json
import marshal
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from bootseer.errors import BootseerError
from bootseer.prefetch.images.mount import MountedImage, mount_image
from bootseer.prefetch.index.records import ImageRecord
from bootseer.prefetch.publish.indexing import index_image
from bootseer.prefetch.serve.plan import ServeOptions
from bootseer.prefetch.sources import open_source
from bootseer.settings.config import Settings, load_settings
from bootseer.store import open_store
from testbed.mounts.sweeping import sweep
from testbed.paths import REPOSITORY

TIMEOUT_S = 60.0
Completed: TypeAlias = "subprocess.CompletedProcess[str]"


def settings_at(base: Path, **changes: Any) -> Settings:
    """Return the settings of a node whose store, cache and run folder are below `base`."""
    flags = {
        "store_url": (base / "store").as_uri(),
        "cache_dir": str(base / "cache"),
        "run_dir": str(base / "run"),
        "timeline_dir": str(base / "timeline"),
        "workload": "train",
    }
    return replace(load_settings(flags), deadline_s=10.0, **changes)


def index(settings: Settings, source: Path, reference: str) -> ImageRecord:
    """Index the directory `source` as an image in the store."""
    settings.cache_dir.mkdir(parents=True, exist_ok=True)
    with (
        open_store(settings.store_url) as store,
        open_source(str(source), settings.cache_dir) as opened,
    ):
        return index_image(opened, store, settings.cache_dir, reference=reference)


def drop_cache(settings: Settings) -> None:
    """Remove the node's cache, as on a node that never used an image."""
    shutil.rmtree(settings.cache_dir, ignore_errors=True)


@contextlib.contextmanager
def mounted(
    settings: Settings, reference: str, directory: Path, **options: Any
) -> Iterator[MountedImage]:
    """Mount an image; at the end of the block no mount and no server is left.

    `options` are those of the server, or the settings `record`, `prefetch` and `record_window_s`.
    """
    directory.mkdir(exist_ok=True)
    names = ("record", "prefetch", "record_window_s")
    settings = replace(settings, **{one: options.pop(one) for one in names if one in options})
    image = mount_image(settings, reference, directory, ServeOptions(**options))
    try:
        yield image
    finally:
        with contextlib.suppress(BootseerError):
            image.close()
        sweep(settings.run_dir.parent, settings)


def run_program(code: str, *arguments: object, timeout_s: float = TIMEOUT_S) -> str:
    """Run a Python program in a child process and return its output; fail the test if it fails."""
    return start_program(code, *arguments).communicate_checked(timeout_s)


class ChildProgram(subprocess.Popen[str]):
    """Running Python program in a child process."""

    def communicate_checked(self, timeout_s: float = TIMEOUT_S) -> str:
        """Return the program's output; fail the test if it fails or hangs."""
        try:
            out, err = self.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"a reader did not end within {timeout_s} s") from None
        assert self.returncode == 0, err
        return out


def start_program(code: str, *arguments: object) -> ChildProgram:
    """Start a Python program in a child process."""
    return ChildProgram(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
    )


def tree_in_child(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Return `rootfs.tree_of(root)`, read by a child process."""
    text = run_program(
        "import base64, marshal, sys; from pathlib import Path;"
        "from testbed.images.rootfs import tree_of;"
        "print(base64.b64encode(marshal.dumps(tree_of(Path(sys.argv[1])))).decode())",
        root,
    )
    tree: dict[bytes, tuple[object, ...]] = marshal.loads(base64.b64decode(text))
    return tree


def checksums_in_child(paths: list[Path]) -> list[str]:
    """Return the SHA-256 of each file, or the name of the error, read by a child process."""
    text = run_program(
        """
import errno, hashlib, json, sys
found = []
for path in sys.argv[1:]:
    try:
        with open(path, "rb") as file:
            found.append(hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        found.append(errno.errorcode[error.errno])
print(json.dumps(found))
""",
        *paths,
    )
    found: list[str] = json.loads(text)
    return found


def bootseer(settings: Settings, *arguments: object, timeout_s: float = TIMEOUT_S) -> Completed:
    """Run the command line with these settings; fail the test if it hangs."""
    with start_bootseer(settings, *arguments) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"bootseer {arguments} did not end within {timeout_s} s") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_bootseer(settings: Settings, *arguments: object) -> "subprocess.Popen[str]":
    """Start the command line with these settings."""
    flags = ["--store", settings.store_url, "--cache-dir", settings.cache_dir]
    flags += ["--run-dir", settings.run_dir, "--workload", settings.workload]
    flags += ["--timeline-dir", settings.timeline_dir]
    return subprocess.Popen(
        [sys.executable, "-m", "bootseer", *map(str, flags), *map(str, arguments)],
        # Without this, each start is followed by a process that copies its timeline to the store.
        env={"BOOTSEER_PUBLISH_TIMELINES": "off", **os.environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
