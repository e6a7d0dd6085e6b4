"""Folders of the demo and its two launches, each on a "node" of its own: empty caches, one store.

Both launches run `bootseer run` in child processes. The store, the image's layers and the
checkpoints are reached through a rate limit that stands for a shared network.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from msgspec import Struct

from bootseer.base.documents import from_line
from bootseer.demo import image, limited
from bootseer.demo.limited import read_account
from bootseer.errors import BootseerError, DeadlineError, UnavailableError, from_oserror
from bootseer.linux.mount_table import mount_points
from bootseer.prefetch.publish.publishing import wait_published
from bootseer.report.sources import TimelineFolder, read_start
from bootseer.settings.config import load_settings
from bootseer.store import TEST_NETWORK, open_store
from bootseer.timeline.otlp import Stage

_LAUNCH_TIMEOUT_S = 600.0
_RECORD_TIMEOUT_S = 120.0
_UNMOUNT_TIMEOUT_S = 30.0
_BLOCK_BYTES = 16 << 20
_CHECKPOINTS = "/checkpoints"
_WHEELS = "/wheels"
_ENVIRONMENT = "/opt/environment"


class Network(Struct, frozen=True):
    """Rates of the simulated network."""

    node_bytes_per_s: int
    """Rate of a node, for everything together."""
    file_bytes_per_s: int
    """The rate of one stored file, as one DataNode's disk serves it."""


class DemoPlan(Struct, frozen=True):
    """Choices of a demo."""

    folder: Path
    network: Network
    checkpoint_bytes: int
    with_image: bool
    with_environment: bool
    with_checkpoint: bool


class Launch(Struct, frozen=True):
    """Figures of one launch."""

    stages: tuple[Stage, ...]
    trainer: dict[str, Any]
    """Result that the training job printed."""
    bytes_read: int
    """Bytes read over the simulated network until the job had ended."""
    checkpoint_bytes_read: int
    """Bytes of these that came from the folder of the checkpoints."""
    wall_s: float
    machine_cpu_s: float
    """CPU seconds of the whole machine: servers are not children of this process."""


def stages_left_out() -> dict[str, str]:
    """Return the reason for each stage of the demo that this machine cannot show."""
    reasons: dict[str, str] = {}
    is_root = os.geteuid() == 0
    device = Path("/dev/fuse")
    has_fuse = device.exists() and os.access(device, os.R_OK | os.W_OK)
    if not has_fuse:
        reasons["image"] = reasons["checkpoint"] = "there is no usable /dev/fuse"
    elif not is_root:
        reasons["image"] = "running in a container's root needs root"
        if shutil.which("fusermount3") is None:
            reasons["checkpoint"] = "mounting without root needs fusermount3 (package fuse3)"
    if importlib.util.find_spec("pip") is None:
        reasons["environment"] = "this interpreter has no pip"
    if shutil.which("tar") is None or shutil.which("ldd") is None:
        reasons["image"] = "building an image needs tar and ldd"
    return reasons


class Demo:
    """Folders and launches of one demo."""

    def __init__(self, plan: DemoPlan, say: Callable[[str], None]) -> None:
        self.plan = plan
        self._say = say
        self.layout = plan.folder / "images" / "demo"
        self.wheels = plan.folder / "wheels"
        self.account = plan.folder / "account"
        self._tally = plan.folder / "checkpoints.account"
        self.requirements: list[str] = []
        self.image_bytes = 0
        """Size of the image, compressed."""

    # ---- building ---------------------------------------------------------------------------

    def build(self) -> None:
        """Write the image, the wheels and the first checkpoint. Raises: BootseerError."""
        try:
            self.plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.plan.with_image:
                self._say("building an image from this interpreter, its packages, and unread bytes")
                self._build_image()
            if self.plan.with_environment:
                self.requirements = image.make_wheels(self.wheels)
            if self.plan.with_checkpoint:
                self._say(f"writing a checkpoint of {self.plan.checkpoint_bytes / 2**30:.2g} GiB")
                self._write_checkpoint()
        except OSError as error:
            if isinstance(error, BootseerError):
                raise
            raise from_oserror(error, f"build the demo in {self.plan.folder}") from error

    def _build_image(self) -> None:
        roots = [self.plan.folder / "root" / name for name in ("base", "packages")]
        for root in roots:
            root.mkdir(parents=True)
        image.build_base(roots[0], image.installed_packages())
        image.build_packages(roots[1])
        # As in any image, a start reads only a small part.
        _write_random(roots[1] / "opt" / "unread.bin", self.plan.checkpoint_bytes // 8)
        environment = {"PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"}
        self.image_bytes = image.write_layout(self.layout, roots, environment)
        shutil.rmtree(self.plan.folder / "root")

    def _write_checkpoint(self) -> None:
        folder = self.plan.folder / "checkpoints"
        folder.mkdir(mode=0o700)
        _write_random(folder / "step-1.bin", self.plan.checkpoint_bytes)

    # ---- launching --------------------------------------------------------------------------

    def _limited(self, folder: Path, **more: str) -> str:
        query = {
            "node_bytes_per_s": self.plan.network.node_bytes_per_s,
            "stream_bytes_per_s": self.plan.network.file_bytes_per_s,
            "account": str(self.account),
            **more,
        }
        return f"limit+{folder.as_uri()}?{urlencode(query)}"

    @property
    def store_url(self) -> str:
        """URL of the shared store, behind the limit."""
        return self._limited(self.plan.folder / "store")

    def _arguments(self) -> list[str]:
        plan = self.plan
        environment = _ENVIRONMENT if plan.with_image else str(plan.folder / "environment")
        interpreter = "python3" if plan.with_image else sys.executable
        arguments: list[str] = []
        if plan.with_image:
            arguments += ["--image", f"oci:{self._limited(self.layout)}"]
        if plan.with_environment:
            found = _WHEELS if plan.with_image else str(self.wheels)
            arguments += ["--setup", self._setup(interpreter, environment, found)]
            arguments += ["--target", environment]
            if plan.with_image:
                arguments += ["--bind", f"{self.wheels}:{_WHEELS}:ro"]
        folder = str(plan.folder / "empty")
        if plan.with_checkpoint:
            folder = _CHECKPOINTS if plan.with_image else str(plan.folder / "mount")
            url = self._limited(plan.folder / "checkpoints", tally=str(self._tally))
            arguments += ["--checkpoint", f"{url}:{folder}"]
        python = f"{environment}/bin/python" if plan.with_environment else interpreter
        return [*arguments, "--", python, "-m", "bootseer.demo.trainer", folder]

    def _setup(self, interpreter: str, environment: str, found: str) -> str:
        packages = " ".join(self.requirements)
        return (
            f"{interpreter} -m venv --without-pip --system-site-packages {environment} && "
            f"{interpreter} -m pip --python {environment}/bin/python install --quiet "
            f"--disable-pip-version-check --no-index --no-deps --ignore-installed "
            f"--find-links {found} {packages}"
        )

    def _environ(self, number: int) -> dict[str, str]:
        environ = {
            **os.environ,
            "BOOTSEER_NODE": f"node-{number}",
            # Nobody reads the timeline elsewhere, and its bytes would count as those of the launch.
            "BOOTSEER_PUBLISH_TIMELINES": "off",
            TEST_NETWORK: limited.__name__,
        }
        if not self.plan.with_image:
            # The image has this interpreter's packages; without one, the job finds them here.
            ours = Path(__file__).resolve().parents[2]
            folders = [ours, *image.installed_packages()]
            environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        return environ

    def launch(self, number: int) -> Launch:
        """Launch the job for the `number`th time, on a node that has nothing.

        Raises: BootseerError with the tail of what the job said.
        """
        plan = self.plan
        node = plan.folder / f"node-{number}"
        timeline = plan.folder / "timeline"
        if not plan.with_image:
            shutil.rmtree(plan.folder / "environment", ignore_errors=True)
        (plan.folder / "empty").mkdir(exist_ok=True)
        (plan.folder / "mount").mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "bootseer", "--store", self.store_url),
            *("--cache-dir", str(node / "cache"), "--run-dir", str(node / "run")),
            *("--timeline-dir", str(timeline), "--job", "demo", "--attempt", str(number)),
            *("run", *self._arguments()),
        ]
        drop_page_cache()
        before, tally = read_account(self.account), read_account(self._tally)
        begin_s, begin_cpu_s = time.monotonic(), _machine_cpu_s()
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_LAUNCH_TIMEOUT_S,
                env=self._environ(number),
            )
        except subprocess.TimeoutExpired as error:
            raise DeadlineError(f"launch {number} did not end in {_LAUNCH_TIMEOUT_S:g} s") from (
                error
            )
        wall_s, cpu_s = time.monotonic() - begin_s, _machine_cpu_s() - begin_cpu_s
        after = read_account(self.account)
        lines = result.stdout.strip().splitlines()
        if result.returncode != 0 or not lines:
            tail = " / ".join(result.stderr.strip().splitlines()[-3:])
            raise BootseerError(f"launch {number} failed with code {result.returncode}: {tail}")
        return Launch(
            stages=tuple(read_start(TimelineFolder(timeline), "demo", number)),
            trainer=from_line(lines[-1], dict[str, Any]),
            bytes_read=after.bytes_read - before.bytes_read,
            checkpoint_bytes_read=read_account(self._tally).bytes_read - tally.bytes_read,
            wall_s=wall_s,
            machine_cpu_s=cpu_s,
        )

    def bytes_written(self) -> int:
        """Return the bytes that the demo has written over the simulated network."""
        return read_account(self.account).bytes_written

    def await_record(self) -> None:
        """Wait until image and record of the first launch are in the store.

        Both are published while the job runs, and after it has ended. Raises: UnavailableError.
        """
        deadline_s = time.monotonic() + _RECORD_TIMEOUT_S
        with open_store((self.plan.folder / "store").as_uri()) as store:
            # The pointer is written last, when everything that it names is there.
            while not any(info.path.endswith(".json") for info in store.list("hot/")):
                if time.monotonic() > deadline_s:
                    raise UnavailableError(
                        f"the first launch was not recorded; see {self.plan.folder}/node-1/run/logs"
                    )
                time.sleep(0.1)

    def remove(self) -> None:
        """Remove the demo's folder; if something is still mounted there, name it and leave all."""
        for number in (1, 2):
            run_dir = self.plan.folder / f"node-{number}" / "run"
            wait_published(load_settings({"run_dir": str(run_dir)}), _UNMOUNT_TIMEOUT_S)
        # Servers unmount a moment after the end of the job.
        deadline_s = time.monotonic() + _UNMOUNT_TIMEOUT_S
        while (mounted := self._mounted()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        if mounted:
            self._say(f"still mounted, so left in place: {', '.join(mounted)}")
            return
        shutil.rmtree(self.plan.folder, ignore_errors=True)

    def _mounted(self) -> list[str]:
        points = [Path(os.fsdecode(point.path)) for point in mount_points()]
        return [str(point) for point in points if point.is_relative_to(self.plan.folder)]


def _write_random(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for begin in range(0, size_bytes, _BLOCK_BYTES):
            file.write(os.urandom(min(_BLOCK_BYTES, size_bytes - begin)))


def _machine_cpu_s() -> float:
    """Return the user and system time of all processors since boot (proc(5), /proc/stat)."""
    user, nice, system = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def drop_page_cache() -> bool:
    """Drop the page cache, as on a node that has just booted; return False without root."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True
