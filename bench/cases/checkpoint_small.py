"""Cost of small files on a checkpoint mount."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.checkpoint.measure import our_mount
from bench.machine.tmpfs import tmpfs
from bench.model import Case, Column, Ratio, Sample, Workspace, ratio, variant
from testbed.processes import python_command, run_json, tree_cpu_s

_FILE_BYTES = 4096
_DEADLINE_S = 120.0
_FOLDER, _MOUNT, _PLAIN = "folder", "mount", "mount plain"
_PARTS = ("new", "overwritten", "read")


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    count = workspace.sized(1000, 300, 50)
    with tmpfs(workspace.directory, 2**28) as memory:
        workspace.shared.update(memory=memory, count=count)
        workspace.shared["notes"] = [
            f"{count} files of {_FILE_BYTES} bytes in one folder in memory: made, overwritten "
            "(O_TRUNC), and read, one after the other, by a process of its own; each is opened and "
            "closed each time, nothing is synced, and what is read is compared",
            "`folder` is the folder without the mount; each mount is a new one",
        ]
        yield


@contextlib.contextmanager
def _emptied(workspace: Workspace) -> Iterator[Path]:
    folder: Path = workspace.shared["memory"] / "files"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _client(workspace: Workspace, folder: Path) -> dict[str, float]:
    arguments = (str(folder), str(workspace.shared["count"]), str(_FILE_BYTES))
    command = python_command("-m", "bench.checkpoint.small_files", *arguments)
    outcome: dict[str, float] = run_json(command, timeout_s=_DEADLINE_S)
    return outcome


def _sample(workspace: Workspace, outcome: dict[str, float], **cpu_s: float) -> Sample:
    seconds = {f"{part}_s": outcome[f"{part}_s"] for part in _PARTS}
    cpu_s["client"] = outcome["cpu_s"]
    count = float(workspace.shared["count"])
    return Sample(sum(seconds.values()), cpu_s, figures={**seconds, "count": count})


def _folder(workspace: Workspace) -> Sample:
    with _emptied(workspace) as folder:
        return _sample(workspace, _client(workspace, folder))


def _mounted(*flags: str) -> Callable[[Workspace], Sample]:
    def take(workspace: Workspace) -> Sample:
        with (
            _emptied(workspace) as folder,
            our_mount(workspace, folder.as_uri(), *flags) as server,
        ):
            before_s = tree_cpu_s(server.pid)
            outcome = _client(workspace, server.mountpoint)
            return _sample(workspace, outcome, server=tree_cpu_s(server.pid) - before_s)

    return take


def _derive(sample: Sample) -> Mapping[str, float]:
    count = sample.figures["count"]
    return {f"{part}_per_file_s": sample.figures[f"{part}_s"] / count for part in _PARTS}


def _ratios(top: str) -> tuple[Ratio, ...]:
    return tuple(ratio(top, _FOLDER, f"{part}_s", f"{part} files, time") for part in _PARTS)


CASE = Case(
    name="checkpoint-small",
    description="A thousand files of 4 KiB on a checkpoint mount of a folder, and in that folder.",
    prepare=_prepare,
    variants=(
        variant(_FOLDER, "the folder itself, in memory", _folder),
        variant(_MOUNT, "bootseer checkpoint mount of the folder", _mounted()),
        variant(_PLAIN, "the same with --layout plain", _mounted("--layout", "plain")),
    ),
    ratios=(*_ratios(_MOUNT), *_ratios(_PLAIN), ratio(_MOUNT, _PLAIN, "wall_s", "time")),
    columns=(
        *(Column(f"{part} ms/file", f"{part}_per_file_s", scale=1e3, digits=3) for part in _PARTS),
        Column("mount CPU s", "server_cpu_s"),
    ),
    runs=5,
    quick_runs=2,
    derive=_derive,
)
