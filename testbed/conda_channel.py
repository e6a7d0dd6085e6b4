"""Small real conda packages, a channel of them in a folder, and environments made of the channel.

py-rattler indexes, solves, links and replaces prefixes, as conda and mamba do.
"""

import asyncio
import hashlib
import io
import json
import platform
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

BUILT_AT = "/build/" + "placeholder_" * 14
"""Prefix that packages are built with: long, so that most other prefixes fit in its place."""


def make_package(
    channel: Path,
    name: str,
    files: Mapping[str, bytes],
    *,
    links: Mapping[str, str] | None = None,
    depends: tuple[str, ...] = (),
    entry_points: tuple[str, ...] = (),
) -> None:
    """Add a package with `files` to the channel; files with BUILT_AT in them are recorded as such.

    "python" gets the version of the running Python, since conda names directories after it. A
    package with `entry_points` ("name = module:function") is a noarch Python package.
    """
    import rattler

    is_noarch = bool(entry_points)
    subdir = "noarch" if is_noarch else str(rattler.Subdir.current())
    paths = []
    for path, data in files.items():
        one = {
            "_path": path,
            "path_type": "hardlink",
            "sha256": hashlib.sha256(data).hexdigest(),
            "size_in_bytes": len(data),
        }
        if BUILT_AT.encode() in data:
            one["prefix_placeholder"] = BUILT_AT
            one["file_mode"] = "binary" if b"\0" in data else "text"
        paths.append(one)
    paths += [
        {"_path": path, "path_type": "softlink", "sha256": hashlib.sha256(b"").hexdigest()}
        for path in links or {}
    ]
    index = {
        "name": name,
        "version": platform.python_version() if name == "python" else "1.0",
        "build": "0",
        "build_number": 0,
        "depends": list(depends),
        "subdir": subdir,
        "arch": None,
        "platform": None,
        "timestamp": 1700000000000,
    }
    info: dict[str, object] = {"paths.json": {"paths": paths, "paths_version": 1}}
    if is_noarch:
        index["noarch"] = "python"
        info["link.json"] = {
            "noarch": {"type": "python", "entry_points": list(entry_points)},
            "package_metadata_version": 1,
        }
    info["index.json"] = index
    contents = {f"info/{path}": json.dumps(document).encode() for path, document in info.items()}
    contents["info/files"] = "".join(f"{one['_path']}\n" for one in paths).encode()
    contents.update(files)
    folder = channel / subdir
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"{name}-{index['version']}-0.tar.bz2", "w:bz2") as archive:
        for path, data in contents.items():
            member = tarfile.TarInfo(path)
            member.size = len(data)
            member.mode = 0o755 if path.startswith("bin/") else 0o644
            member.mtime = 1700000000
            archive.addfile(member, io.BytesIO(data))
        for path, target in (links or {}).items():
            member = tarfile.TarInfo(path)
            member.type = tarfile.SYMTYPE
            member.linkname = target
            archive.addfile(member)


def make_environment(channel: Path, prefix: Path, cache: Path, *specs: str) -> None:
    """Make the environment that `conda create -p PREFIX -c CHANNEL SPECS` makes.

    The package cache, to whose files the environment has hard links, is removed.
    """
    import rattler
    from rattler.index import index_fs

    (channel / "noarch").mkdir(exist_ok=True)

    async def make() -> None:
        await index_fs(channel)
        records = await rattler.solve(
            [channel.as_uri()], list(specs), platforms=[rattler.Subdir.current(), "noarch"]
        )
        await rattler.install(records, prefix, cache_dir=cache, show_progress=False)

    asyncio.run(make())
    shutil.rmtree(cache)
