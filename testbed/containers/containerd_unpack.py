"""Images as other programs unpack them: containerd and umoci.

`UnpackingContainerd` runs the installed daemon on folders and a socket of its own, without CRI and
without plug-ins that need the machine's. Trees are mounted read-only, and read by another process,
like every mounted tree of the tests.
"""

import contextlib
import hashlib
import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bootseer.base.closing import Closing
from testbed.mounts.image_mounts import TIMEOUT_S
from testbed.needs import require
from testbed.waiting import wait_started

_CONFIG = """
version = 2
root = "{base}/root"
state = "{base}/state"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.internal.v1.restart",
  "io.containerd.internal.v1.tracing", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{base}/socket"
[plugins."io.containerd.internal.v1.opt"]
path = "{base}/opt"
"""


def _chain_id(layout: Path) -> str:
    """Return containerd's name for all layers of the only image of a layout, unpacked."""

    def read(digest: str) -> Any:
        return json.loads((layout / "blobs" / digest.replace(":", "/")).read_text())

    index = json.loads((layout / "index.json").read_text())
    config = read(read(index["manifests"][0]["digest"])["config"]["digest"])
    chain_id, *others = config["rootfs"]["diff_ids"]
    for diff_id in others:
        both = f"{chain_id} {diff_id}".encode()
        chain_id = f"sha256:{hashlib.sha256(both).hexdigest()}"
    return str(chain_id)


class RefusedError(Exception):
    """Error of a program that refuses to unpack an image; the text is the program's own."""


class UnpackingContainerd(Closing):
    """A containerd that unpacks images, until closed."""

    def __init__(self) -> None:
        require("root", programs=["containerd", "ctr"])
        # A socket's path must be short.
        self._base = Path(tempfile.mkdtemp(prefix="containerd-"))
        (self._base / "config.toml").write_text(_CONFIG.format(base=self._base))
        with (self._base / "log").open("wb") as log:
            self._daemon = subprocess.Popen(
                ["containerd", "--config", self._base / "config.toml"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_started(
                self._daemon,
                lambda: not self._ctr("version").returncode,
                (self._base / "log").read_text,
            )
        except AssertionError:
            self.close()
            raise

    def _ctr(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["ctr", "--address", self._base / "socket", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )

    @contextlib.contextmanager
    def unpacked(
        self, layout: Path, directory: Path, snapshotter: str = "overlayfs"
    ) -> Iterator[Path]:
        """Yield `directory` with the unpacked image "latest" of an OCI layout mounted on it.

        Raises: RefusedError.
        """
        archive = self._base / "image.tar"
        subprocess.run(["tar", "-C", layout, "-cf", archive, "."], check=True, timeout=TIMEOUT_S)
        done = self._ctr(
            "images", "import", "--base-name", "zoo", "--snapshotter", snapshotter, archive
        )
        archive.unlink()
        view = ("snapshots", "--snapshotter", snapshotter)
        mounted = False
        try:
            if done.returncode:
                raise RefusedError(done.stderr)
            directory.mkdir(exist_ok=True)
            # Not `ctr images mount`, which always uses overlayfs.
            done = self._ctr(*view, "view", "--target", directory, "view", _chain_id(layout))
            assert done.returncode == 0, done.stderr
            # Relative paths, since the options of 100 layers with absolute ones exceed a page.
            snapshots = self._base / f"root/io.containerd.snapshotter.v1.{snapshotter}/snapshots"
            command = shlex.split(done.stdout)
            options = command[-1].replace(f"{snapshots}/", "")
            command = [*command[:-1], options] if "lowerdir" in options else command
            subprocess.run(command, cwd=snapshots, check=True, timeout=TIMEOUT_S)
            mounted = True
            yield directory
        finally:
            if mounted:
                subprocess.run(["umount", directory], check=True, timeout=TIMEOUT_S)
            self._ctr(*view, "rm", "view")
            self._ctr("images", "rm", "--sync", "zoo:latest")

    def close(self) -> None:
        """End the daemon and remove its folders."""
        self._daemon.terminate()
        self._daemon.wait(TIMEOUT_S)
        shutil.rmtree(self._base, ignore_errors=True)


def umoci_unpacked(layout: Path, bundle: Path) -> Path:
    """Unpack the image "latest" of a layout by umoci; return its root. Raises: RefusedError."""
    require(programs=["umoci"])
    done = subprocess.run(
        ["umoci", "unpack", "--image", f"{layout}:latest", bundle],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RefusedError(done.stderr)
    return bundle / "rootfs"
