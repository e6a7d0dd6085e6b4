"""Secrets that a set-up is given are in no manifest and in no output about one."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.snapshots.command_parts import command_part, secret_part, variable_parts
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.explain import explain_setup
from bootseer.snapshots.key import Resolved, SetupRequest, resolve
from bootseer.snapshots.key_parts import Part
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.secret_commands import COMMANDS, SECRET, SECRETS

ORDINARY = [
    "pip install -r requirements.txt torch==2.1",
    "pip install --no-cache-dir -q -U 'numpy>=1.26,<3' 'a[b,c]~=2.0' d",
    "python3 -m pip install -e .[dev] --no-build-isolation",
    "python3.11 -m venv --system-site-packages /opt/env",
    "uv sync --frozen --no-dev",
    "uv pip install --index-url https://download.pytorch.org/whl/cu121 torch==2.4.0+cu121",
    "uv venv -p 3.11 .venv",
    "conda env create -f env.yml",
    "conda create -y -n train -c conda-forge python=3.11 pytorch::pytorch=2.3",
    "mamba install -y -p /opt/conda numpy",
    "apt-get install -y --no-install-recommends git libaio-dev",
    "npm ci",
    "poetry install --no-root --only main",
    "git clone --depth 1 -b v1.2 https://github.com/a/b.git /src/b",
    "pip install git+https://github.com/NVIDIA/TransformerEngine.git@0123456789abcdef0123456789abcdef01234567",
    "pip install /wheels/torch-2.1.0+cu121-cp311-cp311-linux_x86_64.whl",
    "bash setup.sh",
    "./build.sh",
]
SCRIPTS = [
    "set -euo pipefail; python3 -m venv /opt/env && /opt/env/bin/pip install -r requirements.txt",
    "export DEBIAN_FRONTEND=noninteractive; apt-get update -qq && apt-get install -y curl",
    "source /opt/env/bin/activate && cd /src && pip install -e . > /tmp/log 2>&1",
    'mkdir -p "$HOME/env" && touch "$HOME"/env/x; rm -rf /tmp/build',
    "curl -fsSL https://astral.sh/uv/install.sh | bash",
    "HF_TOKEN=$(cat /run/secrets/token) pip install --extra-index-url $INDEX x",
    "if true; then bash -c 'pip install x'; else exit 1; fi",
    "timeout 600 sudo -E pip install x",
    "srun -n 8 numactl -N 0 pip install x",
]


def _resolved(command: list[str], folder: Path, **environ: str) -> tuple[Resolved, str]:
    """Resolve a command; return the result, and the text of everything printed and stored about
    it."""
    said: list[str] = []
    request = SetupRequest(
        command,
        targets=[str(folder / "env")],
        directory=str(folder),
        # No program is found, so none is asked for its version.
        environ={"PATH": str(folder / "empty"), "HOME": str(folder), **environ},
    )
    found = resolve(request, said.append)
    return found, repr((found.parts, found.unknown, said))


def _forms(text: str, value: str) -> list[list[str]]:
    """Return a text as the words of a command, as a script, in a script, and as a one-word
    script."""
    text = text.replace("SECRET", value)
    return [text.split(" "), ["sh", "-c", text], ["bash", "-ec", f"true\n{text}\ntrue"], [text]]


@pytest.mark.parametrize("text", COMMANDS)
def test_secrets_of_ordinary_commands_are_hidden_and_decide(text: str) -> None:
    """Regression: 12 of 19 such commands had their secret in the manifest, which all readers
    see."""
    for value in SECRETS:
        for command, other in zip(_forms(text, value), _forms(text, "another"), strict=True):
            public = command_part(command)
            assert value not in json.loads(public.parts[0].value).__repr__()
            assert public != command_part(other) or "SECRET@host" in text


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_said_of_commands_has_no_secrets(count: int, tmp_path: Path) -> None:
    """Regression: words taken for programs or requirements, and lines of here-documents, were
    printed."""
    for at in range(0, len(COMMANDS), count):
        text = "\n".join(COMMANDS[at : at + count]).replace("SECRET", SECRET)
        (tmp_path / "setup.sh").write_text(f"#!/bin/sh\n{text}\n")
        assert SECRET not in _resolved(["bash", "setup.sh"], tmp_path)[1]
        if at % 10 == 0:
            assert SECRET not in _resolved(["sh", "-c", text], tmp_path)[1]
            assert SECRET not in _resolved(text.split(" "), tmp_path)[1]


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_commands_stay_readable(text: str) -> None:
    words = [word.strip("'") for word in text.split(" ")]
    assert command_part(words).secrets == ()
    assert json.loads(command_part(words).parts[0].value) == words
    assert json.loads(command_part(["sh", "-c", text]).parts[0].value) == ["sh", "-c", text]


@pytest.mark.parametrize("text", SCRIPTS)
def test_ordinary_scripts_stay_readable(text: str) -> None:
    (part,) = command_part(["sh", "-c", text]).parts
    assert json.loads(part.value) == ["sh", "-c", text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("pip install -r r.txt --password SECRET x", "pip install -r r.txt --password *** x"),
        ("pip install -i https://me:SECRET@host/simple x", "pip install -i https://host/simple x"),
        ("pip install https://host/a.whl?sig=SECRET", "pip install https://host/a.whl?***"),
        ("pip install --new-option SECRET x", "pip install *** *** x"),
        ("export HF_TOKEN=SECRET; pip install x", "export HF_TOKEN=***; pip install x"),
        ("echo SECRET | docker login --password-stdin", "echo *** | docker login --password-stdin"),
        ("sudo -uhugh -n pip install x", "sudo *** -n pip install x"),
        ("tool SECRET; uv sync # SECRET", "*** ***; uv sync ***"),
        ("cat > x <<EOF\nSECRET\nEOF\nuv sync", "cat > x <<EOF\n***EOF\nuv sync"),
    ],
)
def test_what_is_shown_of_a_command(text: str, shown: str) -> None:
    part = command_part(["sh", "-c", text.replace("SECRET", SECRET)]).parts[0]
    assert json.loads(part.value) == ["sh", "-c", shown]


@pytest.mark.parametrize("token", ["4eC39HqLyjWDarjtT1zdp7dc", "4f9d8a7b6c5e4d3f2a1b0c9d8e7f6a5b"])
@pytest.mark.parametrize(
    "text",
    [
        "pip install SECRET",
        "pip install -i SECRET x",
        "pip install 1.0+SECRET",
        "conda install vSECRET",
        "conda install a=SECRET",
        "mkdir -p SECRET",
        "uv sync > SECRET",
        "git clone git@host:SECRET/x",
        "pip install git+https://host/x#egg=SECRET",
    ],
)
def test_a_token_that_looks_like_a_version_is_hidden(text: str, token: str) -> None:
    """Regression: tokens beginning with a digit were shown in places of requirements and
    versions."""
    for command in _forms(text, token):
        assert token not in repr(command_part(command).parts)


def test_users_of_urls_do_not_decide() -> None:
    """They change more often than the content of an index."""
    forms = ("me:one@", "me:two@", "three@", "")
    commands = [["pip", "install", "-i", f"https://{user}host/simple", "x"] for user in forms]
    assert len({repr(command_part(command)) for command in commands}) == 1


@pytest.mark.parametrize("name", ["HF_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_values_of_secret_variables_are_hidden_wherever_they_stand(
    name: str, tmp_path: Path
) -> None:
    """Their values are hidden also as a requirement, a path, a program or a value."""
    environ = {name: "sesame-1", "PIP_TARGET": "/opt/sesame-1", "PIP_PRE": "1"}
    for command in (
        [
            "pip",
            "install",
            "sesame-1",
            "/x/sesame-1/y",
            "--prefix=/sesame-1",
            "git+https://h/sesame-1",
        ],
        ["sesame-1", "x"],
        ["sh", "-c", "cd sesame-1 && sesame-1=1 pip install x > sesame-1"],
    ):
        found, told = _resolved(command, tmp_path, **environ)
        assert "sesame-1" not in told
        assert "secrets" in {part.name for part in found.parts}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("https://me:12,34@host/simple https://host/x", "https://host/simple https://host/x"),
        ("https://host/x?token=c0nf1dent1al", "https://host/x?***"),
        ("https://hooks.host/api/" + "aBcDeFgH-" * 6, "https://hooks.host/api/***"),
        ("conda-forge,https://host/t/tk-abc/x", "conda-forge,https://host/t/***/x"),
        ("/opt/wheels ./more", "/opt/wheels ./more"),
    ],
)
def test_what_is_shown_of_a_variable(value: str, shown: str) -> None:
    public = variable_parts({"PIP_EXTRA_INDEX_URL": value}, [])
    assert [part.value for part in public.parts] == [shown]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_any_words_are_told_apart(words: list[str]) -> None:
    """No text makes the parsing of commands fail, and one word more is another set-up."""
    one, other = command_part(words), command_part([*words, "x"])
    assert len(json.loads(one.parts[0].value)) == len(words)
    assert (one.parts, one.secrets) != (other.parts, other.secrets)


_PIECES = st.sampled_from(
    [
        *("pip", "install", "--key", "curl", "-c", "sh", "a:b", "cd", "$X", "<<E", "\nE\n", "$(("),
        *(
            "https://",
            "/",
            " ",
            " ",
            "\n",
            "=",
            "'",
            '"',
            "`",
            "$(",
            "${",
            ")",
            "\\",
            "|",
            ";",
            "#",
        ),
    ]
)


@given(st.lists(_PIECES, max_size=12), st.sampled_from(["--token=", "HF_TOKEN=", "tool ", "echo "]))
def test_nothing_around_a_secret_lets_it_through(pieces: list[str], before: str) -> None:
    """The secret still decides the key, with any text before it."""
    public = command_part(["sh", "-c", f"{''.join(pieces)}\n{before}{SECRET}"])
    assert SECRET not in public.parts[0].value
    assert any(SECRET in secret for secret in public.secrets)


@pytest.mark.parametrize(
    "unit", ["$(", "'", '"$(', "a ", "<<E\n", "a=$(b ", "x\n", "`", "${", "# "]
)
def test_long_scripts_are_read_to_their_end(unit: str) -> None:
    """200,000 characters: quadratic steps would take minutes."""
    public = command_part(["sh", "-c", unit * (200_000 // len(unit)) + f"\ntool {SECRET}"])
    assert SECRET not in public.parts[0].value


def _full_request(tmp_path: Path, **changed: str) -> SetupRequest:
    environ = {**os.environ, "PIN": "4711", "PIP_INDEX_URL": f"https://host/x?token={SECRET}"}
    environ |= changed
    token = environ.get("TOKEN", SECRET)
    env = tmp_path / "env"
    return SetupRequest(
        ["sh", "-c", f"mkdir {env}; HF_TOKEN={token} true --password '{token}'; touch {env}/x"],
        targets=[str(env)],
        variables=["PIN"],
        environ=environ,
    )


def test_nothing_that_is_kept_or_shown_has_them(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    said: list[str] = []
    result = run_setup(node, _full_request(tmp_path), report=said.append)
    assert result.how == "captured"
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    (manifest,) = (tmp_path / "store/snapshots").glob("*.json")
    text = manifest.read_text()
    for data in ("4711", "PIN=4711"):
        for name in ("sha256", "sha1", "md5", "blake2b"):
            assert hashlib.new(name, data.encode()).hexdigest() not in text
    found = explain_setup(node, _full_request(tmp_path), said.append)
    assert SECRET not in repr((found, said))
    assert {part.name: part.value for part in found.parts}["env PIN"] == "set"


def test_secrets_decide(tmp_path: Path, make_node: MakeNode) -> None:
    run_setup(make_node("a"), _full_request(tmp_path))
    shutil.rmtree(tmp_path / "env")
    assert run_setup(make_node("b"), _full_request(tmp_path)).how == "restored"
    for changed in ({"PIN": "4712"}, {"TOKEN": "another"}, {"PIP_INDEX_URL": "https://host/x?t=2"}):
        shutil.rmtree(tmp_path / "env")
        found = explain_setup(make_node("c"), _full_request(tmp_path, **changed), print)
        assert found.outcome == "would run"
        assert [one.part for one in found.differences] == ["secrets"]
        assert found.differences[0].note
        assert run_setup(make_node("b"), _full_request(tmp_path, **changed)).how == "captured"


def test_no_secret_can_be_tested_without_the_others(tmp_path: Path) -> None:
    """Otherwise a PIN beside a token could be found by trying all PINs."""

    def secret_parts(environ: dict[str, str]) -> list[Part]:
        request = SetupRequest(
            ["true"], targets=["/x"], variables=["PIN", "TOKEN"], environ=environ
        )
        parts = resolve(request, lambda sentence: None).parts
        return [part for part in parts if part.value.startswith(("sha256:", "scrypt:"))]

    (one,) = secret_parts({"PATH": "/bin", "PIN": "1", "TOKEN": "x"})
    (other,) = secret_parts({"PATH": "/bin", "PIN": "1", "TOKEN": "y"})
    assert one.value.startswith("scrypt:")
    assert one != other


def test_the_derivation_of_secrets_is_slow_and_never_changes() -> None:
    """With a cost of 2 instead of 16384, secrets could be found 8,000 times faster."""
    parts = [Part("command", '["curl", "***"]'), Part("salt", "")]
    assert secret_part(parts, ["hunter2", "PIN=4711"]) == [
        Part("secrets", "scrypt:238f9b9ba0ea3f6b71c424b24f198fc25e3c190af11d96b7355d03f0d9518154")
    ]
