"""A conda environment restored at the same path, and relocated to another one."""

import base64
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.restore import restore_snapshot
from testbed.conda_channel import BUILT_AT, make_environment, make_package
from testbed.needs import require
from testbed.trees import describe, differences
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.made_environments import (
    files_with_path,
    is_bytecode_unchanged,
    pip,
    run,
)

pytestmark = pytest.mark.usefixtures("no_configuration")


def _conda_environment(tmp_path: Path) -> Path:
    """Make an environment of Python with its dependencies, a library, and a noarch package."""
    require(modules=["rattler"])
    real = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    channel = tmp_path / "channel"
    config = f"PREFIX = {BUILT_AT!r}\n"
    python = {
        "pyvenv.cfg": f"home = {real.parent}\n".encode(),
        "bin/python-config": f"#!{BUILT_AT}/bin/python\nprint('-L{BUILT_AT}/lib')\n".encode(),
        f"lib/python{version}/site-packages/built.py": config.encode(),
        "lib/pkgconfig/x.pc": f"prefix={BUILT_AT}\n".encode(),
        "lib/libx.so": b"\x7fELF\0%b/lib:%b/lib64\0next\0" % ((BUILT_AT.encode(),) * 2),
    }
    if compiler := shutil.which("cc"):
        source = tmp_path / "where.c"
        source.write_text(
            f'#include <stdio.h>\nint main(void) {{ puts("{BUILT_AT}/share"); return 0; }}\n'
        )
        run(compiler, "-o", tmp_path / "where", source)
        python["bin/where"] = (tmp_path / "where").read_bytes()
    links = {f"bin/python{version}": str(real), "bin/python": f"python{version}"}
    make_package(channel, "python", python, links=links)
    info = "site-packages/alpha-1.dist-info"
    alpha = {
        "site-packages/alpha.py": b"def say():\n    print('alpha 42')\n",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: alpha\nVersion: 1\n",
    }
    lines = []
    for path, data in alpha.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        lines.append(f"{path.removeprefix('site-packages/')},sha256={digest},{len(data)}\n")
    alpha[f"{info}/RECORD"] = "".join(
        [*lines, "alpha.py,,\n", "alpha-1.dist-info/RECORD,,\n"]
    ).encode()
    points = ("alpha-say = alpha:say",)
    make_package(channel, "alpha", alpha, depends=("python",), entry_points=points)
    env = tmp_path / "env"
    make_environment(channel, env, tmp_path / "packages", "alpha")
    return env


def _check_conda(env: Path) -> None:
    assert run(env / "bin/alpha-say") == "alpha 42\n"
    assert run(env / "bin/python-config") == f"-L{env}/lib\n"
    code = "import built, sys; print(built.PREFIX, sys.prefix)"
    assert run(env / "bin/python", "-c", code).split() == [str(env), str(env)]
    library = (env / "lib/libx.so").read_bytes()
    assert library.startswith(b"\x7fELF\0%b/lib:%b/lib64\0" % ((os.fsencode(env),) * 2))
    assert library.endswith(b"\0next\0")
    if (env / "bin/where").exists():
        assert run(env / "bin/where") == f"{env}/share\n"
    for record in env.glob("conda-meta/*.json"):
        for entry in json.loads(record.read_text())["paths_data"]["paths"]:
            if entry["path_type"] != "softlink":
                digest = hashlib.sha256((env / entry["_path"]).read_bytes()).hexdigest()
                assert digest == entry.get("sha256_in_prefix", entry["sha256"]), entry["_path"]


def test_conda(tmp_path: Path, make_node: MakeNode) -> None:
    env, other = (
        _conda_environment(tmp_path),
        tmp_path / "elsewhere/with_a_longer",
    )
    _check_conda(env)
    # The bytecode has the same size and time of its source, but another prefix: it must not be
    # used.
    shutil.rmtree(next(env.rglob("__pycache__")))
    source = next(env.rglob("built.py"))
    run(env / "bin/python", "-m", "compileall", "-q", source.parent)
    assert list(env.rglob("built.*.pyc"))
    create_snapshot(make_node("a"), [str(env)], "conda")
    original = describe(env)
    shutil.rmtree(env)
    restore_snapshot(make_node("b"), "conda")
    assert differences(original, describe(env)) == []
    _check_conda(env)
    shutil.rmtree(env)

    # Longer paths, paths of the same length, shorter ones, and back.
    twin = env.with_name("vne")
    short = tmp_path / "e"
    for place in (other, twin, short):
        said: list[str] = []
        restore_snapshot(make_node("b"), "conda", place, relocates=True, report=said.append)
        assert [line for line in said if line.startswith("warning")] == []
        assert files_with_path(place, env) == []
        assert not list(place.rglob("built.*.pyc"))
        before = describe(place)
        _check_conda(place)
        assert is_bytecode_unchanged(before, place)
    create_snapshot(make_node("a"), [str(short)], "short")
    restore_snapshot(make_node("b"), "short", env, relocates=True)
    _check_conda(env)
    assert "No broken requirements" in pip(env, "check")


def test_conda_to_a_path_without_room_changes_nothing(tmp_path: Path, make_node: MakeNode) -> None:
    env, other = _conda_environment(tmp_path), tmp_path / ("long-" * 40)
    create_snapshot(make_node("a"), [str(env)], "conda")
    with pytest.raises(InvalidInputError, match=r"(lib/libx\.so|bin/where) has room for a prefix"):
        restore_snapshot(make_node("b"), "conda", other, relocates=True)
    assert not other.exists()
    assert not list(tmp_path.glob(".bootseer*"))
