"""Real environments of venv and pip: scripts, bytecode, upgrades; on other nodes and paths."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from testbed.needs import MissingError
from testbed.trees import describe, differences
from testbed.wheels import make_wheel
from tests.snapshots.conftest import MakeNode


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels: alpha (needs beta, has a console script) in two versions, beta and gamma."""
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        said = f"def say():\n    import beta\n    print('alpha {version}', beta.NUMBER)\n"
        make_wheel(
            folder,
            "alpha",
            version,
            {"alpha/__init__.py": said, f"alpha/only_in_{version[0]}.py": "X = 1\n"},
            requires=["beta"],
            scripts={"alpha-say": "alpha:say"},
        )
    parts = {f"beta/part_{number}.py": f"NUMBER = {number}\n" for number in range(50)}
    make_wheel(folder, "beta", "1.0", {"beta/__init__.py": "NUMBER = 42\n", **parts})
    make_wheel(folder, "gamma", "1.0", {"gamma/__init__.py": "", "gamma/data/x.txt": "x\n"})
    return folder


@pytest.fixture
def pip_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the surrounding configuration of pip."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")


def _python() -> str:
    """Return the interpreter below this environment if it can make environments, else ""."""
    found = subprocess.run(
        [sys.executable, "-c", "import ensurepip"], check=False, capture_output=True
    )
    if found.returncode:
        raise MissingError(
            "this Python has no ensurepip, so it cannot make an environment with pip"
        )
    return sys.executable


def _pip(env: Path) -> list[str]:
    """Return the words of this Python's pip for an environment without one."""
    return [_python(), "-m", "pip", "--python", f"{env}/bin/python"]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout


def _check(env: Path, version: str) -> None:
    """Assert that the environment, which has no pip, works as a user would use it."""
    assert _run(str(env / "bin/alpha-say")) == f"alpha {version} 42\n"
    assert "No broken requirements" in _run(*_pip(env), "check")
    assert _run(str(env / "bin/python"), "-c", "import sys; print(sys.prefix)").strip() == str(env)
    activated = f". {env}/bin/activate && command -v alpha-say"
    assert _run("sh", "-c", activated).strip() == str(env / "bin/alpha-say")


@pytest.mark.usefixtures("pip_environ")
def test_an_environment_and_an_upgrade_on_top(
    tmp_path: Path, make_node: MakeNode, wheels: Path
) -> None:
    env = tmp_path / "env"
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("alpha==1.0\ngamma\n")
    pip = " ".join(_pip(env))
    options = f"--no-index --find-links {wheels}"
    make = f"{_python()} -m venv --without-pip {env}; {pip} install {options} -r {requirements}"
    change = f"{pip} install {options} alpha==2.0; {pip} uninstall -y gamma"
    first = SetupRequest(command=["sh", "-e", "-c", make])
    second = SetupRequest(command=["sh", "-e", "-c", change])

    said: list[str] = []
    result = run_setup(make_node("a"), first, report=said.append)
    assert (result.how, result.targets) == ("captured", (str(env),)), said
    assert any(str(requirements) in sentence for sentence in said)
    made = describe(env)

    shutil.rmtree(env)
    assert run_setup(make_node("b"), first).how == "restored"
    assert differences(made, describe(env)) == []
    _check(env, "1.0")
    # Nothing was compiled again: no bytecode file is new or changed.
    bytecode = {path: entry for path, entry in describe(env).items() if path.endswith(".pyc")}
    assert len(bytecode) > 50
    assert all(made.get(path) == entry for path, entry in bytecode.items())

    said.clear()
    assert run_setup(make_node("b"), second, report=said.append).how == "captured"
    assert any(f"the environment of {env}/bin" in sentence for sentence in said)
    changed = describe(env)

    shutil.rmtree(env)
    assert run_setup(make_node("c"), first).how == "restored"
    result = run_setup(make_node("c"), second)
    assert result.how == "restored"
    assert result.file_count < len(changed) / 4
    assert differences(changed, describe(env)) == []
    assert not list(env.rglob("gamma*"))
    assert not list(env.rglob("only_in_1*"))
    _check(env, "2.0")


@pytest.mark.usefixtures("pip_environ")
def test_an_environment_that_grows_by_a_package(tmp_path: Path, make_node: MakeNode) -> None:
    """pip makes it anew, but it is stored as a difference.

    The bytecode is shared, too, though each file of it holds another time of its source.
    """
    library = Path(os.__file__).parent
    folders = ("asyncio", "email", "http", "json", "logging", "unittest", "xml/etree")
    files = {
        f"large/{folder.replace('/', '_')}/{path.name}": path.read_text()
        for folder in folders
        for path in (library / folder).glob("*.py")
    }
    make_wheel(tmp_path / "wheels", "large", "1.0", files)
    make_wheel(tmp_path / "wheels", "small", "1.0", {"small.py": "NUMBER = 1\n"})
    env = tmp_path / "env"
    requirements = tmp_path / "requirements.txt"
    install = (
        f"{' '.join(_pip(env))} install --no-index --find-links {tmp_path}/wheels -r {requirements}"
    )
    request = SetupRequest(
        command=["sh", "-e", "-c", f"{_python()} -m venv --without-pip {env}; {install}"],
        targets=[str(env)],
        inputs=[str(requirements)],
    )
    results = []
    for text in ("large\n", "large\nsmall\n"):
        shutil.rmtree(env, ignore_errors=True)
        requirements.write_text(text)
        results.append(run_setup(make_node("a"), request))
    first, second = results
    assert (first.how, second.how) == ("captured", "captured")
    # Most of the bytes are the tree itself: name, attributes and digest of each of 250 files.
    assert second.moved_bytes < first.moved_bytes / 20
    made = describe(env)
    shutil.rmtree(env)
    assert run_setup(make_node("b"), request).how == "restored"
    assert differences(made, describe(env)) == []
    check = "import small, large.asyncio.log as log; print(log.__cached__)"
    cached = _run(str(env / "bin/python"), "-c", check).strip()
    # The bytecode was valid: nothing was compiled again.
    assert differences(made, describe(env)) == []
    assert Path(cached).is_file()
