"""What a set-up is given in confidence is in no manifest, and nothing that is shown of one."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.base.redact import take_command_secrets, take_secrets
from bootseer.snapshots.catalogue import catalogue
from bootseer.snapshots.catalogue.manifest_codec import decode
from bootseer.snapshots.explain import explain_setup
from bootseer.snapshots.run import run_setup
from bootseer.snapshots.setup.fingerprint import Part, fingerprint
from bootseer.snapshots.setup.request import Request, resolve
from bootseer.store import open_store
from tests.snapshots.conftest import MakeNode

SECRET = "c0nf1dent1al"
WORDS = [
    ["--token", SECRET],
    [f"--token={SECRET}"],
    ["--password", f"{SECRET} with blanks; and $igns"],
    [f"--api-key={SECRET} '\""],
    [f"HF_TOKEN={SECRET}"],
    ["-H", f"Authorization: Bearer {SECRET}"],
    ["-H", f"Authorization: Basic {SECRET}=="],
    [f"--header=X-Auth-Token: {SECRET}"],
    ["-u", f"me:{SECRET}"],
    [f"https://me:{SECRET}@host/x"],
    [f"https://me:a/{SECRET}@host/x"],
    [f"https://{SECRET}@host/x"],
    [f"https://host/x?token={SECRET}"],
    [f"https://bucket.host/x?X-Amz-Credential=a&X-Amz-Signature={SECRET}&X-Amz-Date=1"],
    [f"https://host/x?sv=2&anything={SECRET}"],
    [f"hf_{SECRET}{SECRET}"],
    [f"//registry/:_authToken={SECRET}"],
]


@pytest.mark.parametrize("words", WORDS)
def test_secrets_of_a_command_are_hidden_and_taken(words: list[str]) -> None:
    shown, secrets = take_command_secrets(["curl", *words, "last"])
    assert SECRET not in " ".join(shown)
    assert (shown[0], shown[-1]) == ("curl", "last")
    # A user of a URL does not decide; all else does.
    assert any(SECRET in secret for secret in secrets) != any("@host" in word for word in words)
    # The same in a shell's script.
    quoted = " ".join(f"'{word}'" if " " in word and "'" not in word else word for word in words)
    script = f"set -e; curl {quoted} && pip install -r requirements.txt"
    if "'" not in words[-1]:
        (_, _, text), _ = take_command_secrets(["sh", "-c", script])
        assert SECRET not in text
        assert text.endswith("pip install -r requirements.txt")


@pytest.mark.parametrize(
    "words",
    [
        ["pip", "install", "-r", "requirements.txt", "tokenizers==0.20", "a[b]>=1"],
        ["sh", "-c", "TOKENIZERS_PARALLELISM=false ./run --max-tokens 5 -u 1000:1000 a:b"],
        ["sh", "-c", 'curl -H "Authorization: Bearer $HF_TOKEN" --token $TOKEN https://host/x'],
        ["uv", "pip", "install", "--index-url", "https://download.pytorch.org/whl/cu121", "torch"],
        ["pip", "install", "git+https://host/x.git@v1#egg=x"],
    ],
)
def test_ordinary_commands_stay_as_they_are(words: list[str]) -> None:
    """Their keys are those that earlier releases computed."""
    assert take_command_secrets(words) == (words, ())


@given(st.lists(st.text(max_size=30), max_size=5))
def test_hiding_twice_is_hiding_once(words: list[str]) -> None:
    shown, _ = take_command_secrets(words)
    assert len(shown) == len(words)
    for word in words:
        text, _ = take_secrets(word)
        assert take_secrets(text)[0] == text


def _request(tmp_path: Path, **changed: str) -> Request:
    environ = {**os.environ, "PIN": "4711", "PIP_INDEX_URL": f"https://host/x?token={SECRET}"}
    environ |= changed
    token = environ.get("TOKEN", SECRET)
    env = tmp_path / "env"
    return Request(
        ["sh", "-c", f"mkdir {env}; HF_TOKEN={token} true --password '{token}'; touch {env}/x"],
        targets=[str(env)],
        variables=["PIN"],
        environ=environ,
    )


def test_nothing_that_is_kept_or_shown_has_them(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    said: list[str] = []
    result = run_setup(node, _request(tmp_path), report=said.append)
    assert result.how == "captured"
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    (manifest,) = (tmp_path / "store/snapshots").glob("*.json")
    text = manifest.read_text()
    for data in ("4711", "PIN=4711"):
        for name in ("sha256", "sha1", "md5", "blake2b"):
            assert hashlib.new(name, data.encode()).hexdigest() not in text
    found = explain_setup(node, _request(tmp_path), said.append)
    assert SECRET not in repr((found, said))
    assert {part.name: part.value for part in found.parts}["env PIN"] == "set"


def test_secrets_decide(tmp_path: Path, make_node: MakeNode) -> None:
    run_setup(make_node("a"), _request(tmp_path))
    shutil.rmtree(tmp_path / "env")
    assert run_setup(make_node("b"), _request(tmp_path)).how == "restored"
    for changed in ({"PIN": "4712"}, {"TOKEN": "another"}, {"PIP_INDEX_URL": "https://host/x?t=2"}):
        shutil.rmtree(tmp_path / "env")
        found = explain_setup(make_node("c"), _request(tmp_path, **changed), print)
        assert found.outcome == "would run"
        assert [one.part for one in found.differences] == ["secrets"]
        assert found.differences[0].note
        assert run_setup(make_node("b"), _request(tmp_path, **changed)).how == "captured"


def test_no_secret_can_be_tested_without_the_others(tmp_path: Path) -> None:
    """Else a PIN is found at once beside any token."""

    def secret_parts(environ: dict[str, str]) -> list[Part]:
        request = Request(["true"], targets=["/x"], variables=["PIN", "TOKEN"], environ=environ)
        parts = resolve(request, lambda sentence: None).parts
        return [part for part in parts if part.value.startswith(("sha256:", "scrypt:"))]

    (one,) = secret_parts({"PATH": "/bin", "PIN": "1", "TOKEN": "x"})
    (other,) = secret_parts({"PATH": "/bin", "PIN": "1", "TOKEN": "y"})
    assert one.value.startswith("scrypt:")
    assert one != other


def test_what_earlier_releases_stored_is_hidden_when_it_is_read(
    tmp_path: Path, make_node: MakeNode
) -> None:
    run_setup(make_node("a"), _request(tmp_path))
    (file,) = (tmp_path / "store/snapshots").glob("*.json")
    document = json.loads(file.read_text())
    parts = [
        Part("command", json.dumps(["curl", "--token", SECRET])),
        Part("env PIN", "sha256:" + hashlib.sha256(b"PIN=4711").hexdigest()),
        Part("env PIP_INDEX_URL", f"https://host/x?token={SECRET}"),
    ]
    key = fingerprint(parts)
    document |= {"fingerprint": key, "parts": [[part.name, part.value] for part in parts]}
    document.pop("digest", None)
    read = decode(json.dumps(document).encode(), key)
    assert [part.value for part in read.parts] == [
        '["curl", "--token", "***"]',
        "set",
        "https://host/x?***",
    ]
    file.with_name(f"{key}.json").write_text(json.dumps(document))
    with open_store(make_node("a").store_url) as store:
        assert SECRET not in repr(catalogue.find(store, key))
