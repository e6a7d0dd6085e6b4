"""Examples of the documentation's pages, as files of a Slurm cluster."""

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


def page_block(page: str, language: str, text: str) -> str:
    """Return the only block of this language on the page that contains `text`."""
    written = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{language}\n(.*?)^```", written, re.DOTALL | re.MULTILINE)
    (found,) = [str(one) for one in blocks if text in one]
    return found


def give_to_user(path: Path, user: str) -> None:
    """Make a user of the cluster the owner of a tree."""
    for folder, folders, files in os.walk(path):
        for name in (".", *folders, *files):
            shutil.chown(Path(folder, name), USERS[user], USERS[user])


def prolog_files() -> dict[str, str]:
    """Return the files of /etc that a node needs except for the settings, by name."""
    script = (REPOSITORY / "docker/slurm/bootseer").read_text()
    files = {f"slurm/{kind}.d/bootseer": script for kind in ("prolog", "epilog")}
    program = f"BOOTSEER={sys.executable.rpartition('/')[0]}/bootseer\nDEADLINE=20\n"
    folders = page_block("slurm.md", "text", "/run/bootseer")
    return {**files, "bootseer/slurm.conf": program, "tmpfiles.d/bootseer.conf": folders}


SHARED = "/home/shared"
"""Folder with the store and the checkpoints of `simple_cluster`."""


@contextlib.contextmanager
def simple_cluster(
    files: Mapping[str, str] | None = None, configuration: str = "", **options: Any
) -> Iterator[SlurmCluster]:
    """Yield a cluster with the prolog and epilog of docs/slurm.md, and a store in a shared folder.

    `files`, `configuration` and `options` are added to those of `running_cluster`.
    """
    settings = page_block("slurm.md", "toml", "run_dir")
    settings = settings.replace("hdfs://namenode:8020", f"file://{SHARED}")
    more = {**prolog_files(), "bootseer/bootseer.toml": settings, **(files or {})}
    lines = page_block("slurm.md", "ini", "Prolog=") + configuration
    with running_cluster(configuration=lines, files=more, **options) as cluster:
        shared = cluster.home / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        yield cluster
