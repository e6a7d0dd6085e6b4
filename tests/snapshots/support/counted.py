"""Small set-ups that count their runs, on this host or in another root."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from bootseer.snapshots.key import SetupRequest


def counted_request(tmp_path: Path, script: str = "", **options: object) -> SetupRequest:
    """Return a set-up that makes `tmp_path/env` and counts its runs in `tmp_path/runs`.

    The key of a set-up with a word that may be a secret, as those of `echo`, takes 50 ms.
    """
    target = tmp_path / "env"
    text = f"echo >> {tmp_path}/runs; mkdir -p {target}; uname > {target}/file; {script}"
    request = SetupRequest(command=["sh", "-e", "-c", text], targets=[str(target)])
    return replace(request, **options)


def runs(tmp_path: Path) -> int:
    runs = tmp_path / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def rooted_runner(root: Path):  # type: ignore[no-untyped-def]
    """Return a runner of commands that have $ROOT as their root, in place of a container."""

    def run(args: Sequence[str], /, **options: object) -> "subprocess.CompletedProcess[bytes]":
        environ = {**os.environ, "ROOT": str(root)}
        return subprocess.run(args, **{**options, "env": environ, "cwd": root})  # type: ignore[call-overload,no-any-return]

    return run


def rooted(tmp_path: Path, name: str, script: str = "") -> SetupRequest:
    root = tmp_path / "roots" / name
    root.mkdir(parents=True)
    text = f"echo >> {tmp_path}/runs; mkdir -p $ROOT/opt/env; uname > $ROOT/opt/env/file; {script}"
    return SetupRequest(
        command=["sh", "-e", "-c", text],
        targets=["/opt/env"],
        root=root,
        runner=rooted_runner(root),
    )
