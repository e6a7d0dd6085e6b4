"""Members of a start's fan-out, by its variables, files and store; and its secret."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.fanout.host import HostPlan
from bootseer.fanout.keys import key_of, shared_secret
from bootseer.launch.fanout import find_plan
from bootseer.settings.config import Settings, load_config
from bootseer.store import open_store

SECRET = "5e" * 32
HOSTS = {
    "BOOTSEER_FANOUT_HOSTS": "n[1-4]",
    "BOOTSEER_NODE": "n2",
    "BOOTSEER_SUBMISSION": "7",
    "BOOTSEER_STORE": "hdfs://n/s",
}


def _settings(tmp_path: Path, **variables: str) -> Settings:
    known = {"HOME": str(tmp_path), "BOOTSEER_CONFIG": "/dev/null"}
    return load_config({}, {**known, **variables}).settings


def _plan(settings: Settings, secret: str = SECRET) -> HostPlan | None:
    return find_plan(settings, ["true"], secret)


def _key(plan: HostPlan) -> bytes:
    return key_of(bytes.fromhex(plan.secret), plan.membership.digest, *plan.start)


def test_a_start_that_no_scheduler_describes_goes_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert _plan(_settings(tmp_path, BOOTSEER_STORE="hdfs://n/s")) is None


def test_nodes_that_share_no_store_go_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert _plan(_settings(tmp_path, **{**HOSTS, "BOOTSEER_STORE": ""})) is None


def test_nodes_that_have_one_secret_and_one_list_have_one_key(tmp_path: Path) -> None:
    plans = []
    for node in ("n2", "n3"):
        plan = _plan(_settings(tmp_path, **{**HOSTS, "BOOTSEER_NODE": node}))
        assert plan is not None
        plans.append(plan)
    first, second = plans
    assert [one.membership.own for one in plans] == [1, 2]
    assert first.membership.members == second.membership.members
    assert _key(first) == _key(second)
    other = _plan(_settings(tmp_path, **{**HOSTS, "BOOTSEER_SUBMISSION": "8"}))
    assert other is not None
    assert _key(other) != _key(first)


@pytest.mark.parametrize(
    ("variables", "secret", "why"),
    [
        ({"BOOTSEER_NODE": "n9"}, SECRET, "does not name this node"),
        ({"BOOTSEER_FANOUT_HOSTS": "n1,n2,n2,n3"}, SECRET, "names the node 'n2' twice"),
        ({"BOOTSEER_FANOUT_HOSTS": "/nowhere/hosts"}, SECRET, "/nowhere/hosts"),
        ({"BOOTSEER_FANOUT_KEY_FILE": "/nowhere/key"}, SECRET, "/nowhere/key"),
        ({}, SECRET[1:], "BOOTSEER_FANOUT_KEY is no key"),
    ],
)
def test_what_cannot_be_right_is_one_error(
    tmp_path: Path, variables: dict[str, str], secret: str, why: str
) -> None:
    with pytest.raises(BootseerError, match=why) as raised:
        _plan(_settings(tmp_path, **{**HOSTS, **variables}), secret)
    assert secret not in str(raised.value)


def test_a_file_of_hosts_and_a_file_with_the_key(tmp_path: Path) -> None:
    hosts, key = tmp_path / "hosts", tmp_path / "key"
    hosts.write_text("n1 rack1\nn2 rack2\nn3 rack1\nn4 rack2\n")
    key.write_text(SECRET)
    key.chmod(0o600)
    files = {"BOOTSEER_FANOUT_HOSTS": str(hosts), "BOOTSEER_FANOUT_KEY_FILE": str(key)}
    plan = _plan(_settings(tmp_path, **{**HOSTS, **files}), "")
    assert plan is not None
    assert [one.name for one in plan.membership.members] == ["n1", "n3", "n2", "n4"]
    assert (plan.membership.own, plan.secret) == (2, SECRET)


def test_nodes_of_a_start_find_one_secret_in_the_store(tmp_path: Path) -> None:
    def ask(submission: str) -> bytes:
        with open_store((tmp_path / "store").as_uri()) as store:
            return shared_secret(store, ("job", submission, "0"))

    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(ask, ["7"] * 6))
    assert len(found) == 1
    assert ask("7") in found
    assert ask("8") not in found
    # Garbage is no key, and no exception of another kind.
    assert all(len(one) == 32 for one in found)


def test_the_command_does_not_get_the_secret(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "run", "--", "sh", "-c", "env"],
        env={
            **HOSTS,
            "BOOTSEER_FANOUT_KEY": SECRET,
            "BOOTSEER_TIMELINE_DIR": str(tmp_path / "timeline"),
            "BOOTSEER_RUN_DIR": str(tmp_path / "run"),
            "BOOTSEER_CONFIG": "/dev/null",
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "BOOTSEER_FANOUT_HOSTS" in done.stdout
    assert SECRET not in done.stdout + done.stderr
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
