"""Environments of every kind made by real tools: restored at their path, and relocated."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import AlreadyExistsError, InvalidInputError
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.restore import restore_snapshot
from testbed.needs import MissingError
from testbed.trees import describe, differences
from testbed.wheels import make_wheel
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.made_environments import (
    check_records,
    files_with_path,
    is_bytecode_unchanged,
    pip,
    restore_and_relocate,
    run,
    tool,
)

pytestmark = pytest.mark.usefixtures("no_configuration")

# setuptools' editable install of a project whose packages cannot be put on the path: a finder that
# contains their paths.
BACKEND = """
import base64, os, zipfile

def get_requires_for_build_editable(config_settings=None):
    return []

def build_editable(directory, config_settings=None, metadata_directory=None):
    here = os.getcwd()
    info = "project-1.0.dist-info"
    files = {
        "__editable__.project-1.0.pth": (
            "import __editable___project_1_0_finder as f; f.install()\\n"
        ),
        "__editable___project_1_0_finder.py": (
            f"MAPPING = {{'project': {here + '/code'!r}}}\\n"
            "def install():\\n"
            "    import sys\\n"
            "    sys.path.append(MAPPING['project'])\\n"
        ),
        info + "/METADATA": "Metadata-Version: 2.1\\nName: project\\nVersion: 1.0\\n",
        info + "/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        info + "/entry_points.txt": "[console_scripts]\\nproject-say = project:say\\n",
    }
    files[info + "/RECORD"] = "".join(f"{path},,\\n" for path in [*files, info + "/RECORD"])
    name = "project-1.0-0.editable-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(directory, name), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return name

build_wheel = build_editable
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels: alpha, which needs beta and has a console script, and beta."""
    folder = tmp_path_factory.mktemp("wheels")
    said = "def say():\n    import beta\n    print('alpha', beta.NUMBER)\n"
    scripts = {"alpha-say": "alpha:say"}
    make_wheel(folder, "alpha", "1", {"alpha.py": said}, requires=["beta"], scripts=scripts)
    make_wheel(folder, "beta", "1", {"beta.py": "NUMBER = 42\n"})
    return folder


def _make_project(folder: Path) -> Path:
    (folder / "code").mkdir(parents=True)
    (folder / "code/project.py").write_text("def say():\n    print('project', __file__)\n")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "project"\nversion = "1.0"\n'
    )
    return folder


def _check(env: Path) -> None:
    """Assert that the environment works as a user would use it, and that its records are right."""
    assert run(env / "bin/alpha-say") == "alpha 42\n"
    assert run(env / "bin/python", "-c", "import sys; print(sys.prefix)").strip() == str(env)
    assert "No broken requirements" in pip(env, "check")
    check_records(env)


def test_venv_and_pip(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    """The environment has no pip of its own; virtualenv makes one with pip."""
    env, other = tmp_path / "env", tmp_path / "another/place/for.it"
    run(sys.executable, "-m", "venv", "--without-pip", env)
    _make_project(env / "src/project")
    project = ("--no-build-isolation", "-e", env / "src/project")
    pip(env, "install", "--no-index", "--find-links", wheels, "alpha", *project)
    run(env / "bin/project-say")
    (env / "absolute").symlink_to(env / "bin/alpha-say")
    create_snapshot(make_node("a"), [str(env)], "env")
    said = restore_and_relocate(make_node("b"), "env", env, other)
    assert [line for line in said if line.startswith("warning")] == []
    before = describe(other)
    _check(other)
    assert run(other / "absolute") == "alpha 42\n"
    assert run(other / "bin/project-say").split()[1] == str(other / "src/project/code/project.py")
    activated = f'. "{other}/bin/activate" && command -v alpha-say && echo "$VIRTUAL_ENV"'
    assert run("sh", "-c", activated).split() == [str(other / "bin/alpha-say"), str(other)]
    for name in ("activate.csh", "activate.fish"):
        assert str(other) in (other / "bin" / name).read_text()
    url = json.loads(next(other.rglob("project-1.0.dist-info/direct_url.json")).read_text())["url"]
    assert url == (other / "src/project").as_uri()
    assert "home = " + str(other) not in (other / "pyvenv.cfg").read_text()
    # Only the changed source was compiled again.
    finder = "finder.cpython"
    assert is_bytecode_unchanged({p: e for p, e in before.items() if finder not in p}, other)


def test_venv_to_a_path_that_is_too_long_for_first_lines(
    tmp_path: Path, make_node: MakeNode, wheels: Path
) -> None:
    env, other = tmp_path / "env", tmp_path / ("long-" * 30) / "env"
    run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", env)
    pip(env, "install", "--no-index", "--find-links", wheels, "alpha")
    create_snapshot(make_node("a"), [str(env)], "env")
    restore_and_relocate(make_node("b"), "env", env, other)
    assert (other / "bin/alpha-say").read_bytes().startswith(b"#!/bin/sh\n'''exec' /")
    assert "include-system-site-packages = true" in (other / "pyvenv.cfg").read_text()
    assert run(other / "bin/alpha-say") == "alpha 42\n"
    check_records(other)
    # On the way to a short path, a script of a shell that starts Python is recognized, too.
    create_snapshot(make_node("a"), [str(other)], "long")
    restore_snapshot(make_node("b"), "long", env, relocates=True)
    assert files_with_path(env, other) == []
    check_records(env)
    assert run(env / "bin/alpha-say") == "alpha 42\n"


def test_uv(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    uv = tool("uv")
    env, other = tmp_path / "env", tmp_path / "other"
    project = _make_project(tmp_path / "project")
    install = f"{uv} pip install --offline --no-index --find-links {wheels}"
    command = (
        f"{uv} venv --offline --python {sys.executable} {env} && . {env}/bin/activate && "
        f"{install} --compile-bytecode --no-build-isolation alpha -e {project}"
    )
    said: list[str] = []
    result = run_setup(make_node("a"), SetupRequest(["sh", "-ec", command]), report=said.append)
    assert (result.how, result.targets) == ("captured", (str(env),)), said
    assert result.fingerprint is not None
    restore_and_relocate(make_node("b"), result.fingerprint, env, other)
    before = describe(other)
    _check(other)
    assert run(other / "bin/project-say").split()[1] == str(project / "code/project.py")
    assert (
        "All installed packages are compatible"
        in subprocess.run(
            [uv, "pip", "check", "--python", other / "bin/python"],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    )
    assert is_bytecode_unchanged(before, other)


def test_virtualenv(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    virtualenv = tool("virtualenv")
    env, other = tmp_path / "env", tmp_path / "x/y/z"
    command = (
        f"{virtualenv} --no-download --no-setuptools --app-data {tmp_path}/data {env} && "
        f"{env}/bin/pip install --no-index --find-links {wheels} alpha"
    )
    result = run_setup(make_node("a"), SetupRequest(["sh", "-ec", command]))
    assert (result.how, result.targets) == ("captured", (str(env),))
    assert result.fingerprint is not None
    restore_and_relocate(make_node("b"), result.fingerprint, env, other)
    before = describe(other)
    _check(other)
    activate_this = f"exec(open({str(other / 'bin/activate_this.py')!r}).read(), {{'__file__': "
    code = activate_this + f"{str(other / 'bin/activate_this.py')!r}}}); import alpha; alpha.say()"
    assert run(other / "bin/python", "-I", "-c", code) == "alpha 42\n"
    assert is_bytecode_unchanged(before, other)


def _system_python(prefix: Path) -> Path:
    """Make a Python that is no virtual environment: its own prefix, with the real standard
    library."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    library = prefix / f"lib/python{version}"
    (library / "site-packages").mkdir(parents=True)
    for path in Path(os.__file__).parent.iterdir():
        # "EXTERNALLY-MANAGED" would forbid pip to install.
        if path.name not in ("site-packages", "EXTERNALLY-MANAGED"):
            (library / path.name).symlink_to(path)
    (prefix / "bin").mkdir()
    python = prefix / f"bin/python{version}"
    shutil.copy2(os.path.realpath(getattr(sys, "_base_executable", sys.executable)), python)
    if run(python, "-c", "import sys; print(sys.prefix, sys.base_prefix)").split() != (
        [str(prefix)] * 2
    ):
        raise MissingError("this Python does not find its standard library relative to itself")
    return python


def test_system_site_packages(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    prefix = tmp_path / "usr"
    python = _system_python(prefix)
    run("cp", "-a", prefix, tmp_path / "image")
    installer = f"{sys.executable} -m pip --python {python}"
    request = SetupRequest(f"{installer} install --no-index --find-links {wheels} alpha".split())
    result = run_setup(make_node("a"), request)
    assert result.how == "captured"
    # A distribution's own Python may install into another folder.
    (program,) = prefix.glob("**/bin/alpha-say")
    assert str(program.parent) in result.targets
    assert str(prefix) not in result.targets
    installed = describe(prefix)
    # The directories that contain the targets are no targets.
    above = {parent for target in result.targets for parent in Path(target).parents}
    inside = [parent for parent in above if parent.is_relative_to(prefix)]
    outside = {"", *(str(parent.relative_to(prefix)) for parent in inside)}

    # Another node with the same image.
    shutil.rmtree(prefix)
    (tmp_path / "image").rename(prefix)
    result = run_setup(make_node("b"), request)
    assert result.how == "restored"
    assert result.file_count < 40  # what was there before is not in it
    lines = differences(installed, describe(prefix))
    assert [line for line in lines if line.partition(": ")[0] not in outside] == []
    assert run(program) == "alpha 42\n"
    assert "No broken requirements" in run(*installer.split(), "check")
    assert is_bytecode_unchanged(installed, prefix)


def test_a_full_place_is_refused_and_what_stays_is_named(
    tmp_path: Path, make_node: MakeNode
) -> None:
    env, other = tmp_path / "env", tmp_path / "other"
    (env / "lib").mkdir(parents=True)
    (env / "lib/odd.bin").write_bytes(b"\0" + os.fsencode(env) + b"/x\0")
    (env / "lib/read-only.pc").write_text(f"prefix={env}\n")
    (env / "lib/read-only.pc").chmod(0o444)
    (env / "lib/hard.pc").hardlink_to(env / "lib/read-only.pc")
    create_snapshot(make_node("a"), [str(env)], "env")
    other.mkdir()
    (other / "mine").write_text("x")
    with pytest.raises(AlreadyExistsError, match="choose another"):
        restore_snapshot(make_node("b"), "env", other, relocates=True)
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("other")
    for place, why in (("file", "not a directory"), ("file/x", "not a dir"), ("link", "symbolic")):
        with pytest.raises(AlreadyExistsError, match=why):
            restore_snapshot(make_node("b"), "env", tmp_path / place, relocates=True)
    (other / "mine").unlink()
    said: list[str] = []
    restore_snapshot(make_node("b"), "env", other, relocates=True, report=said.append)
    assert "2 files and links changed" in said[0]
    assert said[1].startswith("warning:")
    assert "lib/odd.bin" in said[1]
    assert (other / "lib/hard.pc").read_text() == f"prefix={other}\n"
    one, two = (other / "lib/hard.pc").lstat(), (other / "lib/read-only.pc").lstat()
    assert (one.st_ino, stat.S_IMODE(one.st_mode)) == (two.st_ino, 0o444)
    assert one.st_mtime_ns == (env / "lib/hard.pc").lstat().st_mtime_ns
    with pytest.raises(InvalidInputError, match="cannot be moved"):
        restore_snapshot(make_node("b"), "env", tmp_path / "with blank", relocates=True)
