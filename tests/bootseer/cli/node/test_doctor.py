"""`bootseer doctor` on this machine, with a bad store and with one that hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.launch import doctor
from bootseer.launch.doctor import CheckStatus, Finding, examine
from bootseer.settings.config import Settings, load_settings
from testbed.waiting import pause


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        {
            "store_url": (tmp_path / "store").as_uri(),
            "cache_dir": str(tmp_path / "cache"),
            "run_dir": str(tmp_path / "run"),
        }
    )


def _by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_a_good_store_is_atomic_and_left_clean(settings: Settings, tmp_path: Path) -> None:
    found = _by_name(examine(settings))
    assert found["store"].status is CheckStatus.OK
    assert found["store atomic"].status is CheckStatus.OK
    assert found["clock"].status is CheckStatus.OK
    assert found["cache"].status is not CheckStatus.FAIL
    for folder in ("store", "cache", "run"):
        left = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        # That there is a store, and that this node has used it, is known from now on.
        assert {path.name if folder == "store" else path.parent.name for path in left} == {
            "store": {".bootseer.store"},
            "cache": {"stores"},
            "run": set(),
        }[folder]


def test_every_bad_finding_says_what_to_do(settings: Settings, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    broken = replace(settings, store_url=f"{blocked.as_uri()}/store", cache_dir=blocked / "c")
    found = _by_name(examine(broken))
    assert found["store"].status is CheckStatus.FAIL
    assert found["cache"].status is CheckStatus.FAIL
    assert all(finding.advice for finding in found.values() if finding.status is not CheckStatus.OK)


def test_a_hung_check_ends_at_the_deadline(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(settings: Settings) -> list[Finding]:
        pause(3600)
        return []

    monkeypatch.setattr(doctor, "CHECKS", (("store", hang),))
    (finding,) = examine(replace(settings, deadline_s=0.1))
    assert finding.status is CheckStatus.FAIL
    assert "no answer within" in finding.seen


def test_the_command_exits_with_1_when_something_is_broken(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bootseer", "--store", "file:///proc/none/x", "doctor"]
    environ = {**os.environ, "BOOTSEER_CACHE_DIR": str(tmp_path / "c")}
    environ["BOOTSEER_RUN_DIR"] = str(tmp_path / "r")
    result = subprocess.run(
        [*command, "--json"], capture_output=True, text=True, timeout=100, env=environ
    )
    assert result.returncode == 1
    found = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert found["store"]["status"] == "fail"
    assert "/proc/none/x" in found["store"]["seen"]


def test_a_store_on_this_nodes_disk_is_not_shared(settings: Settings) -> None:
    found = _by_name(examine(settings))
    assert found["store shared"].status is CheckStatus.WARN
    assert "no other node sees" in found["store shared"].seen


@pytest.mark.needs("root")
def test_a_store_that_is_only_read_is_no_failure(settings: Settings, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    flags = ["--store", store.as_uri(), "--cache-dir", str(settings.cache_dir)]
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", mount, store),
            *(sys.executable, "-m", "bootseer", *flags, "doctor", "--json"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert found["store"]["status"] == "warn"
    assert "readable, not writable" in found["store"]["seen"]
    assert "replay" in found["store"]["advice"]
