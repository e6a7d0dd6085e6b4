"""What of the demo this machine can show."""

import importlib.util
import os
import shutil
from pathlib import Path


def left_out_of() -> dict[str, str]:
    """stage -> why it is left out. Raises nothing."""
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
