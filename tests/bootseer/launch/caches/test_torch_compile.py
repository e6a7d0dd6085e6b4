"""A real compiler: TorchInductor's files from one node save another node its compiler."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from testbed.node import Node, node_at

pytestmark = pytest.mark.needs(modules=["torch"], programs=["g++"])

# What `torch.compile` calls for each kernel; `bench compile` runs all of `torch.compile`.
PROGRAM = """
from torch._inductor import cpu_vec_isa
# Else six libraries are compiled to find out what the processor can do.
cpu_vec_isa.valid_vec_isa_list = lambda: []
from torch._inductor.codecache import CppCodeCache
print(CppCodeCache.load('extern "C" int answer() { return 42; }').answer())
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """Return a compiler that logs its calls."""
    program, log = tmp_path / "bin/g++", tmp_path / "calls"
    program.parent.mkdir()
    real = shutil.which("g++")
    program.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n')
    program.chmod(0o755)
    return log


def compiled(log: Path) -> int:
    """Return how often a library was compiled since the last call."""
    lines = log.read_text().splitlines() if log.exists() else []
    log.write_text("")
    return sum(" -shared " in f" {line} " for line in lines)


@pytest.mark.timeout(600)
def test_another_node_compiles_nothing(node: Node, compiler: Path, tmp_path: Path) -> None:
    variables = {
        "CXX": str(tmp_path / "bin/g++"),
        "BOOTSEER_CACHE_DIR": str(tmp_path / "caches"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # They are for many kernels: here they take longer than the one library.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "USER": "nobody",
    }
    command = ("run", "--", sys.executable, "-c", PROGRAM)
    first = node.run(*command, variables=variables, timeout_s=240)
    assert first.returncode == 0, first.stderr
    node.wait_clean()
    assert compiled(compiler) > 0
    # The same paths, as all nodes of a cluster have; nothing in them.
    shutil.rmtree(tmp_path / "caches")
    with node_at(tmp_path / "second", node.store) as second:
        again = second.run(*command, variables=variables, timeout_s=240)
        assert again.returncode == 0, again.stderr
        second.wait_clean()
    assert "restored the cache TORCHINDUCTOR_CACHE_DIR" in again.stderr
    assert compiled(compiler) == 0
    assert again.stdout == first.stdout


@pytest.mark.timeout(600)
def test_another_compiler_has_another_cache(node: Node, compiler: Path, tmp_path: Path) -> None:
    variables = {"BOOTSEER_CACHE_DIR": str(tmp_path / "caches"), "USER": "nobody"}
    show = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    folders = set()
    for version in ("13.2.0", "14.1.0"):
        program = tmp_path / version / "g++"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho g++ {version}\n")
        program.chmod(0o755)
        done = node.run(
            "run", "--", sys.executable, "-c", show, variables={**variables, "CXX": str(program)}
        )
        folders.add(done.stdout)
    assert len(folders) == 2
    assert os.path.isdir(tmp_path / "caches/kept/folders")
