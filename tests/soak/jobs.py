"""Jobs of the soak: real commands that check the bytes they read."""

import random
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.soak.site import CHECK_IMAGE, VERSIONS, SoakSite, User

MOUNT_PREFIX = "image-"
"""Prefix of folders on which a job itself mounts an image."""
JOB_S = 150.0
"""Time limit far above Bootseer's deadlines: a job that takes longer hangs."""
Drawn: TypeAlias = tuple[list[str], str, tuple[str, str] | None]
"""Command of a job, its name, and the URL and name of the checkpoint it saves."""

# Imports all modules, may write, and then reads the files again for a while, in which other jobs of
# the node begin and end.
CHECK_ENVIRONMENT = """
import importlib, os, sys, time
parent = os.getppid()
def fail(what):
    # Processes that a killed job left behind see the folder without the job's mount.
    sys.exit(f"WRONG BYTES: {what}" if os.getppid() == parent else "the job was killed")
target, version, writes, ends = *sys.argv[1:4], time.monotonic() + float(sys.argv[4])
sys.path.insert(0, target)
for number in range(150):
    part = importlib.import_module(f"soaked.part_{number:03}")
    if part.VERSION != version or part.TEXT != "x" * 3000:
        fail(f"{part.__file__} is of version {part.VERSION}")
if writes == "writes":
    with open(f"{target}/soaked/written-by-{os.getpid()}", "w") as file:
        file.write("something")
wanted = f"VERSION = {version!r}\\nTEXT = {'x' * 3000!r}\\n"
while time.monotonic() < ends:
    for number in range(150):
        path = f"{target}/soaked/part_{number:03}.py"
        if open(path).read() != wanted:
            fail(f"{path} is another one now")
    time.sleep(0.1)
print("right", flush=True)
"""

# Each checkpoint holds the checksum of its content, so that a partial one is noticed.
CHECK_AND_SAVE = """
import hashlib, os, random, sys, time
folder, number, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def check_mounted():
    # SIGTERM makes a server unmount: the job then sees the folder below the mount.
    if not os.path.ismount(folder):
        sys.exit("nothing is mounted any more")
names = sorted(os.listdir(folder))
check_mounted()
if gone := set(sys.argv[4:]) - set(names):
    sys.exit(f"WRONG BYTES: none of {sorted(gone)}, which were saved, only {names}")
for name in names:
    if name.startswith("step-") and not name.endswith(".tmp"):
        data = open(f"{folder}/{name}", "rb").read()
        if hashlib.sha256(data[64:]).hexdigest().encode() != data[:64]:
            sys.exit(f"WRONG BYTES in checkpoint {name} of {len(data)} bytes")
body = random.Random(number).randbytes(size)
path = f"{folder}/step-{number % 4:05}"
with open(path + ".tmp", "wb") as file:
    file.write(hashlib.sha256(body).hexdigest().encode())
    for begin in range(0, size, 1 << 20):
        file.write(body[begin : begin + (1 << 20)])
        time.sleep(0.02)
    os.fsync(file.fileno())
os.replace(path + ".tmp", path)
check_mounted()
print("right", flush=True)
"""


@dataclass
class SoakJob:
    """Running job."""

    user: User
    name: str
    process: "subprocess.Popen[str]"
    ends_s: float
    saves: tuple[str, str] | None
    """URL and name of the checkpoint that the job saves."""

    def result(self) -> str:
        """Return `right`, `failed: ...` for a reported error, or a finding in capitals."""
        try:
            out, err = self.process.communicate(timeout=max(1, self.ends_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            left = "; ".join(self.user.node._waiting())
            self.process.kill()
            # Do not wait for the pipes: other processes may have inherited them.
            return f"HANGS: {self.name}: {left}"
        if "WRONG BYTES" in err + out:
            return f"WRONG BYTES: {err.strip()[-500:]}"
        if "internal error" in err or re.search(r'File "[^"]*/bootseer/', err):
            return f"TRACEBACK: {err.strip()[-1500:]}"
        if self.process.returncode == 0 and out.strip().endswith("right"):
            if self.saves:
                self.user.saved.setdefault(self.saves[0], set()).add(self.saves[1])
            return "right"
        return f"failed: {self.process.returncode} {err.strip()[-300:]!r}"


def start_job(site: SoakSite, user: User, generator: random.Random) -> SoakJob:
    """Start a job of a random kind."""
    kinds = [_image_run, _image_mount, _environment, _environment]
    kinds += [_checkpoint, _checkpoint, _several]
    words, name, saves = generator.choice(kinds)(site, user, generator)
    process = subprocess.Popen(
        words,
        env=user.node.environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return SoakJob(user, f"{user.uid} {name}", process, time.monotonic() + JOB_S, saves)


def _source(site: SoakSite, generator: random.Random) -> str:
    layout = f"oci:{site.image}:train"
    return generator.choice([layout, f"registry://{site.registry.host}/soak/train:v1"])


def _image_run(site: SoakSite, user: User, generator: random.Random) -> Drawn:
    seed = generator.randrange(10**6)
    source = _source(site, generator)
    check = ("python3", "/data/check.py", "", seed)
    words = user.bootseer("run", "--image", source, "--", *check)
    return words, f"run --image {source[:8]}", None


def _image_mount(site: SoakSite, user: User, generator: random.Random) -> Drawn:
    """Mount an image, read it and unmount it in any case."""
    directory = user.node.base / f"{MOUNT_PREFIX}{generator.randrange(10**6)}"
    ours = shlex.join([sys.executable, "-m", "bootseer"])
    check = shlex.join([sys.executable, "-c", CHECK_IMAGE, str(directory), "seed"])
    script = (
        f"mkdir {directory} && {ours} image mount oci:{site.image}:train {directory} || exit; "
        f"timeout 100 {check}; code=$?; "
        f"{ours} unmount {directory} >&2; ended=$?; rmdir {directory}; "
        "[ $code = 0 ] && exit $ended; exit $code"
    )
    return user.command("sh", "-c", script), "image mount", None


def _set_up(site: SoakSite, user: User, generator: random.Random) -> tuple[list[str], list[str]]:
    version = generator.choice(VERSIONS)
    target = user.node.base / f"env-{generator.randrange(2)}"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-compile"]
    pip += ["--disable-pip-version-check", "--find-links", str(site.wheels)]
    pip += ["--upgrade", "--target", str(target), f"soaked=={version}"]
    options = ["--setup", shlex.join(pip), "--target", str(target)]
    options += ["--mode", generator.choice(["auto", "mount", "link", "extract"])]
    writes, lasts_s = generator.choice(["writes", "reads"]), generator.uniform(0, 4)
    check = [sys.executable, "-c", CHECK_ENVIRONMENT, str(target), version, writes, str(lasts_s)]
    return options, check


def _environment(site: SoakSite, user: User, generator: random.Random) -> Drawn:
    options, check = _set_up(site, user, generator)
    target, version, writes, _ = check[3:]
    name = f"run --setup {version} in {Path(target).name} by {options[-1]}, {writes}"
    return user.bootseer("run", *options, "--", *check), name, None


def _saving(
    site: SoakSite, user: User, generator: random.Random
) -> tuple[list[str], list[str], tuple[str, str]]:
    directory = user.node.base / f"ckpt-{generator.randrange(10**6)}"
    url = generator.choice(site.checkpoint_urls(user))
    number, size = generator.randrange(10**6), generator.randrange(1 << 16, 24 << 20)
    check = [sys.executable, "-c", CHECK_AND_SAVE, str(directory), str(number), str(size)]
    saved = sorted(user.saved.get(url, ()))
    return ["--checkpoint", f"{url}:{directory}"], check + saved, (url, f"step-{number % 4:05}")


def _checkpoint(site: SoakSite, user: User, generator: random.Random) -> Drawn:
    options, check, saves = _saving(site, user, generator)
    words = user.bootseer("run", *options, "--", *check)
    return words, f"run --checkpoint {saves[0][:4]}", saves


def _several(site: SoakSite, user: User, generator: random.Random) -> Drawn:
    """Use an environment and a checkpoint in one start."""
    options, check = _set_up(site, user, generator)
    more, save, saves = _saving(site, user, generator)
    script = f"{shlex.join(check)} && {shlex.join(save)}"
    words = user.bootseer("run", *options, *more, "--", "sh", "-c", script)
    return words, f"run --setup --checkpoint {saves[0][:4]} by {options[-1]}", saves
