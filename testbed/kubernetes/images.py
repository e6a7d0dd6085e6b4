"""Images that the tests run, as OCI layouts: a shell, a trainer, and bootseer-node.

The first two hold nothing of Bootseer, and the trainer has an ordinary size. They are kept in the
cache's folder.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from testbed.containers.node_image import NAME, node_image
from testbed.images.layout import OciLayout
from testbed.images.torch_image import TAGS, torch_image
from testbed.kubernetes.programs import LOCK_S, cache_folder
from testbed.needs import MissingError
from testbed.packages import Packages
from testbed.waiting import locked

# Packages of many trainers besides torch and pandas: together more than half a gigabyte,
# compressed.
_PACKAGES = ("transformers", "scipy", "scikit-learn", "pyarrow", "opencv-python-headless")
_PYTHON = "3.11"
_SITE = f"usr/local/lib/python{_PYTHON}/dist-packages"
_PIP_DEADLINE_S = 900.0
_CONFIG = ("--config.env=PATH=/usr/local/bin:/usr/bin:/bin", "--config.workingdir=/job")
# A user's trainer, which knows the folder of its checkpoints and nothing of Bootseer.
_TRAINER = '''"""Trains until it is told to stop, and saves a checkpoint now and then."""

import argparse
import os
import signal
import sys
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints")
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--size-mib", type=int, default=8)
parser.add_argument("--pause", type=float, default=0.0)
arguments = parser.parse_args()
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
print("first line", torch.ones(2).sum().item(), flush=True)


def save(step):
    path = os.path.join(arguments.checkpoints, f"step-{step:06d}.pt")
    weights = torch.full((arguments.size_mib * 2**18,), float(step))
    torch.save({"step": step, "weights": weights}, path)
    print("saved", step, flush=True)


step = 0
while step < arguments.steps and not stopping:
    step += 1
    time.sleep(arguments.pause)
    if arguments.checkpoints and step % arguments.every == 0:
        try:
            save(step)
        except (OSError, RuntimeError) as error:
            print("not saved", step, error, flush=True)
if stopping and arguments.checkpoints:
    save(step + 1)
    print("last checkpoint", step + 1, flush=True)
print("ended at", step, flush=True)
'''


def shell_image() -> tuple[Path, str]:
    """Return a layout with busybox alone, and its tag."""
    cache = cache_folder() / "images"
    layout = cache / "shell"
    with _locked(cache):
        if not layout.is_dir():
            busybox = Packages(cache / "packages").unpacked("bookworm", "busybox-static")
            work = _emptied(cache / "shell-work")
            tree = work / "tree"
            (tree / "bin").mkdir(parents=True)
            (tree / "tmp").mkdir()
            (tree / "etc").mkdir()
            # A static program cannot load other name services.
            (tree / "etc/nsswitch.conf").write_text("hosts: files\n")
            program = tree / "bin/busybox"
            shutil.copy(busybox / "bin/busybox", program)
            listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True)
            for name in listed.stdout.split():
                if name != "busybox":
                    os.symlink("busybox", tree / "bin" / name)
            build_image(work / "layout", "1", {tree: "/"}, ["--config.env=PATH=/bin"])
            (work / "layout").rename(layout)
            shutil.rmtree(work)
    return layout, "1"


def trainer_image(say: Callable[[str], None]) -> tuple[Path, str]:
    """Return a layout with Python, torch and a program that saves checkpoints; and its tag."""
    cache = cache_folder() / "images"
    layout = cache / "trainer"
    with _locked(cache):
        if not layout.is_dir():
            base = torch_image(cache, say)
            say("image: the trainer")
            work = _emptied(cache / "trainer-work")
            shutil.copytree(base, work / "layout", copy_function=os.link)
            (work / "layout/index.json").unlink()
            target = OciLayout(work / "layout")
            _pip(work / "packages" / _SITE)
            layers = [*OciLayout(base).layers(TAGS[0]), target.add_tree(work / "packages")]
            program = work / "program/job"
            program.mkdir(parents=True)
            (program / "train.py").write_text(_TRAINER)
            target.write_index({"1": [*layers, target.add_tree(work / "program")]})
            _umoci("config", "--image", f"{target.folder}:1", *_CONFIG)
            target.folder.rename(layout)
            shutil.rmtree(work)
    return layout, "1"


def bootseer_image() -> tuple[Path, str]:
    """Return the layout and tag of this checkout's image of Bootseer's pods."""
    cache = cache_folder() / "images"
    with _locked(cache):
        return node_image(cache), NAME


def _locked(cache: Path) -> AbstractContextManager[None]:
    cache.mkdir(parents=True, exist_ok=True)
    return locked(cache / "lock", LOCK_S, MissingError)


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _pip(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--target", str(target), "--python-version", _PYTHON, "--only-binary=:all:"]
    done = subprocess.run(
        [*command, *_PACKAGES], capture_output=True, text=True, timeout=_PIP_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        raise MissingError(f"the trainer's image cannot be built: {done.stderr.strip()[-300:]}")


def build_image(
    layout: Path, tag: str, trees: dict[Path, str], config: list[str] | None = None
) -> None:
    """Make an image in a new OCI layout by umoci, with a layer for each tree."""
    image = f"{layout}:{tag}"
    _umoci("init", "--layout", str(layout))
    _umoci("new", "--image", image)
    for tree, where in trees.items():
        _umoci("insert", "--image", image, str(tree), where)
    if config:
        _umoci("config", "--image", image, *config)


def _umoci(*command: str) -> None:
    done = subprocess.run(
        ["umoci", *command], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"umoci {command[0]}: {done.stderr[-500:]}"
