import os
import sys
from pathlib import Path

import pytest

from bootseer.errors import UnsupportedError
from bootseer.linux.root_paths import WorkingDirectory
from bootseer.snapshots.commands import hints_of
from bootseer.snapshots.key import SetupRequest, resolve, run_plainly
from bootseer.snapshots.python import Interpreter, find_python, parse, probe, remembered
from bootseer.snapshots.target_inference import declared_targets, infer_targets


def _interpreter(prefix: str, base: str) -> Interpreter:
    site = f"{prefix}/lib/python3.11/site-packages"
    return Interpreter(
        path=f"{prefix}/bin/python3",
        implementation="cpython",
        version="3.11.7",
        abi="cpython-311-x86_64-linux-gnu",
        platform="linux-x86_64",
        libc="glibc 2.36",
        prefix=prefix,
        base_prefix=base,
        paths={
            "purelib": site,
            "platlib": site,
            "scripts": f"{prefix}/bin",
            "include": f"{prefix}/include/python3.11",
            "data": prefix,
        },
        user_base="/home/me/.local",
    )


_ENV = _interpreter("/opt/env", "/usr")
_SYSTEM = _interpreter("/usr/local", "/usr/local")
_SYSTEM_PATHS = (
    b"/usr/local/bin",
    b"/usr/local/etc",
    b"/usr/local/include/python3.11",
    b"/usr/local/lib/python3.11/site-packages",
    b"/usr/local/share",
)


@pytest.mark.parametrize(
    ("command", "interpreter", "active", "expected"),
    [
        ("pip install a", _ENV, "", (b"/opt/env",)),
        ("pip install a", _ENV, "/opt/env", (b"/opt/env",)),
        ("/usr/bin/pip install a", _SYSTEM, "/opt/env", _SYSTEM_PATHS),
        ("pip install a", _SYSTEM, "", _SYSTEM_PATHS),
        ("uv pip install a", _SYSTEM, "/opt/env", (b"/opt/env",)),
        ("uv sync", _SYSTEM, "", (b"/job/.venv",)),
        ("uv sync", _SYSTEM, "/opt/env", (b"/job/.venv",)),
        ("uv sync --active", _SYSTEM, "/opt/env", (b"/opt/env",)),
        ("uv --project sub sync", _SYSTEM, "", (b"/job/sub/.venv",)),
        ("uv pip install --python /opt/env/bin/python a", _ENV, "/other", (b"/opt/env",)),
        ("uv pip install -p /opt/env a", _SYSTEM, "/other", (b"/opt/env",)),
        ("uv pip install --system a", _SYSTEM, "/opt/env", _SYSTEM_PATHS),
        ("pip --python /opt/env/bin/python install a", _ENV, "", (b"/opt/env",)),
        ("pdm sync", _SYSTEM, "", (b"/job/.venv",)),
        ("pdm install -p sub", _SYSTEM, "", (b"/job/sub/.venv",)),
        ("pdm install", _ENV, "/opt/env", (b"/opt/env",)),
        ("poetry install", _ENV, "/opt/env", (b"/opt/env",)),
        ("conda create -y -p /c python", _SYSTEM, "/opt/env", (b"/c",)),
        ("python3 -m venv env", _SYSTEM, "", (b"/job/env",)),
        ("pip install --target lib a", _SYSTEM, "/opt/env", (b"/job/lib",)),
        ("pip install --user a", _SYSTEM, "", (b"/home/me/.local",)),
        ("./install.sh", None, "/opt/env", (b"/opt/env",)),
        ("./install.sh", _ENV, "/opt/env", (b"/opt/env",)),
    ],
)
def test_inferred(
    command: str, interpreter: Interpreter | None, active: str, expected: tuple[bytes, ...]
) -> None:
    hints = hints_of(command.split())
    found = infer_targets(hints, interpreter, {"VIRTUAL_ENV": active}, "/job")
    assert found.paths == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PIP_TARGET": "lib"}, (b"/job/lib",)),
        ({"PIP_PREFIX": "/opt/p"}, (b"/opt/p",)),
        ({"PIP_USER": "yes"}, (b"/home/me/.local",)),
        ({"PIP_USER": "0"}, _SYSTEM_PATHS),
    ],
)
def test_variables_of_pip_say_where_it_installs(
    variables: dict[str, str], expected: tuple[bytes, ...]
) -> None:
    """Regression: nothing was captured, and other nodes restored that."""
    found = infer_targets(hints_of(["pip", "install", "a"]), _SYSTEM, variables, "/job")
    assert found.paths == expected


def test_uv_takes_the_environment_of_the_folder(tmp_path: Path) -> None:
    """Regression: without an active environment nothing was captured."""
    job = tmp_path / "project/deep"
    job.mkdir(parents=True)
    (tmp_path / "project/.venv").mkdir()
    (tmp_path / "project/.venv/pyvenv.cfg").write_text("home = /usr/bin\n")

    def targets(command: str, **environ: str) -> tuple[bytes, ...]:
        request = SetupRequest(
            command.split(), directory=str(job), environ={"PATH": "/usr/bin:/bin", **environ}
        )
        return resolve(request, lambda sentence: None).targets

    assert targets("uv pip install a") == (os.fsencode(tmp_path / "project/.venv"),)
    assert targets("uv pip install a", VIRTUAL_ENV="/opt/env") == (b"/opt/env",)
    assert targets("uv venv env") == (os.fsencode(job / "env"),)


@pytest.mark.parametrize("command", ["./install.sh", "make", "pip list"])
def test_not_inferred(command: str) -> None:
    with pytest.raises(UnsupportedError, match="--target"):
        infer_targets(hints_of(command.split()), _SYSTEM, {}, "/job")


def test_nested_targets_are_one() -> None:
    assert declared_targets(["/a/b", "/a", "/ab", "/a/b/c"], "/").paths == (b"/a", b"/ab")


def test_the_python_of_a_console_script(tmp_path: Path) -> None:
    """The root is another one: nothing outside of it is read."""
    for name in ("usr/bin/python3", "opt/env/bin/python3", "opt/shims/python3"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    for name, first in (
        ("opt/env/bin/pip", "#!/opt/env/bin/python3"),
        ("opt/shims/pip", "#!/usr/bin/env bash"),
        ("usr/bin/pip", "#!/nowhere/python3"),
    ):
        (tmp_path / name).write_text(f"{first}\n")
        (tmp_path / name).chmod(0o755)
    place = WorkingDirectory(tmp_path, "/opt")
    path = "/usr/bin:/opt/env/bin"
    assert find_python(place, ["/opt/env/bin/pip"], path) == "/opt/env/bin/python3"
    assert find_python(place, ["env/bin/pip"], path) == "/opt/env/bin/python3"
    assert find_python(place, ["/opt/shims/pip"], path) == "/opt/shims/python3"
    assert find_python(place, ["/opt/missing/bin/pip", "pip"], path) == "/usr/bin/python3"
    assert find_python(place, [], path) == "/usr/bin/python3"
    assert find_python(place, [], "/nothing") is None


def test_a_real_interpreter_answers() -> None:
    found = probe("python3", run_plainly, cwd=None, env=None)
    assert found is not None
    assert found.implementation == "cpython"
    assert "purelib" in found.paths
    assert probe("/no/such/python", run_plainly, cwd=None, env=None) is None
    assert probe("false", run_plainly, cwd=None, env=None) is None


def test_a_python_that_says_too_much_or_hangs_is_none(tmp_path: Path) -> None:
    """Regression: all of its output was kept, for as long as it ran."""
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexec yes\n")
    python.chmod(0o755)
    assert probe(str(python), run_plainly, cwd=None, env=None) is None
    # A Python whose child keeps the pipe open is ended, too.
    python.write_text("#!/bin/sh\nsleep 20 &\nexec sleep 600\n")
    assert probe(str(python), run_plainly, cwd=None, env=None, timeout_s=1.0) is None


@pytest.mark.parametrize("output", [b"", b"hello", b"[]", b"{}", b'{"paths": 3}', b"\xff"])
def test_other_answers_are_none(output: bytes) -> None:
    assert parse("python3", output) is None


@pytest.mark.parametrize(
    ("command", "environ", "expected"),
    [
        ("conda install -y a", {"CONDA_PREFIX": "/c", "VIRTUAL_ENV": "/v"}, b"/c"),
        ("micromamba env update -f e.yml", {"CONDA_PREFIX": "/c"}, b"/c"),
        ("uv sync", {"UV_PROJECT_ENVIRONMENT": "/opt/e"}, b"/opt/e"),
        ("poetry install", {"POETRY_VIRTUALENVS_IN_PROJECT": "true"}, b"/job/.venv"),
        ("poetry -C sub install", {"POETRY_VIRTUALENVS_IN_PROJECT": "1"}, b"/job/sub/.venv"),
    ],
)
def test_variables_that_tell_the_environment(
    command: str, environ: dict[str, str], expected: bytes
) -> None:
    assert infer_targets(hints_of(command.split()), None, environ, "/job").paths == (expected,)


@pytest.mark.parametrize(
    "command",
    [
        "conda create -n x python",
        "conda install -n x a",
        "mamba env create -f environment.yml",
        "conda install a",
        "poetry install",
        "pdm install -g",
    ],
)
def test_environments_that_only_the_tools_settings_lead_to(command: str) -> None:
    environ = {"VIRTUAL_ENV": "/v"} if "conda" in command else {}
    with pytest.raises(UnsupportedError, match="--target DIR"):
        infer_targets(hints_of(command.split()), _SYSTEM, environ, "/job")


def test_lock_files_of_projects_are_inputs() -> None:
    for tool in ("uv", "poetry", "pdm"):
        assert hints_of([tool, "sync"]).files == (f"{tool}.lock", "pyproject.toml")
    assert hints_of(["uv", "run", "x"]).projects == ()


def test_an_interpreter_is_asked_again_when_it_was_changed(tmp_path: Path) -> None:
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    known, asked = tmp_path / "known", []

    def ask() -> Interpreter | None:
        asked.append(1)
        return probe(str(python), run_plainly, cwd=None, env=None)

    def look(**environ: str) -> Interpreter | None:
        return remembered(known, str(python), environ, ask)

    assert look() == look() == probe(str(python), run_plainly, cwd=None, env=None)
    assert len(asked) == 1
    look(PYTHONUSERBASE="/elsewhere")
    assert len(asked) == 2
    # Now the Python is a virtual environment's.
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    look(PYTHONUSERBASE="/elsewhere")
    look(PYTHONUSERBASE="/elsewhere")
    assert len(asked) == 3
    for file in known.iterdir():
        file.write_text("{}")
    look(PYTHONUSERBASE="/elsewhere")
    assert len(asked) == 4
