"""First training step of a compiled model on a node that has compiled nothing."""

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bench.model import (
    Case,
    Column,
    Sample,
    TakeSample,
    Variant,
    Workspace,
    at_least,
    at_most,
    ratio,
)
from testbed.needs import MissingError
from testbed.paths import REPOSITORY

_PROGRAM = REPOSITORY / "bench" / "compile" / "program.py"
_DEADLINE_S = 900.0
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class _CompilingNode:
    """Node that runs the program; its folder has the same path in all variants."""

    def __init__(self, workspace: Workspace, name: str) -> None:
        self.name = name
        self.blocks = workspace.sized(8, 2, 1)
        self.base = workspace.directory / "compile"
        self.shared = workspace.directory / f"shared-{name}"
        self.cache = self.base / "inductor"
        self.loss = workspace.shared.setdefault("losses", set())
        shutil.rmtree(self.shared, ignore_errors=True)
        self.shared.mkdir(parents=True)

    def clear(self) -> None:
        """Make it a node that has compiled nothing."""
        shutil.rmtree(self.base, ignore_errors=True)
        self.base.mkdir()

    def environment(self, **more: str) -> dict[str, str]:
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("TORCH", "BOOTSEER_"))}
        return {**kept, "HOME": str(self.base), "PYTHONPATH": str(REPOSITORY), **more}

    def step(
        self,
        *more: str,
        before: Callable[[], None] = lambda: None,
        wrapper: tuple[str, ...] = (),
        environ: Mapping[str, str],
    ) -> Sample:
        """Run the program, after the variant's own first step."""
        cpu = resource.getrusage(resource.RUSAGE_CHILDREN)
        started_s = time.time()
        before()
        done = subprocess.run(
            [*wrapper, sys.executable, str(_PROGRAM), str(self.blocks), *more],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the program failed: {done.stderr[-2000:]}")
        told = json.loads(done.stdout)
        # The compiled kernels must be the same in all variants.
        self.loss.add(round(told["loss"], 5))
        if len(self.loss) != 1:
            raise RuntimeError(f"the ways disagree on the loss: {self.loss}")
        restore_s = told["began_s"] - started_s
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Sample(
            restore_s + told["import_s"] + told["step_s"],
            cpu_s={"node": sum(after[:2]) - sum(cpu[:2])},
            moved_bytes=sum(one.stat().st_size for one in self._stored()),
            figures={
                "restore_s": restore_s,
                "import_s": told["import_s"],
                "step_s": told["step_s"],
                # Without the imports, which take equally long in all variants.
                "ready_s": restore_s + told["step_s"],
            },
        )

    def _stored(self) -> Iterator[Path]:
        for folder in (self.shared, self.shared / "store/blobs", self.shared / "store/indexes"):
            for path in folder.iterdir() if folder == self.shared else folder.rglob("*"):
                if path.is_file():
                    yield path


@contextlib.contextmanager
def _prepare(workspace: Workspace) -> Iterator[None]:
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"{name} is not installed; pip install torch triton")
    if shutil.which("g++") is None:
        raise MissingError("there is no C++ compiler; apt-get install g++")
    workspace.shared["notes"] = [
        "One training step of a transformer that TorchInductor compiles for the CPU, in a new "
        "process; a new node is one whose caches are empty, at the same paths",
        "`until stepped` is all but the imports (torch, TorchInductor): what brings the cache, and "
        "the step; what is brought lies in a folder of the machine, and its size is what a "
        "network would carry",
    ]
    yield


@contextlib.contextmanager
def _nothing(workspace: Workspace) -> Iterator[TakeSample]:
    node = _CompilingNode(workspace, "nothing")

    def take() -> Sample:
        node.clear()
        return node.step(environ=node.environment(**{_CACHE: str(node.cache)}))

    yield take


@contextlib.contextmanager
def _warm(workspace: Workspace) -> Iterator[TakeSample]:
    """Run the same node again, in a folder that other variants do not clear."""
    node = _CompilingNode(workspace, "warm")
    environ = node.environment(**{_CACHE: str(workspace.directory / "warm-inductor")})
    node.clear()
    node.step(environ=environ)

    def take() -> Sample:
        node.clear()
        return node.step(environ=environ)

    yield take


@contextlib.contextmanager
def _tar(workspace: Workspace) -> Iterator[TakeSample]:
    """Unpack an archive on shared storage before the program, as in Megatron-LM#5452."""
    node = _CompilingNode(workspace, "tar")
    environ = node.environment(**{_CACHE: str(node.cache)})
    archive = node.shared / "cache.tar.gz"
    node.clear()
    node.step(environ=environ)
    subprocess.run(["tar", "-C", node.base, "-czf", archive, "inductor"], check=True)

    def unpack() -> None:
        subprocess.run(["tar", "-C", node.base, "-xzf", archive], check=True)

    def take() -> Sample:
        node.clear()
        return node.step(before=unpack, environ=environ)

    yield take


@contextlib.contextmanager
def _artifacts(workspace: Workspace) -> Iterator[TakeSample]:
    """Use torch.compiler's save_cache_artifacts, and load_cache_artifacts in the program."""
    node = _CompilingNode(workspace, "artifacts")
    environ = node.environment(**{_CACHE: str(node.cache)})
    file = str(node.shared / "artifacts")
    node.clear()
    node.step(file, environ=environ)

    def take() -> Sample:
        node.clear()
        return node.step(file, environ=environ)

    yield take


@contextlib.contextmanager
def _bootseer(workspace: Workspace) -> Iterator[TakeSample]:
    node = _CompilingNode(workspace, "bootseer")
    environ = node.environment(
        BOOTSEER_STORE=(node.shared / "store").as_uri(),
        BOOTSEER_CACHE_DIR=str(node.base / "cache"),
        BOOTSEER_RUN_DIR=str(node.base / "run"),
        BOOTSEER_TIMELINE_DIR=str(node.base / "timeline"),
        BOOTSEER_JOB="compile",
    )
    wrapper = (sys.executable, "-m", "bootseer", "run", "--")

    def step() -> Sample:
        node.clear()
        sample = node.step(wrapper=wrapper, environ=environ)
        # The processes behind the start must not run into the next start.
        _wait_for_attendant(node)
        return sample

    step()
    yield step


def _wait_for_attendant(node: _CompilingNode) -> None:
    """Wait until the publishing process has ended, as its log says."""
    deadline_s = time.monotonic() + 120
    while True:
        texts = [path.read_text() for path in (node.base / "run/logs").glob("start-*.log")]
        if any(f"{_CACHE}: published" in text or f"{_CACHE}: nothing" in text for text in texts):
            return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"nothing was published: {texts}")
        time.sleep(0.1)


_STEPPED = ("ready_s", "until stepped")

CASE = Case(
    name="compile",
    description="A new node runs the first training step of a model that is compiled.",
    prepare=_prepare,
    variants=(
        Variant("nothing", "all is compiled", _nothing),
        Variant("tar", "a tar.gz of the cache on shared storage", _tar),
        Variant("artifacts", "torch's save_cache_artifacts and load_cache_artifacts", _artifacts),
        Variant("bootseer", "`bootseer run`, nothing else changed", _bootseer),
        Variant("warm", "the same node once more", _warm),
    ),
    ratios=(
        ratio("nothing", "bootseer", *_STEPPED, at_least(8)),
        ratio("bootseer", "warm", *_STEPPED, at_most(1.1)),
        ratio("bootseer", "tar", *_STEPPED, at_most(1.1)),
        ratio("artifacts", "bootseer", *_STEPPED, at_least(1)),
    ),
    columns=(
        Column("restore s", "restore_s"),
        Column("step s", "step_s"),
        Column("until stepped s", "ready_s"),
        Column("with import s", "wall_s"),
        Column("MB moved", "moved_bytes", scale=1e-6),
        Column("CPU s", "node_cpu_s"),
    ),
    runs=3,
    quick_runs=1,
    warmups=0,
    audience="reader",
)
