"""Files that a set-up reads are in its key; a command with unknown inputs is reported."""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import InvalidInputError, SetupFailedError
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.explain import explain_setup
from bootseer.snapshots.key import Resolved, SetupRequest, resolve
from bootseer.store import open_store
from tests.snapshots.conftest import MakeNode


def _resolved(directory: Path, *command: str, **environ: str) -> Resolved:
    request = SetupRequest(
        command,
        targets=["/opt/made-by-nobody"],
        directory=str(directory),
        environ={"PATH": os.environ["PATH"], "HOME": str(directory / "home"), **environ},
    )
    return resolve(request, lambda sentence: None)


def _key(directory: Path, *command: str, **environ: str) -> str:
    found = _resolved(directory, *command, **environ)
    return found.key(dict.fromkeys(found.targets, "nothing"))


def _script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["{0}/job/x.sh"],
        ["sh", "-c", "source ./job/x.sh"],
        ["sh", "-c", ". job/x.sh"],
        ["bash", "-euxo", "pipefail", "job/x.sh"],
        ["sudo", "-n", "./job/x.sh"],
        ["timeout", "60", "job/x.sh"],
        ["nice", "./job/x.sh"],
        ["x.sh"],
        ["sh", "-c", '"$HOME/../job/x.sh"'],
        ["sh", "-c", "~/../job/x.sh"],
        ["./outer.sh"],
    ],
)
def test_scripts_decide(tmp_path: Path, command: list[str]) -> None:
    """Regression: scripts with an absolute path, or behind another program, were not in the key."""
    words = [word.format(tmp_path) for word in command]
    path = f"{tmp_path}/job:{os.environ['PATH']}"
    _script(tmp_path / "outer.sh", '"$(dirname "$0")/job/x.sh"')
    (tmp_path / "home").mkdir()
    keys = set()
    for text in ("pip install a==1", "pip install a==2"):
        _script(tmp_path / "job/x.sh", text)
        keys.add(_key(tmp_path, *words, PATH=path))
    assert len(keys) == 2


def test_what_a_script_installs_from_decides(tmp_path: Path) -> None:
    _script(
        tmp_path / "job/x.sh",
        'here="$(dirname "$0")"\n# the rest\npython3 -m venv /opt/made-by-nobody\n'
        '/opt/made-by-nobody/bin/pip install -r "$(dirname "$0")/r.txt" ./wheels/*.whl',
    )
    keys = set()
    for number in ("1", "2"):
        (tmp_path / "job/r.txt").write_text(f"a=={number}\n")
        keys.add(_key(tmp_path, "job/x.sh"))
        (tmp_path / "wheels").mkdir(exist_ok=True)
        (tmp_path / "wheels/b.whl").write_text(number)
        keys.add(_key(tmp_path, "job/x.sh"))
    assert len(keys) == 4


@pytest.mark.parametrize("pattern", ["dist/*.whl", "./dist/[ab].*", "{0}/d*st/?.whl"])
def test_patterns_are_filled_in(tmp_path: Path, pattern: str) -> None:
    (tmp_path / "dist").mkdir()
    keys = set()
    for text in ("1", "2"):
        (tmp_path / "dist/a.whl").write_text(text)
        keys.add(_key(tmp_path, "sh", "-c", f"pip install {pattern.format(tmp_path)}"))
    assert len(keys) == 2


@pytest.mark.parametrize("folder", ["build", "dist", "src/build", "deep/dist"])
def test_no_name_of_a_folder_hides_what_was_declared(tmp_path: Path, folder: str) -> None:
    project = tmp_path / "project"
    (project / folder).mkdir(parents=True)
    (project / "pyproject.toml").touch()
    file = project / folder / "file"

    def key(*command: str, inputs: list[str]) -> str:
        request = SetupRequest(command, targets=["/opt/x"], inputs=inputs, directory=str(tmp_path))
        return resolve(request, lambda sentence: None).key({b"/opt/x": "nothing"})

    declared, named = set(), set()
    for text in ("1", "2"):
        file.write_text(text)
        declared.add(key("true", inputs=["project"]))
        named.add(key("pip", "install", "./project", inputs=[]))
    assert len(declared) == 2
    # Builds leave these folders beside a project's files, and only there.
    assert len(named) == (1 if folder in ("build", "dist") else 2)


def test_large_files_decide_by_their_ends(tmp_path: Path) -> None:
    keys = set()
    for text in (b"1", b"2"):
        with (tmp_path / "big.whl").open("wb") as file:
            file.seek(300 * 2**20)
            file.write(text)
        found = _resolved(tmp_path, "pip", "install", "--no-index", "./big.whl")
        keys.add(found.key(dict.fromkeys(found.targets, "nothing")))
        assert [what for what in found.unknown if "big.whl" in what]
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("place", "variables"),
    [
        ("home/.config/pip/pip.conf", {}),
        ("home/.pip/pip.conf", {}),
        ("xdg/pip/pip.conf", {"XDG_CONFIG_HOME": "{0}/xdg"}),
        ("etc/pip/pip.conf", {"XDG_CONFIG_DIRS": "{0}/etc"}),
        ("mine.conf", {"PIP_CONFIG_FILE": "{0}/mine.conf"}),
        ("venv/pip.conf", {"VIRTUAL_ENV": "{0}/venv"}),
    ],
)
def test_settings_of_pip_decide(tmp_path: Path, place: str, variables: dict[str, str]) -> None:
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    environ = {name: value.format(tmp_path) for name, value in variables.items()}
    keys = []
    for text in (
        "",
        "[global]\ntimeout = 5\ncache-dir = /x\n",
        "[global]\nindex-url = https://me:hunter2@one/simple\n",
        "[global]\nindex-url = https://me:hunter3@one/simple\ntimeout = 7\n",
        "[global]\nindex-url = https://two/simple\n",
        "[install]\npre = true\n",
    ):
        file.write_text(text)
        found = _resolved(tmp_path, "pip", "install", "a==1", **environ)
        keys.append(found.key(dict.fromkeys(found.targets, "nothing")))
        assert "hunter" not in repr(found)
    assert keys[0] == keys[1]
    assert keys[2] == keys[3]
    assert len(set(keys)) == 4
    # Tools that do not read the variable are not affected.
    assert _key(tmp_path, "uv", "pip", "install", "a==1", **environ) == _key(
        tmp_path, "uv", "pip", "install", "a==1", **{**environ, "PIP_CONFIG_FILE": os.devnull}
    )


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("uv.toml", ["uv", "pip", "install", "a==1"]),
        ("home/.config/uv/uv.toml", ["uv", "sync"]),
        ("home/.condarc", ["conda", "install", "-p", "/opt/x", "a"]),
        ("home/.condarc", ["./whatever"]),
    ],
)
def test_settings_of_other_tools_decide(tmp_path: Path, place: str, command: list[str]) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    keys = set()
    for text in ("[pip]\nindex-url = 'https://a'\n", "[pip]\nindex-url = 'https://b'\n"):
        (tmp_path / place).write_text(text)
        keys.add(_key(tmp_path, *command))
    assert len(keys) == 2


def test_a_projects_table_of_uv_decides(tmp_path: Path) -> None:
    keys = []
    for text in ("[project]\nname='a'\n", "[tool.uv]\nx=1\n", "# why\n[tool.uv]\nx = 1\n"):
        (tmp_path / "pyproject.toml").write_text(text)
        keys.append(_key(tmp_path, "uv", "pip", "install", "a==1"))
    assert keys[0] != keys[1] == keys[2]


def test_variables_in_requirements_decide(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_text("-i https://${USER}:${TOKEN}@host/x\na==${A_VERSION}\n")
    keys = {
        _key(tmp_path, "pip", "install", "-r", "r.txt", A_VERSION=version, TOKEN=token)
        for version, token in (("1", "x"), ("2", "x"), ("2", "y"))
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("command", "is_open"),
    [
        ("pip install a", True),
        ("pip install 'a>=1'", True),
        ("pip install a==1 'b[x]==2.0; python_version>\"3\"'", False),
        ("pip install a==1.*", True),
        ("pip install --no-index -f wheels a", False),
        ("pip install ./project", True),
        ("pip install --no-deps ./project", False),
        ("pip install -r exact.txt", False),
        ("pip install -r loose.txt", True),
        ("pip install -r loose.txt -c exact.txt", False),
        ("pip install -r includes.txt", True),
        ("pip install -r offline.txt", False),
        ("pip install git+https://host/x@v1", True),
        (f"pip install x@git+https://host/x@{'a' * 40}", False),
        ("pip list", False),
        ("python3 -m venv /opt/x", False),
        ("mkdir -p /opt/x; cp exact.txt /opt/x/", False),
        ("uv sync", True),
        ("cd locked; uv sync --frozen", False),
        ("uv add a", True),
        ("conda install -p /opt/x numpy=1.26", True),
        ("conda install -p /opt/x numpy=1.26=py311_0", False),
        ("conda create -p /opt/x --file explicit.txt", False),
        ("conda env create -p /opt/x -f environment.yml", True),
        ("apt-get install -y gcc", True),
        ("./known.sh", False),
        ("R=exact; timeout 60 pip install -r $R.txt", False),
        ("for r in exact offline; do pip install -r $r.txt; done", False),
        ("PIP_CONSTRAINT=exact.txt pip install -r loose.txt", False),
        ("export PATH=/opt/x/bin:$PATH; pip install a==1", True),
        ("python3 -m venv /opt/x && export PATH=/opt/x/bin:$PATH; pip install a==1", False),
        ("[ -d /opt/x ] || python3 -m venv /opt/x; /opt/x/bin/pip install -r exact.txt", False),
        ("set -euo pipefail; cd locked && uv sync --frozen", False),
        ("grep -v torch exact.txt; pip install a==1", False),
        ("grep -r torch; pip install a==1", True),
        ("cat exact.txt | xargs pip install", True),
        ("pip install -r missing.txt", True),
        ("pip install -r https://host/exact.txt", True),
        ("pip install -r remote.txt", True),
        ("pip install a==$VERSION", True),
        ("pip install -e ~other/project --no-deps", True),
        ("xargs -a exact.txt pip install", True),
        ("cd beside; uv sync --frozen", True),
        ("cd locked; uv sync --upgrade", True),
        ("ls; pip install a==1", False),
        ('pip install -r "$PWD/exact.txt"', False),
        ('cd locked; pip install -r "$PWD/exact.txt"', False),
        ('pip install -r "$OLDPWD/exact.txt"', True),
        ("conda activate x; pip install a==1", True),
        ("conda install -p /opt/x --offline a; conda clean -a", False),
        ("pip install -r {exact,offline}.txt", False),
        ("./folder.sh", False),
        ("HOME=/x pip install a==1", True),
        ("ls > list; pip install a==1", True),
        ("./unknown.sh", True),
        ("python3 make.py", True),
    ],
)
def test_what_may_change_without_notice_is_told(
    tmp_path: Path, command: str, is_open: bool
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked/uv.lock").touch()
    _script(
        tmp_path / "folder.sh",
        'HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\npip install -r "$HERE/exact.txt"',
    )
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside/uv.lock").write_text('source = { directory = "../locked" }\n')
    (tmp_path / "remote.txt").write_text("-r https://host/exact.txt\n")
    (tmp_path / "exact.txt").write_text("# why\na==1 --hash=sha256:1\n\nb==2\n")
    (tmp_path / "loose.txt").write_text("A\n")
    (tmp_path / "includes.txt").write_text("b==1\n-r loose.txt\n")
    (tmp_path / "offline.txt").write_text("--no-index\na\n")
    (tmp_path / "explicit.txt").write_text("@EXPLICIT\nhttps://x/a.conda\n")
    (tmp_path / "environment.yml").write_text("dependencies: [a]\n")
    (tmp_path / "make.py").touch()
    _script(tmp_path / "known.sh", "set -e\npip install -r exact.txt")
    _script(tmp_path / "unknown.sh", "set -e\ncurl -O https://host/x")
    found = _resolved(tmp_path, "sh", "-c", command)
    assert found.is_open == is_open
    assert bool(found.unknown) == is_open


def test_comments_blank_lines_and_the_order_of_exact_versions_make_no_difference(
    tmp_path: Path,
) -> None:
    def key(text: str) -> str:
        (tmp_path / "r.txt").write_text(text)
        return _key(tmp_path, "pip", "install", "-r", "r.txt")

    plain = key("-i https://x\na==1\nb==2\n")
    assert plain == key("# why\nb==2   # b\n\n-i https://x\na==1")
    assert plain != key("-i https://x\na==1\nb==3\n")
    assert plain != key("-i https://x\n-i https://y\na==1\nb==2\n")
    assert key("-i https://x\n-i https://y\na==1\n") != key("-i https://y\n-i https://x\na==1\n")
    # pip's search depends on the folder in which it begins.
    assert key("a\nb\n") != key("b\na\n")
    assert key("a\nb\n") == key("a # x\n\n   b\n")


def test_the_same_requirements_in_another_folder_are_the_same(tmp_path: Path) -> None:
    keys = set()
    for job in ("job-1", "job-2"):
        folder = tmp_path / job
        folder.mkdir()
        (folder / "requirements.txt").write_text("-r more.txt\na==1\n")
        (folder / "more.txt").write_text("b==2\n")
        words = ("pip", "install", "-r", "requirements.txt")
        keys.add(_key(folder, *words))
        keys.add(_key(tmp_path, *words[:3], f"{folder}/requirements.txt"))
        keys.add(_key(tmp_path, *words[:3], f"{job}/requirements.txt"))
    assert len(keys) == 1
    (tmp_path / "job-2/more.txt").write_text("b==3\n")
    assert _key(tmp_path, "pip", "install", "-r", "job-2/requirements.txt") not in keys
    # Two files with one name are kept apart.
    both = ("pip", "install", "-r", "job-1/requirements.txt", "-r", "job-2/requirements.txt")
    before = _key(tmp_path, *both)
    (tmp_path / "job-1/requirements.txt").write_text("-r more.txt\na==2\n")
    assert _key(tmp_path, *both) != before


def test_a_value_behind_env_is_refused(tmp_path: Path) -> None:
    """Regression: "A=b" was taken for the name of a variable, which is never set."""
    request = SetupRequest(["true"], targets=["/x"], variables=["A=b"])
    with pytest.raises(InvalidInputError, match="takes a name"):
        resolve(request, lambda sentence: None)


def _aged(store: Path, days: float) -> None:
    with open_store(store.as_uri()) as opened:
        for manifest in list(catalogue.list_all(opened)):
            created_ns = manifest.created_ns - int(days * 86_400e9)
            catalogue.publish(opened, replace(manifest, created_ns=created_ns), replace=True)


def test_by_default_an_open_set_up_is_made_anew_after_a_week(
    tmp_path: Path, make_node: MakeNode
) -> None:
    env = tmp_path / "env"
    for opens, how in ((True, "captured"), (False, "restored")):
        script = f"mkdir -p {env}; date +%N > {env}/file" + ("; perl -e 1 || true" if opens else "")
        request = SetupRequest(["sh", "-c", script], targets=[str(env)])
        said: list[str] = []
        first = run_setup(make_node("a"), request, report=said.append)
        assert first.how == "captured"
        told = [sentence for sentence in said if "does not tell what perl" in sentence]
        assert len(told) == opens
        assert all("once it is 7 d old" in sentence for sentence in told)
        shutil.rmtree(env)
        _aged(tmp_path / "store", 6.9)
        assert run_setup(make_node("b"), request).how == "restored"
        # The existing environment stays: running the set-up on top would change nothing.
        _aged(tmp_path / "store", 0.2)
        assert run_setup(make_node("b"), request).how == "in place"
        shutil.rmtree(env)
        found = explain_setup(make_node("c"), request, print)
        assert found.outcome == ("would run" if opens else "would restore")
        assert found.max_age_s == (7 * 86_400 if opens else 0)
        assert bool(found.unknown) == opens
        assert run_setup(make_node("c"), request).how == how
        shutil.rmtree(env)


def test_a_set_up_that_cannot_be_made_anew_uses_what_there_is(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """A day without the package index must not lose a good snapshot by default."""
    env = tmp_path / "env"
    script = f"""
        mkdir {env}; echo half > {env}/half
        perl -e 'exit(-e "{tmp_path}/away" ? 1 : 0)'
        mv {env}/half {env}/file
    """
    request = SetupRequest(["sh", "-ec", script], [str(env)])
    run_setup(make_node("a"), request)
    shutil.rmtree(env)
    _aged(tmp_path / "store", 8)
    (tmp_path / "away").touch()
    with pytest.raises(SetupFailedError):
        run_setup(replace(make_node("b"), snapshot_max_age_s=86_400.0), request)
    shutil.rmtree(env)
    said: list[str] = []
    assert run_setup(make_node("b"), request, report=said.append).how == "restored"
    assert os.listdir(env) == ["file"]
    (warning,) = (sentence for sentence in said if sentence.startswith("warning"))
    assert "failed with exit code 1" in warning
    assert "is used once more, though it is 8 d old" in warning
    # Files that Bootseer did not put there are never removed.
    shutil.rmtree(env)
    env.mkdir()
    (env / "precious").touch()
    with pytest.raises(SetupFailedError):
        run_setup(make_node("c"), request)
    assert os.listdir(env) == ["precious"]


def test_who_has_waited_for_one_that_failed_uses_what_there_is(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Otherwise a thousand nodes would run the failing set-up one after another."""
    env = tmp_path / "env"
    script = f"echo run >> {tmp_path}/runs; mkdir {env}; perl -e 1 || true"
    request = SetupRequest(["sh", "-c", script], [str(env)])
    key = run_setup(make_node("a"), request).fingerprint
    shutil.rmtree(env)
    _aged(tmp_path / "store", 8)
    waits = threading.Event()
    said: list[str] = []

    def report(sentence: str) -> None:
        said.append(sentence)
        if "another node is running" in sentence:
            waits.set()

    node = make_node("b")
    with open_store(node.store_url) as store, ThreadPoolExecutor() as pool:
        lease = store.lease(catalogue.lease_key(key), ttl_s=60, owner="other")
        assert lease is not None
        waiting = pool.submit(run_setup, node, request, report=report)
        assert waits.wait(60), said
        lease.release()
        assert waiting.result().how == "restored"
    assert len([sentence for sentence in said if "could not be made anew" in sentence]) == 1
    assert (tmp_path / "runs").read_text() == "run\n"
