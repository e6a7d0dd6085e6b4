"""A process that has imported torch and forks for each check, since the import takes seconds.

The program reads requests (a line of JSON each) from stdin and answers on stdout. A request names a
function of a module in this folder, which is run by one child, or by several as ranks of a gloo
group. The process itself does not use torch, so that a fork is safe.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bootseer.linux.processes import wait_readable
from testbed.paths import REPOSITORY

# Bytecode is made at the first import, which takes a minute on a slow machine.
_START_S = 110.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a check by rank."""

    codes: list[int]
    """0; 1 after an exception; -9 if killed, by itself or at the deadline."""
    results: list[Any]
    """The function's result, or the traceback."""


class TorchHost:
    """Client of the process; for one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuse.formats.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        )
        assert self._answer(_START_S) == "ready"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def attempt(
        self, function: str, *arguments: Any, ranks: int = 0, deadline_s: float = 60.0
    ) -> Outcome:
        """Run `module:function`, or with `ranks` as `function(rank, ...)` in a group of that
        size."""
        request = {
            "function": function,
            "arguments": [str(a) if isinstance(a, Path) else a for a in arguments],
            "ranks": ranks,
            "deadline_s": deadline_s,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._answer(deadline_s + _START_S)
        return Outcome(answer["codes"], answer["results"])

    def check(self, function: str, *arguments: Any, ranks: int = 0) -> list[Any]:
        """Run a function that must succeed (see `attempt`); return the results by rank."""
        outcome = self.attempt(function, *arguments, ranks=ranks)
        assert not any(outcome.codes), "\n".join(map(str, outcome.results))
        return outcome.results

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        if not wait_readable([self._process.stdout.fileno()], timeout_s):
            raise TimeoutError("the process with torch does not answer")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process with torch has ended")
        return json.loads(line)


# ---- the program ------------------------------------------------------------------------------


def _child(request: dict[str, Any], rank: int | None, rendezvous: Path, result: Path) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        module, _, name = request["function"].partition(":")
        function = getattr(importlib.import_module(f"tests.fuse.formats.{module}"), name)
        arguments = request["arguments"]
        if rank is not None:
            import torch.distributed as dist

            dist.init_process_group(
                "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=request["ranks"]
            )
            # A rank that ended at once would refuse those that still connect to it.
            dist.barrier()
            arguments = [rank, *arguments]
        value = function(*arguments)
        result.write_text(json.dumps(value))
        code = 0
    except BaseException:
        result.write_text(json.dumps(traceback.format_exc()))
    finally:
        os._exit(code)


def _run(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    ranks: list[int | None] = list(range(request["ranks"])) or [None]
    results = [folder / f"{number}.json" for number in range(len(ranks))]
    pids = []
    for rank, result in zip(ranks, results, strict=True):
        pid = os.fork()
        if pid == 0:
            _child(request, rank, folder / "rendezvous", result)
        pids.append(pid)
    deadline = time.monotonic() + request["deadline_s"]
    codes = []
    for pid in pids:
        handle = os.pidfd_open(pid)
        if not wait_readable([handle], deadline - time.monotonic()):
            os.kill(pid, signal.SIGKILL)
        os.close(handle)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    values = [json.loads(path.read_text()) if path.exists() else None for path in results]
    return {"codes": codes, "results": values}


def main() -> None:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    # Modules that each rank would import by itself: sharded tensors import the compiler.
    for name in ("format_checks", "group_checks"):
        importlib.import_module(f"tests.fuse.formats.{name}")
    for name in ("torch._dynamo", "torch.onnx", "torch._inductor.config"):
        importlib.import_module(name)
    answers.write(json.dumps("ready") + "\n")
    answers.flush()
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="bootseer-torch-") as folder:
            answer = _run(json.loads(line), Path(folder))
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
