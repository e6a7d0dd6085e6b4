"""Cost of watching the Python processes of a start."""

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator

from bench.model import (
    Case,
    Column,
    Sample,
    Session,
    TakeSample,
    Variant,
    Workspace,
    at_most,
    ratio,
)
from testbed.needs import MissingError
from testbed.processes import python_command

_PACKAGES = ("torch", "transformers")
# A small training program: imports, a loader, and the first steps, which end with `ready`.
_PROGRAM = """
import torch, transformers
from torch.utils.data import DataLoader
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(torch.randn(64, 64), batch_size=16):
    model(batch).square().mean().backward()
    optimizer.step()
"""
_PLAIN, _WATCHED = "not watched", "watched"


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    if missing := [one for one in _PACKAGES if importlib.util.find_spec(one) is None]:
        raise MissingError(f"pip install {' '.join(missing)}")
    workspace.shared["notes"] = [
        "`bootseer run -- python`: imports of torch and transformers, a loader, four steps of a "
        "small model on one thread; no store is named, nothing is kept; CPU is that of the whole "
        "process, the launcher's included",
    ]
    yield


def _start(*options: str) -> Session:
    @contextlib.contextmanager
    def session(workspace: Workspace) -> Iterator[TakeSample]:
        environ = {**os.environ, "HOME": str(workspace.directory), "OMP_NUM_THREADS": "1"}
        command = python_command(
            "-m", "bootseer", "run", "--set", "keep_caches=off", *options, "--"
        )
        command += python_command("-c", _PROGRAM)

        def take() -> Sample:
            began = time.monotonic()
            pid = os.posix_spawn(command[0], command, environ)
            _, status, used = os.wait4(pid, 0)
            if status:
                raise RuntimeError(f"the start ended with {os.waitstatus_to_exitcode(status)}")
            cpu_s = used.ru_utime + used.ru_stime
            return Sample(time.monotonic() - began, cpu_s={"start": cpu_s})

        yield take

    return session


CASE = Case(
    name="hooks",
    description="A start of torch and transformers whose Python processes are watched, or not.",
    prepare=_prepare,
    variants=(
        Variant(_PLAIN, "`--set trace_python=off`", _start("--set", "trace_python=off")),
        Variant(_WATCHED, "as it is by default", _start()),
    ),
    ratios=(
        ratio(_WATCHED, _PLAIN, "cpu_s", "CPU", at_most(1.01)),
        ratio(_WATCHED, _PLAIN, "wall_s", "time"),
    ),
    columns=(Column("s", "wall_s"), Column("CPU s", "cpu_s")),
    # The CPU time of a start varies by 3 % on a quiet machine: the mean of so many pairs by 0.4 %.
    runs=30,
    quick_runs=5,
)
