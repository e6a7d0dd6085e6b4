"""Environments of every kind, made by the real tools: the same there, and working elsewhere."""

import base64
import csv
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.config import Settings
from bootseer.errors import AlreadyExistsError, InvalidInputError
from bootseer.snapshots.commands import create_snapshot, restore_snapshot
from bootseer.snapshots.run import run_setup
from bootseer.snapshots.setup.request import Request
from tests.snapshots.conftest import MakeNode
from tests.support.conda_channel import BUILT_AT, make_environment, make_package
from tests.support.trees import describe, differences
from tests.support.wheels import make_wheel

TOOLS = Path(sys.executable).parent
# An editable install as setuptools makes it of a project whose packages cannot just be put on the
# path: a finder with the places in it.
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
    """alpha, which needs beta and has a console script."""
    folder = tmp_path_factory.mktemp("wheels")
    said = "def say():\n    import beta\n    print('alpha', beta.NUMBER)\n"
    scripts = {"alpha-say": "alpha:say"}
    make_wheel(folder, "alpha", "1", {"alpha.py": said}, requires=["beta"], scripts=scripts)
    make_wheel(folder, "beta", "1", {"beta.py": "NUMBER = 42\n"})
    return folder


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the surrounding configuration decides what the tools do."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "PYTHON", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    # Else files have more links than there are in the environment.
    monkeypatch.setenv("UV_LINK_MODE", "copy")


def _tool(name: str) -> str:
    if not (TOOLS / name).exists():
        pytest.skip(f"{name} is not installed beside this Python (it is one of the dev extras)")
    return str(TOOLS / name)


def _make_project(folder: Path) -> Path:
    (folder / "code").mkdir(parents=True)
    (folder / "code/project.py").write_text("def say():\n    print('project', __file__)\n")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "project"\nversion = "1.0"\n'
    )
    return folder


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def _pip(env: Path, *arguments: str | Path) -> str:
    """What pip says about the environment, which need not have one."""
    return _run(sys.executable, "-m", "pip", "--python", env / "bin/python", *arguments)


def _check(env: Path) -> None:
    """Everything that a user would do with the environment works, and its records are right."""
    assert _run(env / "bin/alpha-say") == "alpha 42\n"
    assert _run(env / "bin/python", "-c", "import sys; print(sys.prefix)").strip() == str(env)
    assert "No broken requirements" in _pip(env, "check")
    _check_records(env)


def _check_records(env: Path) -> None:
    count = 0
    for record in env.glob("lib/python*/site-packages/*.dist-info/RECORD"):
        with record.open(newline="") as file:
            for path, digest, size in csv.reader(file):
                found = record.parent.parent / path
                if not digest:
                    continue
                content = found.read_bytes()
                encoded = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode()
                assert digest == "sha256=" + encoded.rstrip("="), path
                assert int(size) == len(content), path
                count += 1
    assert count > 2


def _holding(env: Path, old: Path) -> list[str]:
    """Files and links in which the old path is left; bytecode names its source, which is fine."""
    found = []
    for path in env.rglob("*"):
        info = path.lstat()
        if stat.S_ISLNK(info.st_mode):
            data = os.fsencode(path.readlink())
        elif stat.S_ISREG(info.st_mode) and path.suffix != ".pyc":
            data = path.read_bytes()
        else:
            continue
        if os.fsencode(old) in data:
            found.append(str(path.relative_to(env)))
    return found


def _is_unwritten(before: dict[str, dict[str, object]], env: Path) -> bool:
    """Whether all bytecode is as it was, so that nothing was compiled again. A new compilation
    would have another path in it."""
    after = describe(env)
    bytecode = [path for path in before if path.endswith(".pyc")]
    return bool(bytecode) and all(before[path] == after.get(path) for path in bytecode)


def _both_ways(settings: Settings, key: str, env: Path, other: Path) -> list[str]:
    """Restore at the same path and compare everything; then relocate; what was said."""
    original = describe(env)
    shutil.rmtree(env)
    restore_snapshot(settings, key)
    assert differences(original, describe(env)) == []
    shutil.rmtree(env)
    said: list[str] = []
    restore_snapshot(settings, key, other, relocates=True, report=said.append)
    moved = describe(other)
    # Nothing but content and what follows from it differs, and no name is new.
    allowed = (": content: ", ": size: ", ": target: ")
    lines = [line for line in differences(original, moved) if not any(a in line for a in allowed)]
    # But for bytecode of a source that has changed.
    assert [line for line in lines if "finder.cpython" not in line] == []
    assert _holding(other, env) == []
    return said


def test_venv_and_pip(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    """Of an environment without a pip of its own; virtualenv makes one with it."""
    env, other = tmp_path / "env", tmp_path / "another/place/for.it"
    _run(sys.executable, "-m", "venv", "--without-pip", env)
    _make_project(env / "src/project")
    project = ("--no-build-isolation", "-e", env / "src/project")
    _pip(env, "install", "--no-index", "--find-links", wheels, "alpha", *project)
    _run(env / "bin/project-say")
    (env / "absolute").symlink_to(env / "bin/alpha-say")
    create_snapshot(make_node("a"), [str(env)], "env")
    said = _both_ways(make_node("b"), "env", env, other)
    assert [line for line in said if line.startswith("warning")] == []
    before = describe(other)
    _check(other)
    assert _run(other / "absolute") == "alpha 42\n"
    assert _run(other / "bin/project-say").split()[1] == str(other / "src/project/code/project.py")
    activated = f'. "{other}/bin/activate" && command -v alpha-say && echo "$VIRTUAL_ENV"'
    assert _run("sh", "-c", activated).split() == [str(other / "bin/alpha-say"), str(other)]
    for name in ("activate.csh", "activate.fish"):
        assert str(other) in (other / "bin" / name).read_text()
    url = json.loads(next(other.rglob("project-1.0.dist-info/direct_url.json")).read_text())["url"]
    assert url == (other / "src/project").as_uri()
    assert "home = " + str(other) not in (other / "pyvenv.cfg").read_text()
    # The one changed source was compiled again, and nothing else.
    finder = "finder.cpython"
    assert _is_unwritten({p: e for p, e in before.items() if finder not in p}, other)


def test_venv_to_a_path_that_is_too_long_for_first_lines(
    tmp_path: Path, make_node: MakeNode, wheels: Path
) -> None:
    env, other = tmp_path / "env", tmp_path / ("long-" * 30) / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", env)
    _pip(env, "install", "--no-index", "--find-links", wheels, "alpha")
    create_snapshot(make_node("a"), [str(env)], "env")
    _both_ways(make_node("b"), "env", env, other)
    assert (other / "bin/alpha-say").read_bytes().startswith(b"#!/bin/sh\n'''exec' /")
    assert "include-system-site-packages = true" in (other / "pyvenv.cfg").read_text()
    assert _run(other / "bin/alpha-say") == "alpha 42\n"
    _check_records(other)
    # A shell that starts Python is understood as well, on the way to a short path.
    create_snapshot(make_node("a"), [str(other)], "long")
    restore_snapshot(make_node("b"), "long", env, relocates=True)
    assert _holding(env, other) == []
    _check_records(env)
    assert _run(env / "bin/alpha-say") == "alpha 42\n"


def test_uv(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    uv = _tool("uv")
    env, other = tmp_path / "env", tmp_path / "other"
    project = _make_project(tmp_path / "project")
    install = f"{uv} pip install --offline --no-index --find-links {wheels}"
    command = (
        f"{uv} venv --offline --python {sys.executable} {env} && . {env}/bin/activate && "
        f"{install} --compile-bytecode --no-build-isolation alpha -e {project}"
    )
    said: list[str] = []
    result = run_setup(make_node("a"), Request(["sh", "-ec", command]), report=said.append)
    assert (result.how, result.targets) == ("captured", (str(env),)), said
    assert result.fingerprint is not None
    _both_ways(make_node("b"), result.fingerprint, env, other)
    before = describe(other)
    _check(other)
    assert _run(other / "bin/project-say").split()[1] == str(project / "code/project.py")
    assert (
        "All installed packages are compatible"
        in subprocess.run(
            [uv, "pip", "check", "--python", other / "bin/python"],
            check=True,
            capture_output=True,
            text=True,
        ).stderr
    )
    assert _is_unwritten(before, other)


def test_virtualenv(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    virtualenv = _tool("virtualenv")
    env, other = tmp_path / "env", tmp_path / "x/y/z"
    command = (
        f"{virtualenv} --no-download --app-data {tmp_path}/data {env} && "
        f"{env}/bin/pip install --no-index --find-links {wheels} alpha"
    )
    result = run_setup(make_node("a"), Request(["sh", "-ec", command]))
    assert (result.how, result.targets) == ("captured", (str(env),))
    assert result.fingerprint is not None
    _both_ways(make_node("b"), result.fingerprint, env, other)
    before = describe(other)
    _check(other)
    activate_this = f"exec(open({str(other / 'bin/activate_this.py')!r}).read(), {{'__file__': "
    code = activate_this + f"{str(other / 'bin/activate_this.py')!r}}}); import alpha; alpha.say()"
    assert _run(other / "bin/python", "-I", "-c", code) == "alpha 42\n"
    assert _is_unwritten(before, other)


def _system_python(prefix: Path) -> Path:
    """A Python that is no virtual environment: its own prefix, with the real standard library."""
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
    if _run(python, "-c", "import sys; print(sys.prefix, sys.base_prefix)").split() != (
        [str(prefix)] * 2
    ):
        pytest.skip("this Python does not find its standard library relative to itself")
    return python


def test_system_site_packages(tmp_path: Path, make_node: MakeNode, wheels: Path) -> None:
    prefix = tmp_path / "usr"
    python = _system_python(prefix)
    _run("cp", "-a", prefix, tmp_path / "image")
    pip = f"{sys.executable} -m pip --python {python}"
    request = Request(f"{pip} install --no-index --find-links {wheels} alpha".split())
    result = run_setup(make_node("a"), request)
    assert result.how == "captured"
    assert str(prefix / "bin") in result.targets
    assert str(prefix) not in result.targets
    installed = describe(prefix)
    # The directories that the targets lie in are none themselves.
    parents = [Path(target).parent for target in result.targets]
    outside = {"", *(str(parent.relative_to(prefix)) for parent in parents)}

    # Another node, with the same image.
    shutil.rmtree(prefix)
    (tmp_path / "image").rename(prefix)
    result = run_setup(make_node("b"), request)
    assert result.how == "restored"
    assert result.file_count < 40  # what was there before is not in it
    lines = differences(installed, describe(prefix))
    assert [line for line in lines if line.partition(": ")[0] not in outside] == []
    assert _run(prefix / "bin/alpha-say") == "alpha 42\n"
    assert "No broken requirements" in _run(*pip.split(), "check")
    assert _is_unwritten(installed, prefix)


def _conda_environment(tmp_path: Path) -> Path:
    """Python with what it is built with, a library, and a noarch package with a console script."""
    pytest.importorskip("rattler", reason="py-rattler is not installed (it is a dev extra)")
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
        _run(compiler, "-o", tmp_path / "where", source)
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
    assert _run(env / "bin/alpha-say") == "alpha 42\n"
    assert _run(env / "bin/python-config") == f"-L{env}/lib\n"
    code = "import built, sys; print(built.PREFIX, sys.prefix)"
    assert _run(env / "bin/python", "-c", code).split() == [str(env), str(env)]
    library = (env / "lib/libx.so").read_bytes()
    assert library.startswith(b"\x7fELF\0%b/lib:%b/lib64\0" % ((os.fsencode(env),) * 2))
    assert library.endswith(b"\0next\0")
    if (env / "bin/where").exists():
        assert _run(env / "bin/where") == f"{env}/share\n"
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
    # Same size and time as its source, but another prefix in it: it must not be used.
    shutil.rmtree(next(env.rglob("__pycache__")))
    source = next(env.rglob("built.py"))
    _run(env / "bin/python", "-m", "compileall", "-q", source.parent)
    assert list(env.rglob("built.*.pyc"))
    create_snapshot(make_node("a"), [str(env)], "conda")
    original = describe(env)
    shutil.rmtree(env)
    restore_snapshot(make_node("b"), "conda")
    assert differences(original, describe(env)) == []
    _check_conda(env)
    shutil.rmtree(env)

    # Longer than it was, of the same length, shorter, and back.
    twin = env.with_name("vne")
    short = tmp_path / "e"
    for place in (other, twin, short):
        said: list[str] = []
        restore_snapshot(make_node("b"), "conda", place, relocates=True, report=said.append)
        assert [line for line in said if line.startswith("warning")] == []
        assert _holding(place, env) == []
        assert not list(place.rglob("built.*.pyc"))
        before = describe(place)
        _check_conda(place)
        assert _is_unwritten(before, place)
    create_snapshot(make_node("a"), [str(short)], "short")
    restore_snapshot(make_node("b"), "short", env, relocates=True)
    _check_conda(env)
    assert "No broken requirements" in _pip(env, "check")


def test_conda_to_a_path_without_room_changes_nothing(tmp_path: Path, make_node: MakeNode) -> None:
    env, other = _conda_environment(tmp_path), tmp_path / ("long-" * 40)
    create_snapshot(make_node("a"), [str(env)], "conda")
    with pytest.raises(InvalidInputError, match=r"(lib/libx\.so|bin/where) has room for a prefix"):
        restore_snapshot(make_node("b"), "conda", other, relocates=True)
    assert not other.exists()
    assert not list(tmp_path.glob(".bootseer*"))


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
