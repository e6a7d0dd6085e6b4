"""Reports of changes that a set-up makes outside its targets."""

import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bootseer.snapshots import capture as outside
from bootseer.snapshots.capture import changed_since, now_ns, usual_places
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.snapshots.manifest import Outside
from bootseer.snapshots.restore import restore_snapshot
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode


def test_changes_outside_are_named_with_the_way_out(tmp_path: Path, make_node: MakeNode) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home / ".local/bin", home / ".cache", work):
        folder.mkdir(parents=True)
    (work / "source.py").touch()
    script = f"""
        mkdir env; echo x > env/file
        echo x > source.py
        echo x > {home}/.local/bin/tool
        echo x > {home}/.local/bin/other
        echo x > {home}/.cache/wheel
        mkdir __pycache__; echo x > __pycache__/a.pyc
        mkdir cache; echo x > cache/wheel
    """
    request = SetupRequest(
        command=["sh", "-ec", script],
        targets=["env"],
        directory=str(work),
        environ={"PATH": os.environ["PATH"], "HOME": str(home), "UV_CACHE_DIR": "cache"},
    )
    said: list[str] = []
    result = run_setup(make_node("a"), request, report=said.append)
    assert result.how == "captured"
    ours = [path for path in result.changed_outside if path.startswith(str(tmp_path))]
    assert ours == [
        f"{home}/.local/bin/other",
        f"{home}/.local/bin/tool",
        f"{work}/source.py",
    ]
    warnings = [sentence for sentence in said if sentence.startswith("warning: changed during")]
    assert len(warnings) == 1
    assert f"{home}/.local/bin/ (2 names)" in warnings[0]
    assert f"{work}/source.py" in warnings[0]
    assert "--target" in warnings[0]
    # Neither files that existed before nor restores are reported.
    assert run_setup(make_node("a"), request).changed_outside == ()


def _differs(before_ns: int) -> bool:
    return now_ns() != before_ns


def _wait_for_tick() -> None:
    # Two clock readings: since Linux 6.13 a change may get a finer time than this clock shows.
    for _ in range(2):
        wait_for(partial(_differs, now_ns()), "a tick", interval_s=0.001)


def test_the_look_is_bounded_and_follows_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "before").touch()
    _wait_for_tick()
    since = now_ns()
    place = tmp_path / "place"
    for number in range(50):
        (place / f"d{number}").mkdir(parents=True)
        (place / f"d{number}/file").touch()
    (place / "loop").symlink_to(place)
    (place / "up").symlink_to(tmp_path)
    os.utime(place / "d0/file", (1, 1))  # the ctime tells all the same
    found = changed_since(since, [str(place), str(place), str(tmp_path)], [place / "d1"])
    assert found.is_complete
    assert len(found.paths) == 49 + 2
    assert str(tmp_path / "before") not in found.paths
    assert changed_since(since, ["/no/such"], []) == Outside(is_complete=True)
    assert not changed_since(since, [str(place)], [], look_s=-1).is_complete
    monkeypatch.setattr(outside, "NAMES_MAX", 10)
    assert not changed_since(since, [str(place)], []).is_complete
    assert Outside(is_complete=False).sentence() == ""
    many = Outside(paths=tuple(f"/d{number}/x" for number in range(9))).sentence()
    assert "and 4 more folders" in many


def test_places_are_absolute_and_never_the_root() -> None:
    assert usual_places({"HOME": "/", "VIRTUAL_ENV": "relative"}, "/")[0] == "/.local"
    assert "/etc" in usual_places({}, "/")


def _outside_request(tmp_path: Path) -> SetupRequest:
    (tmp_path / "work").mkdir(exist_ok=True)
    script = f"""
        mkdir env; echo x > env/file
        mkdir -p {tmp_path}/home/bin; touch {tmp_path}/home/bin/tool
        touch slurm-77.out train-4711.err install.log
    """
    return SetupRequest(
        command=["sh", "-ec", script],
        targets=["env"],
        directory=str(tmp_path / "work"),
        environ={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "SLURM_JOB_ID": "4711",
        },
    )


def test_nodes_that_restore_are_told_what_they_lack(tmp_path: Path, make_node: MakeNode) -> None:
    """Regression: only the node that ran the set-up was told of the files that the others lack."""
    said: list[str] = []
    tool = f"{tmp_path}/home/bin/tool"
    done = run_setup(make_node("a"), _outside_request(tmp_path), report=said.append)
    assert [path for path in done.changed_outside if path.startswith(str(tmp_path))] == [tool]
    shutil.rmtree(tmp_path / "work/env")
    said.clear()
    result = run_setup(make_node("b"), _outside_request(tmp_path), report=said.append)
    assert result.how == "restored"
    assert tool in result.changed_outside
    (warning,) = (sentence for sentence in said if "outside the targets changed on a" in sentence)
    assert tool in warning
    assert "--target" in warning
    shutil.rmtree(tmp_path / "work/env")
    said.clear()
    restore_snapshot(make_node("c"), done.fingerprint, report=said.append)
    assert any("outside the targets changed on a" in sentence for sentence in said)


def test_what_others_write_is_no_change_of_the_set_up(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    since = now_ns()
    for name in ("slurm-1.out", "job-99.out", "job-98.out", "x.log", "ours"):
        (place / name).touch()
    with (place / "others").open("wb") as written, (place / "ours").open("rb"):
        written.write(b"x")
        written.flush()
        found = changed_since(since, [str(place)], [], job_id="99")
        assert found.paths == (f"{place}/job-98.out", f"{place}/ours")
    until = time.time_ns()
    _wait_for_tick()
    (place / "later").touch()
    found = changed_since(since, [str(place)], [], until_ns=until, job_id="99")
    assert found.paths == (f"{place}/job-98.out", f"{place}/others", f"{place}/ours")


def test_the_output_of_the_set_up_is_no_change_of_it(tmp_path: Path) -> None:
    output = tmp_path / "what-the-job-says"
    program = (
        "from bootseer.snapshots.capture import changed_since\n"
        f"print(changed_since(0, [{str(tmp_path)!r}], []).paths)"
    )
    with output.open("wb") as file:
        done = subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert done.returncode == 0
    assert output.read_text() == "()\n"
