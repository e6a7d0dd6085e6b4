import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.base.redact import strip_logins
from bootseer.snapshots.command_parts import command_part, secret_part, variable_parts
from bootseer.snapshots.key import SetupRequest, resolve
from bootseer.snapshots.key_parts import Part, fingerprint
from testbed.wheels import make_wheel

_PARTS = st.lists(st.builds(Part, st.text(max_size=8), st.text(max_size=8)), max_size=6)


def test_the_encoding_never_changes() -> None:
    """Stores contain keys: a release that computes others would miss every snapshot."""
    parts = [Part("salt", ""), Part("command", '["pip", "install", "x"]')]
    assert fingerprint(parts) == "47c89e17564996d8d04d54251ed0f531c7cead0153e36128d9674c38dd9e7617"


@given(_PARTS, _PARTS)
def test_equal_keys_mean_equal_parts(one: list[Part], other: list[Part]) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (sorted(one) == sorted(other))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://user:pass@host/simple", "https://host/simple"),
        ("https://token@host/simple", "https://host/simple"),
        ("https://host/a@b", "https://host/a@b"),
        ("git+https://u:p@h/x.git@v1", "git+https://h/x.git@v1"),
        ("https://u:p@ss@h/x", "https://h/x"),
        ("https://u:p/ss@h/x", "https://h/x"),
        ("https://u:p'ss@h/x", "https://h/x"),
        ("a https://u:p@h b http://v@i c", "a https://h b http://i c"),
        ("user@host", "user@host"),
    ],
)
def test_credentials_are_taken_out_of_urls(text: str, clean: str) -> None:
    assert strip_logins(text) == clean


def test_no_secret_is_in_a_part() -> None:
    environ = {
        "PIP_INDEX_URL": "https://me:hunter2@index/simple",
        "MY_TOKEN": "hunter2",
        "UNRELATED": "hunter2",
    }
    variables = variable_parts(environ, ["MY_TOKEN", "MISSING"])
    command = command_part(["pip", "install", "-i", "https://me:hunter2@index/simple", "x"])
    parts = [*variables.parts, *command.parts]
    parts += secret_part(parts, variables.secrets)
    assert "hunter2" not in repr(parts)
    assert {part.name for part in parts} == {
        "env PIP_INDEX_URL",
        "env MY_TOKEN",
        "env MISSING",
        "command",
        "secrets",
    }


def test_a_guess_of_a_secret_costs_what_the_format_says() -> None:
    """scrypt has N = 16384, r = 8, p = 1: each guess takes some 40 ms and 16 MiB."""
    parts = [Part("salt", ""), Part("command", '["login", "***"]')]
    salt = bytes.fromhex(fingerprint(parts))
    key = hashlib.scrypt(b'["hunter2", "A=b"]', salt=salt, n=16384, r=8, p=1, dklen=64)
    assert secret_part(parts, ["hunter2", "A=b"]) == [Part("secrets", f"scrypt:{key[:32].hex()}")]


def test_declared_variables_decide() -> None:
    keys = set()
    for environ in ({"CUDA": "12"}, {"CUDA": "13"}, {"CUDA": ""}, {}):
        found = variable_parts(environ, ["CUDA"])
        keys.add(fingerprint([*found.parts, *secret_part(found.parts, found.secrets)]))
    assert len(keys) == 4


def _inputs(folder: Path, *words: str) -> dict[str, str]:
    """Return the files, projects and wheels that decide the result of `pip install WORDS`."""
    request = SetupRequest(
        ["pip", "install", "--no-index", *words],
        targets=["/opt/env"],
        directory=str(folder),
        environ={"PATH": "/usr/bin:/bin"},
    )
    parts = resolve(request, lambda sentence: None).parts
    return {part.name: part.value for part in parts if part.name.startswith(("input ", "wheels "))}


@pytest.mark.parametrize("line", ["--find-links {}", "-f {}", "--find-links={}", "-f{} # x"])
@pytest.mark.parametrize(
    "place", ["wheels", "./wheels", "{0}/deep/wheels", "file://{0}/deep/wheels"]
)
def test_wheels_that_a_requirements_file_names_decide(
    tmp_path: Path, line: str, place: str
) -> None:
    """Regression: wheels counted only if the command itself named their folder."""
    wheels = tmp_path / "deep/wheels"
    wheels.mkdir(parents=True)
    (wheels / "a-1.whl").write_text("1")
    text = line.format(place.format(tmp_path))
    (tmp_path / "deep/requirements.txt").write_text(f"{text}\na\n")
    before = _inputs(tmp_path, "-r", "deep/requirements.txt")
    assert [name for name in before if name.startswith("wheels ")]
    (wheels / "a-2.whl").write_text("2")
    after = _inputs(tmp_path, "-r", "deep/requirements.txt")
    assert before.keys() == after.keys()
    assert before != after


@pytest.mark.parametrize(
    "word", ["./project", "./project[dev,test]", "file://{}/project", "p[a]@file://{}/project#x=1"]
)
def test_projects_may_have_extras_and_be_called_by_a_url(tmp_path: Path, word: str) -> None:
    """Regression: the requirements of the project in `pip install -e .[dev]` were not followed."""
    word = word.format(tmp_path)
    (tmp_path / "project").mkdir()
    (tmp_path / "requirements.txt").write_text(f"-e {word}\n")
    keys = set()
    for number in ("1", "2"):
        (tmp_path / "project/pyproject.toml").write_text(f"version = {number}\n")
        for words in ([word], ["-r", "requirements.txt"]):
            found = _inputs(tmp_path, *words)
            (name,) = (name for name in found if name.endswith("/project"))
            keys.add(found[name])
    assert len(keys) == 2


def test_an_environment_inside_its_project_is_no_input(tmp_path: Path) -> None:
    """Regression: each start found a changed project, and ran the set-up on top of the
    environment."""
    (tmp_path / "setup.py").touch()
    request = SetupRequest(["pip", "install", "-e", "."], targets=["env"], directory=str(tmp_path))
    before = resolve(request, lambda sentence: None)
    assert any(part.name == "input ." for part in before.parts)
    (tmp_path / "env").mkdir()
    (tmp_path / "env/file").touch()
    assert resolve(request, lambda sentence: None) == before
    (tmp_path / "new.py").touch()
    assert resolve(request, lambda sentence: None) != before


def test_a_wheel_that_was_built_again_decides(tmp_path: Path) -> None:
    """Regression: a new wheel with the same name and size was not noticed."""
    wheels = tmp_path / "wheels"
    keys = set()
    for number in ("1", "2"):
        text = f"NUMBER = {number}\n" + "#" * 100_000
        make_wheel(wheels, "alpha", "1.0", {"alpha.py": text})
        keys.add(_inputs(tmp_path, "-f", "wheels", "a")["wheels wheels"])
    assert len({path.name for path in wheels.iterdir()}) == 1
    assert len(keys) == 2


def test_of_a_very_large_folder_of_wheels_not_all_is_read(tmp_path: Path) -> None:
    """Regression: each start opened all wheels, one after another."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    found = []
    for last in (3, 4096):
        for number in range(last + 1):
            (wheels / f"{number:04}.whl").write_text("old")
        request = SetupRequest(
            ["pip", "install", "--no-index", "-f", "wheels", "a==1"],
            targets=["/opt/env"],
            directory=str(tmp_path),
            environ={"PATH": "/usr/bin:/bin"},
        )
        before = resolve(request, lambda sentence: None, tmp_path / "known")
        keys = {before.parts}
        for name, text in (("0000", "new"), (f"{last:04}", "new"), (f"{last:04}", "newer")):
            (wheels / f"{name}.whl").write_text(text)
            keys.add(resolve(request, lambda sentence: None, tmp_path / "known").parts)
        found.append((before.is_open, len(keys), bool(before.unknown)))
    # Of the last wheel only the size counts, and the key is open.
    assert found == [(False, 4, False), (True, 3, True)]


def test_files_that_variables_name_decide(tmp_path: Path) -> None:
    (tmp_path / "site.txt").write_text("-c more.txt\n")
    (tmp_path / "more.txt").write_text("a==1\n")
    environ = {"PATH": "/usr/bin:/bin", "PIP_CONSTRAINT": f"{tmp_path}/site.txt"}
    request = SetupRequest(["true"], targets=["/opt/env"], environ=environ)
    names = {part.name for part in resolve(request, lambda sentence: None).parts}
    assert {"input site.txt", "input more.txt"} <= names


def test_wheels_may_also_lie_in_the_working_directory_or_be_named_by_a_variable(
    tmp_path: Path,
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "deep/r.txt").write_text("-f wheels\n--find-links https://host/x\n-f /no/such\n")
    names = set(_inputs(tmp_path, "-r", "deep/r.txt"))
    assert names == {"input r.txt", "wheels wheels"}
    found = _inputs(tmp_path, "-f", f"file://{tmp_path}/wheels", "a")
    assert set(found) == {f"wheels {tmp_path}/wheels"}


def test_credentials_in_a_requirements_file_do_not_decide(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    keys = []
    for text in (
        "-i https://me:one@host/simple\na==1\n",
        "-i https://me:two@host/simple\na==1\n",
        "-i https://host/simple\na==1\n",
        "-i https://other/simple\na==1\n",
    ):
        file.write_text(text)
        keys.append(_inputs(tmp_path, "-r", "requirements.txt")["input requirements.txt"])
    assert keys[0] == keys[1] == keys[2] != keys[3]
