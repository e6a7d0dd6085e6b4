"""run_setup: hits and misses, several nodes, and everything that may go wrong."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.config import Settings
from bootseer.errors import InvalidInputError, NotFoundError, SetupFailedError
from bootseer.snapshots import catalogue
from bootseer.snapshots.run import SetupResult, run_setup
from bootseer.snapshots.setup.request import Request
from bootseer.store import lease, open_store
from tests.snapshots.conftest import MakeNode
from tests.support.trees import describe, differences


def _request(tmp_path: Path, script: str = "", **options: object) -> Request:
    """A set-up that makes `tmp_path/env` and counts its runs in `tmp_path/runs`."""
    target = tmp_path / "env"
    text = f"echo run >> {tmp_path}/runs; mkdir -p {target}; echo hello > {target}/file; {script}"
    request = Request(command=["sh", "-e", "-c", text], targets=[str(target)])
    return replace(request, **options)


def _runs(tmp_path: Path) -> int:
    runs = tmp_path / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def test_miss_in_place_restore(tmp_path: Path, make_node: MakeNode) -> None:
    request = _request(tmp_path)
    first = run_setup(make_node("a"), request)
    assert (first.how, first.hit, _runs(tmp_path)) == ("captured", False, 1)
    again = run_setup(make_node("a"), request)
    assert (again.how, again.hit, _runs(tmp_path)) == ("in place", True, 1)
    original = describe(tmp_path / "env")
    shutil.rmtree(tmp_path / "env")
    other = run_setup(make_node("b"), request)
    assert (other.how, other.hit, _runs(tmp_path)) == ("restored", True, 1)
    assert other.fingerprint == first.fingerprint == again.fingerprint
    assert differences(original, describe(tmp_path / "env")) == []


def test_a_touched_target_is_not_in_place(tmp_path: Path, make_node: MakeNode) -> None:
    request = _request(tmp_path)
    run_setup(make_node("a"), request)
    (tmp_path / "env/file").write_text("edited")
    assert run_setup(make_node("a"), request).how == "captured"
    assert (tmp_path / "env/file").read_text() == "hello\n"
    assert _runs(tmp_path) == 2


def test_what_changes_the_key(tmp_path: Path, make_node: MakeNode) -> None:
    (tmp_path / "input").write_text("1")
    node = make_node("a")
    environ = {**os.environ, "CUDA": "12"}
    base = _request(tmp_path, inputs=[str(tmp_path / "input")], variables=["CUDA"], environ=environ)
    keys = set()

    def run(request: Request) -> None:
        shutil.rmtree(tmp_path / "env", ignore_errors=True)
        result = run_setup(node, request)
        assert result.how == "captured"
        keys.add(result.fingerprint)

    run(base)
    run(replace(base, salt="x"))
    run(replace(base, base="sha256:123"))
    run(replace(base, environ={**environ, "CUDA": "13"}))
    run(replace(base, environ={**environ, "PIP_INDEX_URL": "https://other/simple"}))
    (tmp_path / "input").write_text("2")
    run(base)
    assert len(keys) == 6


def test_requirement_files_are_inputs(tmp_path: Path, make_node: MakeNode) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.txt").write_text("-r more/inner.txt\n")
    (tmp_path / "more/inner.txt").write_text("-c pins.txt\na\n")
    (tmp_path / "more/pins.txt").write_text("a==1\n")
    said: list[str] = []
    request = Request(
        # pip is only a word here: what would run is `true`.
        command=["sh", "-c", "true || pip install -r requirements.txt; mkdir env"],
        targets=["env"],
        directory=str(tmp_path),
    )
    first = run_setup(make_node("a"), request, report=said.append)
    assert "requirements.txt, more/inner.txt, more/pins.txt" in " ".join(said)
    (tmp_path / "env").rmdir()
    (tmp_path / "more/pins.txt").write_text("a==2\n")
    second = run_setup(make_node("a"), request)
    assert first.how == second.how == "captured"
    assert first.fingerprint != second.fingerprint


def test_a_failed_setup_publishes_nothing(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    with pytest.raises(SetupFailedError) as failure:
        run_setup(node, _request(tmp_path, "exit 7"))
    assert failure.value.exit_code == 7
    with pytest.raises(SetupFailedError) as failure:
        run_setup(node, _request(tmp_path, "kill -9 $$"))
    assert failure.value.exit_code == 128 + 9
    with pytest.raises(SetupFailedError) as failure:
        run_setup(node, Request(command=["/no/such/program"], targets=[str(tmp_path / "env")]))
    assert failure.value.exit_code == 127
    with open_store(node.store_url) as store:
        assert list(catalogue.list_all(store)) == []
        assert list(store.list("leases/")) == []


def test_the_output_of_the_command_stays_off_stdout(
    tmp_path: Path, make_node: MakeNode, capfd: pytest.CaptureFixture[str]
) -> None:
    run_setup(make_node("a"), _request(tmp_path, "echo out; echo err >&2"))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.split() == ["out", "err"]


def _on_nodes(requests: Mapping[str, tuple[Settings, Request]]) -> dict[str, SetupResult]:
    results: dict[str, SetupResult] = {}

    def run(name: str) -> None:
        settings, request = requests[name]
        results[name] = run_setup(settings, request, wait_s=60)

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def _rooted_runner(root: Path):  # type: ignore[no-untyped-def]
    """Runs commands where $ROOT is the root: a stand-in for a container."""

    def run(args: Sequence[str], /, **options: object) -> "subprocess.CompletedProcess[bytes]":
        environ = {**os.environ, "ROOT": str(root)}
        return subprocess.run(args, **{**options, "env": environ, "cwd": root})  # type: ignore[call-overload,no-any-return]

    return run


def _rooted(tmp_path: Path, name: str, script: str = "") -> Request:
    root = tmp_path / "roots" / name
    root.mkdir(parents=True)
    text = (
        f"echo run >> {tmp_path}/runs; sleep 1; "
        f"mkdir -p $ROOT/opt/env; echo hello > $ROOT/opt/env/file; {script}"
    )
    return Request(
        command=["sh", "-e", "-c", text],
        targets=["/opt/env"],
        root=root,
        runner=_rooted_runner(root),
    )


def test_many_nodes_at_once_run_it_once(tmp_path: Path, make_node: MakeNode) -> None:
    names = ["a", "b", "c", "d"]
    results = _on_nodes({name: (make_node(name), _rooted(tmp_path, name)) for name in names})
    assert _runs(tmp_path) == 1
    hows = sorted(result.how for result in results.values())
    assert hows == ["captured", "restored", "restored", "restored"]
    trees = [describe(tmp_path / "roots" / name / "opt/env") for name in names]
    assert all(differences(trees[0], tree) == [] for tree in trees[1:])


class _ClocksOfNodes:
    """The time module, as nodes see it whose clocks are an hour ahead or behind."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def time_ns() -> int:
        """Of the node that this thread is."""
        hours = {"ahead": 1, "behind": -1}.get(threading.current_thread().name, 0)
        return time.time_ns() + hours * 3600 * 10**9


def test_clocks_that_differ_cost_time_and_no_more(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may take over a lease that is held, and lose its own; nothing else goes wrong."""
    monkeypatch.setattr(lease, "time", _ClocksOfNodes)
    names = ["exact", "ahead", "behind"]
    results = _on_nodes({name: (make_node(name), _rooted(tmp_path, name)) for name in names})
    assert "captured" in {result.how for result in results.values()}
    assert {result.how for result in results.values()} <= {"captured", "restored"}
    trees = [(tmp_path / "roots" / name / "opt/env/file").read_text() for name in names]
    assert trees == ["hello\n"] * 3
    with open_store(make_node("exact").store_url) as store:
        assert len(list(catalogue.list_all(store))) == 1
    assert run_setup(make_node("late"), _rooted(tmp_path, "late")).how == "restored"


def test_many_processes_of_one_node_run_it_once(tmp_path: Path, make_node: MakeNode) -> None:
    request = _request(tmp_path, "sleep 0.5")
    node = make_node("a")
    results = _on_nodes({str(number): (node, request) for number in range(3)})
    assert _runs(tmp_path) == 1
    assert sorted(result.how for result in results.values()) == ["captured", "in place", "in place"]


@pytest.mark.parametrize("ahead_s", [0, 24 * 3600], ids=["exact", "ahead"])
def test_a_dead_holder_costs_its_lease(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """Whatever its clock was."""
    monkeypatch.setattr(lease, "SKEW_S", 0.0)
    node = make_node("a")
    request = _request(tmp_path)
    key = run_setup(node, request).fingerprint
    shutil.rmtree(tmp_path / "env")
    with open_store(node.store_url) as store:
        store.delete(catalogue.manifest_key(key))
        with monkeypatch.context() as patched:
            now_ns = time.time_ns()
            patched.setattr(time, "time_ns", lambda: now_ns + ahead_s * 10**9)
            assert store.lease(catalogue.lease_key(key), ttl_s=0.5, owner="dead") is not None
    said: list[str] = []
    result = run_setup(make_node("b"), request, report=said.append, lease_s=5)
    assert result.how == "captured"
    assert any("another node is running" in sentence for sentence in said)


def test_a_holder_that_never_finishes_is_not_waited_for_for_ever(
    tmp_path: Path, make_node: MakeNode
) -> None:
    node = make_node("a")
    request = _request(tmp_path)
    key = run_setup(node, request).fingerprint
    shutil.rmtree(tmp_path / "env")
    with open_store(node.store_url) as store:
        store.delete(catalogue.manifest_key(key))
        lease = store.lease(catalogue.lease_key(key), ttl_s=600, owner="slow")
        assert lease is not None
        said: list[str] = []
        result = run_setup(make_node("b"), request, report=said.append, wait_s=0.5)
        assert result.how == "ran"
        assert not catalogue.exists(store, key)
        lease.release()
    assert [sentence for sentence in said if sentence.startswith("warning")] == [
        "warning: running the set-up without a snapshot: another node was still busy with it "
        "after 0 s"
    ]


@pytest.mark.parametrize(
    "url", ["file:///proc/nowhere/store", "hdfs://127.0.0.1:1/x?deadline_s=2", "nosuch://x"]
)
def test_without_a_store_the_command_just_runs(
    tmp_path: Path, make_node: MakeNode, url: str
) -> None:
    said: list[str] = []
    node = replace(make_node("a"), store_url=url, deadline_s=2.0)
    result = run_setup(node, _request(tmp_path), report=said.append)
    assert result.how == "ran"
    assert (tmp_path / "env/file").read_text() == "hello\n"
    assert _runs(tmp_path) == 1
    assert len([sentence for sentence in said if sentence.startswith("warning")]) == 1


def test_a_corrupt_snapshot_is_replaced(tmp_path: Path, make_node: MakeNode) -> None:
    request = _request(tmp_path)
    first = run_setup(make_node("a"), request)
    shutil.rmtree(tmp_path / "env")
    for blob in (tmp_path / "store/blobs/blake3").iterdir():
        blob.chmod(0o600)
        data = bytearray(blob.read_bytes())
        data[5] ^= 0xFF
        blob.write_bytes(data)
    said: list[str] = []
    result = run_setup(make_node("b"), request, report=said.append)
    assert (result.how, result.fingerprint) == ("captured", first.fingerprint)
    assert len([sentence for sentence in said if sentence.startswith("warning")]) == 1
    shutil.rmtree(tmp_path / "env")
    assert run_setup(make_node("c"), request).how == "restored"
    assert _runs(tmp_path) == 2


def test_targets_that_do_not_appear(tmp_path: Path, make_node: MakeNode) -> None:
    said: list[str] = []
    request = Request(command=["true"], targets=[str(tmp_path / "env")])
    result = run_setup(make_node("a"), request, report=said.append)
    assert result.how == "ran"
    assert "warning: the set-up ran but was not stored" in said[-1]


def test_declarations_that_cannot_be_used(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    with pytest.raises(NotFoundError, match="missing"):
        run_setup(node, _request(tmp_path, inputs=[str(tmp_path / "missing")]))
    for targets in (["/"], [""], ["a\0b"]):
        with pytest.raises(InvalidInputError):
            run_setup(node, Request(command=["true"], targets=targets, directory="/"))
    with pytest.raises(InvalidInputError):
        run_setup(node, Request(command=[]))
    assert _runs(tmp_path) == 0


def test_targets_that_cannot_be_inferred(tmp_path: Path, make_node: MakeNode) -> None:
    said: list[str] = []
    request = Request(command=["touch", str(tmp_path / "x")], directory=str(tmp_path))
    assert run_setup(make_node("a"), request, report=said.append).how == "ran"
    assert "--target" in said[0]


def test_a_root_cannot_be_left(tmp_path: Path, make_node: MakeNode) -> None:
    """Links of the image that point out of it are followed as the container would."""
    (tmp_path / "outside").mkdir()
    for name in ("a", "b"):
        request = _rooted(tmp_path, name, "rm $ROOT/opt/env/file; echo in > $ROOT/real/x")
        root = request.root
        (root / "real").mkdir()
        (root / "links").symlink_to("/../../../links2")
        (root / "links2").symlink_to(f"../../../../..{tmp_path}/outside/../../real")
        inside = root / str(tmp_path).lstrip("/")
        inside.mkdir(parents=True)
        (inside / "outside").mkdir()
        (inside.parent / "real").symlink_to("/real")
        result = run_setup(make_node(name), replace(request, targets=["/links", "/opt/env"]))
        assert (root / "real/x").read_text() == "in\n"
        assert result.how == ("captured" if name == "a" else "restored")
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.root
def test_an_overlay_root(tmp_path: Path, make_node: MakeNode) -> None:
    """A container's root: lower directories cannot be renamed, files are copied up."""
    if os.geteuid() != 0:
        pytest.skip("mounting an overlay needs root")
    lower = tmp_path / "lower"
    for folder in ("lib/pkg/old", "lib/pkg2"):
        (lower / "usr" / folder).mkdir(parents=True)
    for name in ("lib/pkg/a.py", "lib/pkg/old/b.py", "lib/pkg2/c.py", "lib/kept.py"):
        (lower / "usr" / name).write_text(name)
    trees = []
    for name in ("a", "b"):
        upper, work, merged = (tmp_path / name / part for part in ("upper", "work", "merged"))
        for layer in (upper, work, merged):
            layer.mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("overlayfs cannot be mounted here")
        try:
            text = (
                f"echo run >> {tmp_path}/runs; cd $ROOT/usr/lib; rm pkg/a.py; rm -r pkg/old; "
                "mkdir pkg/old pkg/new; echo 1 > pkg/old/fresh; echo 2 > pkg/new/x; "
                "rm -r pkg2; echo now a file > pkg2; chmod 600 kept.py; mkdir -p $ROOT/opt/venv; "
                "echo 3 > $ROOT/opt/venv/y"
            )
            request = Request(
                command=["sh", "-e", "-c", text],
                targets=["/usr/lib", "/opt/venv"],
                root=merged,
                runner=_rooted_runner(merged),
            )
            result = run_setup(make_node(name), request)
            assert result.how == ("captured" if name == "a" else "restored")
            trees.append((describe(merged / "usr/lib"), describe(merged / "opt/venv")))
        finally:
            subprocess.run(["umount", "-l", str(merged)], check=False)
    assert differences(trees[0][0], trees[1][0]) == []
    assert differences(trees[0][1], trees[1][1]) == []
    assert _runs(tmp_path) == 1
    assert (lower / "usr/lib/pkg/a.py").exists()


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_point_as_target(tmp_path: Path, make_node: MakeNode, kind: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    top = tmp_path / "with blank"
    target = top / "env"
    target.mkdir(parents=True)
    script = f"mkdir -p '{target}/sub'; echo x > '{target}/sub/x'"
    request = replace(
        _request(top, script),
        command=["sh", "-e", "-c", f"echo >> {tmp_path}/runs; {script}; touch '{target}/file'"],
    )
    for name in ("a", "b"):
        (tmp_path / "sources" / name).mkdir(parents=True)
        mount = ["mount", "--bind", str(tmp_path / "sources" / name), str(target)]
        if kind == "tmpfs":
            mount = ["mount", "-t", "tmpfs", "tmpfs", str(target)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            pytest.skip(f"{kind} cannot be mounted here")
        try:
            result = run_setup(make_node(name), request)
            assert result.how == ("captured" if name == "a" else "restored")
            assert (target / "sub/x").read_text() == "x\n"
            assert sorted(os.listdir(target)) == ["file", "sub"]
        finally:
            subprocess.run(["umount", "-l", str(target)], check=False)
    assert _runs(tmp_path) == 1


def test_a_full_disk(tmp_path: Path, make_node: MakeNode) -> None:
    """Too small for the snapshot: nothing appears, and the command has the last word."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk/env"
    script = f"mkdir {target}; head -c 3000000 /dev/urandom > {target}/file"
    request = Request(command=["sh", "-e", "-c", script], targets=[str(target)])
    run_setup(make_node("a"), request)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        said: list[str] = []
        with pytest.raises(SetupFailedError):
            run_setup(make_node("b"), request, report=said.append)
        assert "bytes" in said[-1]
        assert os.listdir(tmp_path / "disk") == ["env"]
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "disk")], check=False)


def test_a_cache_that_cannot_be_written(tmp_path: Path, make_node: MakeNode) -> None:
    request = _request(tmp_path)
    (tmp_path / "file").write_text("x")
    node = replace(make_node("a"), cache_dir=tmp_path / "file/cache")
    said: list[str] = []
    assert run_setup(node, request, report=said.append).how == "ran"
    assert said[-1].startswith("warning: the set-up ran but was not stored")
    shutil.rmtree(tmp_path / "env")
    assert run_setup(make_node("b"), request).how == "captured"
    shutil.rmtree(tmp_path / "env")
    assert run_setup(node, request).how == "restored"


def test_the_interpreter_is_part_of_the_key(tmp_path: Path, make_node: MakeNode) -> None:
    """Two nodes with different Pythons on PATH must not share an environment."""
    said = []
    for version in ("3.11.1", "3.12.1"):
        shutil.rmtree(tmp_path / "env", ignore_errors=True)
        folder = tmp_path / version
        folder.mkdir()
        fake = folder / "python3"
        fake.write_text(
            f'#!/bin/sh\n{sys.executable} "$@" | sed \'s/"version": "[^"]*"/'
            f'"version": "{version}"/\'\n'
        )
        fake.chmod(0o755)
        environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        result = run_setup(make_node("a"), _request(tmp_path, environ=environ))
        said.append(result.fingerprint)
        with open_store(make_node("a").store_url) as store:
            manifest = catalogue.find(store, result.fingerprint)
        assert (
            f"cpython {version}"
            in {part.name: part.value for part in manifest.parts}["interpreter"]
        )
    assert said[0] != said[1]


@pytest.mark.hdfs
def test_nodes_share_through_hdfs(tmp_path: Path, make_node: MakeNode, hdfs_url: str) -> None:
    names = ["a", "b"]
    nodes = {name: replace(make_node(name), store_url=hdfs_url) for name in names}
    results = _on_nodes({name: (nodes[name], _rooted(tmp_path, name)) for name in names})
    assert _runs(tmp_path) == 1
    assert sorted(result.how for result in results.values()) == ["captured", "restored"]
    trees = [describe(tmp_path / "roots" / name / "opt/env") for name in names]
    assert differences(trees[0], trees[1]) == []
