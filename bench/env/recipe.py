"""The environment of the cases, made once and kept: its wheels, its tree, and archives of it.

A virtual environment contains its path, so it is made at the path that it has on nodes: on a node.
Needs root, pip, uv and the packages' index.
"""

import contextlib
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.containers.node import EmptyNode
from testbed.needs import MissingError

REQUIREMENTS = (
    "torch==2.13.0+cpu",
    "transformers",
    "datasets",
    "pandas",
    "scipy",
    "scikit-learn",
    "matplotlib",
    "accelerate",
)
IMPORTS = "import torch, transformers; print('ok')"
PLACE = Path("/srv")
"""Folder that every Debian has and no program uses; each node mounts its own folder there.

One mount for all folders below it, so that files can be hard-linked between them.
"""
ENVIRONMENT, CACHE, UV_CACHE = PLACE / "env", PLACE / "cache", PLACE / "uv-cache"
SNAPSHOT = "bench-env"
PYTHON = str(Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}"))
# Change the last word when the steps of `_make` change.
_RECIPE = (*REQUIREMENTS, sys.version.split()[0], "1")
_STEP_DEADLINE_S = 1200.0


@dataclass(frozen=True, slots=True)
class KeptEnvironment:
    """Files that are kept below `folder`."""

    folder: Path

    @property
    def wheels(self) -> Path:
        """Wheels of the environment, as downloaded."""
        return self.folder / "wheels"

    @property
    def requirements(self) -> Path:
        """Requirements file for pip and uv."""
        return self.folder / "requirements.txt"

    @property
    def tree(self) -> Path:
        """The environment's files."""
        return self.folder / "tree"

    @property
    def tar(self) -> Path:
        """Archive made by tar and zstd."""
        return self.folder / "env.tar.zst"

    @property
    def packed(self) -> Path:
        """Archive made by `venv-pack`."""
        return self.folder / "env.tar.gz"

    @property
    def store(self) -> Path:
        """Store with the snapshot."""
        return self.folder / "store"


def uv() -> str:
    """Return the path of uv. Raises: MissingError."""
    try:
        from uv import find_uv_bin
    except ImportError as error:
        raise MissingError("there is no uv; pip install uv") from error
    return str(find_uv_bin())


@contextlib.contextmanager
def node_at(folder: Path, tree: Path | None = None) -> Iterator[EmptyNode]:
    """Yield a new node, whose folder is PLACE there; `tree` is its environment, if given."""
    with EmptyNode(folder) as node:
        node.run(["mount", "--bind", str(folder), str(PLACE)], timeout_s=20.0)
        if tree is not None:
            (folder / ENVIRONMENT.name).mkdir()
            node.run(["mount", "--bind", str(tree), str(ENVIRONMENT)], timeout_s=20.0)
        yield node


def environment(kept: Path, say: Callable[[str], None]) -> KeptEnvironment:
    """Return the environment, made if `kept` has none of this recipe. Raises: MissingError."""
    identity = hashlib.sha256("\n".join(_RECIPE).encode()).hexdigest()[:16]
    folder = kept / f"env-{identity}"
    if not folder.is_dir():
        partial = kept / "env-partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _make(KeptEnvironment(partial), say)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return KeptEnvironment(folder)


def _make(kept: KeptEnvironment, say: Callable[[str], None]) -> None:
    say("environment: wheels")
    kept.requirements.write_text("\n".join(REQUIREMENTS) + "\n")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = ["download", "--only-binary=:all:", "--dest", str(kept.wheels)]
    _step([*pip, *wheels, "-r", str(kept.requirements)])
    _step([*pip, "install", "--target", str(kept.folder / "tools"), "venv-pack2"])
    with node_at(kept.folder / "node") as node:
        try:
            say("environment: installed and compiled")
            install = uv_install(kept.wheels, kept.requirements)
            _in_node(node, ["sh", "-ec", f"{install} --link-mode copy --compile-bytecode"])
            _in_node(node, [str(ENVIRONMENT / "bin/python"), "-c", IMPORTS])
            say("environment: tar.zst")
            _in_node(node, ["tar", "-C", str(PLACE), "-I", "zstd -T0", "-cf", str(kept.tar), "env"])
            say("environment: venv-pack")
            pack = ["-m", "venv_pack", "--quiet", "--prefix", str(ENVIRONMENT)]
            tools = {"PYTHONPATH": str(kept.folder / "tools")}
            out = ["--output", str(kept.packed)]
            node.run([PYTHON, *pack, *out], timeout_s=_STEP_DEADLINE_S, env=tools)
            say("environment: snapshot")
            store = {"BOOTSEER_STORE": str(kept.store), "BOOTSEER_RUN_DIR": "/run/bootseer"}
            store["BOOTSEER_CACHE_DIR"] = str(CACHE)
            create = ["snapshot", "create", "--target", str(ENVIRONMENT), "--name", SNAPSHOT]
            command = [sys.executable, "-m", "bootseer", *create]
            node.run(command, timeout_s=_STEP_DEADLINE_S, env=store)
        except RuntimeError as error:
            raise MissingError(f"the environment cannot be made: {error}") from error
        (node.folder / ENVIRONMENT.name).rename(kept.tree)


def uv_install(links: Path | str, requirements: Path) -> str:
    """Return a line of shell that makes the environment; options of the installer may follow."""
    common = f"--quiet --no-config --cache-dir {UV_CACHE}"
    return (
        f"{uv()} venv {common} --offline --python {PYTHON} {ENVIRONMENT} && "
        f"{uv()} pip install {common} --no-index --find-links {links} "
        f"--python {ENVIRONMENT}/bin/python -r {requirements}"
    )


def _in_node(node: EmptyNode, command: list[str]) -> None:
    node.run(command, timeout_s=_STEP_DEADLINE_S)


def _step(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_STEP_DEADLINE_S, check=False
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise MissingError(f"the environment cannot be made: {command[0]}: {words}")
