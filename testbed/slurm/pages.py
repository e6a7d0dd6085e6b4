"""What the pages show, as files of a cluster's users."""

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from testbed.paths import REPOSITORY
from testbed.slurm.cluster import USERS, SlurmCluster, running_cluster


def block(page: str, language: str, text: str) -> str:
    """The one block of this language on the page that has this text."""
    written = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", written, re.DOTALL | re.MULTILINE)
    (found,) = [str(one) for one in blocks if text in one]
    return found


def give(path: Path, user: str) -> None:
    """Make it, and all in it, this user's."""
    for folder, folders, files in os.walk(path):
        for name in (".", *folders, *files):
            shutil.chown(Path(folder, name), USERS[user], USERS[user])


def prolog_files() -> dict[str, str]:
    """The files of /etc that a node needs, by name, but for the settings."""
    script = (REPOSITORY / "docker/slurm/bootseer").read_text()
    files = {f"slurm/{kind}.d/bootseer": script for kind in ("prolog", "epilog")}
    program = f"BOOTSEER={sys.executable.rpartition('/')[0]}/bootseer\nDEADLINE=20\n"
    folders = block("slurm.md", "text", "/run/bootseer")
    return {**files, "bootseer/slurm.conf": program, "tmpfiles.d/bootseer.conf": folders}


SHARED = "/home/shared"
"""A folder of the cluster on which the store and checkpoints of `simple_cluster` are."""


@contextlib.contextmanager
def simple_cluster(
    files: Mapping[str, str] | None = None, configuration: str = "", **options: Any
) -> Iterator[SlurmCluster]:
    """A cluster with prolog and epilog as docs/slurm.md has them, and a store in a shared folder.
    `files`, `configuration` and `options`: more for `running_cluster`."""
    settings = block("slurm.md", "toml", "run_dir")
    settings = settings.replace("hdfs://namenode:8020", f"file://{SHARED}")
    more = {**prolog_files(), "bootseer/bootseer.toml": settings, **(files or {})}
    lines = block("slurm.md", "ini", "Prolog=") + configuration
    with running_cluster(configuration=lines, files=more, **options) as cluster:
        shared = cluster.home / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        yield cluster
