"""Logins from files and credential helpers; no message shows one."""

import base64
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from bootseer.registry import credentials
from bootseer.registry.credentials import Credential, find_credential
from testbed.waiting import wait_for

SECRET = "s3cret:with-colon"


def auth(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def configured(tmp_path: Path, config: Any, name: str = "config.json") -> dict[str, str]:
    """Return an environment in which `config` is Docker's configuration."""
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / name).write_text(text)
    return {"DOCKER_CONFIG": str(tmp_path), "HOME": str(tmp_path / "home")}


def helper(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the shell script `script` as docker-credential-test."""
    path = tmp_path / "bin" / "docker-credential-test"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("key", "host"),
    [
        ("r.io", "r.io"),
        ("https://r.io", "r.io"),
        ("https://r.io/v2/", "r.io"),
        ("r.io:5000", "r.io:5000"),
        ("https://index.docker.io/v1/", "docker.io"),
        ("docker.io", "docker.io"),
    ],
)
def test_a_login_in_the_file(key: str, host: str, tmp_path: Path) -> None:
    environ = configured(tmp_path, {"auths": {key: auth("me", SECRET), "other.io": auth("x", "y")}})
    assert find_credential(host, "a/b", environ) == Credential("me", SECRET)
    assert find_credential("absent.io", "a/b", environ) is None


def test_the_most_specific_login_wins(tmp_path: Path) -> None:
    logins = {name: auth(name, "p") for name in ("r.io", "r.io/team", "r.io/team/image")}
    environ = configured(tmp_path, {"auths": logins})
    for repository, user in (
        ("team/image", "r.io/team/image"),
        ("team/other", "r.io/team"),
        ("teammate", "r.io"),
    ):
        found = find_credential("r.io", repository, environ)
        assert found is not None
        assert found.username == user


def test_an_identity_token(tmp_path: Path) -> None:
    environ = configured(tmp_path, {"auths": {"r.io": {**auth("", ""), "identitytoken": SECRET}}})
    assert find_credential("r.io", "a", environ) == Credential("", identity_token=SECRET)


def test_podmans_file_comes_first(tmp_path: Path) -> None:
    environ = configured(tmp_path, {"auths": {"r.io": auth("docker", "p"), "q.io": auth("d", "p")}})
    (tmp_path / "auth.json").write_text(json.dumps({"auths": {"r.io": auth("podman", "p")}}))
    environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "auth.json")
    assert find_credential("r.io", "a", environ) == Credential("podman", "p")
    assert find_credential("q.io", "a", environ) == Credential("d", "p")


def test_the_file_in_the_home_directory(tmp_path: Path) -> None:
    (tmp_path / ".docker").mkdir()
    configured(tmp_path / ".docker", {"auths": {"r.io": auth("me", "p")}})
    assert find_credential("r.io", "a", {"HOME": str(tmp_path)}) == Credential("me", "p")
    assert find_credential("r.io", "a", {}) is None


def test_a_helper_is_asked_through_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper(
        tmp_path,
        'read server; echo "$0 $* $server" > "$0.log"\n'
        """printf '{"ServerURL":"%s","Username":"me","Secret":"pw"}' "$server" """,
        monkeypatch,
    )
    environ = configured(tmp_path, {"credHelpers": {"r.io": "test"}})
    assert find_credential("r.io", "a", environ) == Credential("me", "pw")
    log = (tmp_path / "bin/docker-credential-test.log").read_text().split()[1:]
    assert log == ["get", "r.io"]
    assert find_credential("q.io", "a", environ) is None


def test_a_helpers_identity_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper(tmp_path, """echo '{"Username":"<token>","Secret":"pw"}'""", monkeypatch)
    environ = configured(tmp_path, {"credsStore": "test"})
    assert find_credential("docker.io", "a", environ) == Credential("", identity_token="pw")


@pytest.mark.parametrize(
    "script",
    [
        "echo credentials not found in native keychain; exit 1",
        "echo '{broken'",
        """echo '{"Username":1,"Secret":"x"}'""",
        "echo []",
        "exec sleep 30",
    ],
)
def test_after_a_helper_that_knows_nothing_the_file_is_read(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "HELPER_DEADLINE_S", 0.5)
    helper(tmp_path, script, monkeypatch)
    environ = configured(tmp_path, {"credsStore": "test", "auths": {"r.io": auth("me", "p")}})
    assert find_credential("r.io", "a", environ) == Credential("me", "p")


@pytest.mark.parametrize("name", ["../../bin/sh", "a b", "", 7, ["x"], "absent-helper"])
def test_a_helper_that_is_none(name: object, tmp_path: Path) -> None:
    environ = configured(tmp_path, {"credsStore": name})
    assert find_credential("r.io", "a", environ) is None


@pytest.mark.parametrize(
    "config",
    [
        "{broken " + SECRET,
        "[]",
        json.dumps({"auths": []}),
        json.dumps({"auths": {"r.io": {"auth": "!!" + SECRET}}}),
        json.dumps({"auths": {"r.io": {"auth": base64.b64encode(SECRET[:6].encode()).decode()}}}),
        json.dumps({"auths": {"r.io": {"auth": 7}}}),
        json.dumps({"auths": {"r.io": None}}),
        json.dumps({"auths": {"r.io": {}}}),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_no_login_and_not_quoted(
    config: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert find_credential("r.io", "a", configured(tmp_path, config)) is None
    assert "s3cret" not in caplog.text


def test_a_file_that_may_not_be_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").mkdir()
    assert find_credential("r.io", "a", {"DOCKER_CONFIG": str(tmp_path)}) is None
    assert "config.json" in caplog.text


def test_a_login_does_not_show_its_secret() -> None:
    assert "s3cret" not in repr(Credential("me", SECRET, SECRET))


def test_a_helper_that_leaves_a_child_behind_is_left_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child keeps the helper's output open, so that reading to its end would never return."""
    monkeypatch.setattr("bootseer.registry.credentials.HELPER_DEADLINE_S", 0.5)
    helper(tmp_path, "sleep 600 & sleep 600", monkeypatch)
    environ = configured(tmp_path, {"credHelpers": {"r.io": "test"}})
    found: list[object] = []

    def find() -> None:
        found.append(find_credential("r.io", "a/b", environ))

    threading.Thread(target=find, daemon=True).start()
    wait_for(lambda: found, "the end of a helper that hangs")
    assert found == [None]
