"""Images of several layers with a shell, for the tests of the snapshotter."""

import functools
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed.images.building import LayoutBuilder, Member, tar_of

_PROGRAMS = ("sh", "cat", "ls", "sleep", "sha256sum", "stat", "rm", "mkdir", "tail")
_FOLDERS = ("proc", "sys", "dev", "tmp", "etc", "root", "run")
LARGE_BYTES = 2**20
"""Size of a file that no start reads."""


@functools.cache
def shell_layer() -> Sequence[Member]:
    """Return a root file system with a shell and a few tools of this machine."""
    files = {Path("/usr/bin") / name: shutil.which(name) for name in _PROGRAMS}
    sources = {target: Path(source).resolve() for target, source in files.items() if source}
    listed = subprocess.run(["ldd", *sources.values()], capture_output=True, text=True, check=True)
    libraries = {Path(path) for path in re.findall(r"(/\S+) \(0x", listed.stdout)}
    sources |= {path: path for path in libraries}
    merged = {path.name for path in Path("/").iterdir() if path.is_symlink()}
    members = [Member(f"{name}/", "d") for name in _FOLDERS]
    # Debian has links into /usr in place of /bin and /lib.
    names = sorted({"bin", *(path.parts[1] for path in libraries)} & merged | {"bin"})
    members += [Member(name, "l", link=f"usr/{name}") for name in names]
    for target, source in sorted(sources.items()):
        parts = target.parts[1:]
        path = "/".join(parts if parts[0] == "usr" or parts[0] not in names else ("usr", *parts))
        members.append(Member(path, data=source.read_bytes(), mode=stat.S_IMODE(0o755)))
    members.append(Member("usr/share/large", data=os.urandom(LARGE_BYTES)))
    return members


def layers(name: str) -> list[Sequence[Member]]:
    """Return four layers: one that no other image has, a root with a shell, and two more on top."""
    return [
        [Member(f"opt/{name}", data=f"{name}\n".encode()), Member("opt/gone", data=b"hidden\n")],
        shell_layer(),
        [Member("opt/base", data=b"base\n")],
        [Member("opt/top", data=f"top of {name}\n".encode()), Member("opt/.wh.gone")],
    ]


def add_image(
    layout: LayoutBuilder, contents: Sequence[Sequence[Member]], tag: str
) -> Mapping[str, object]:
    """Add an image that runs a shell to the layout; return the descriptor of its manifest."""
    return layout.add_image(
        [tar_of(members) for members in contents],
        tag=tag,
        compression="zstd",
        run={"Cmd": ["/bin/sh"], "Env": ["PATH=/usr/bin:/bin"]},
    )
