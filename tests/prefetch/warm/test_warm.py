"""`bootseer warm` around real commands, on a real disk with a cold page cache."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.cli.main import main
from bootseer.linux.locks import lock_file
from bootseer.prefetch.warm.record import decode, encode, identity_of, key_of
from testbed.mounts.fuse_mount import mounted, short_options
from testbed.mounts.slow_fs import SlowFileSystem
from testbed.needs import MissingError
from testbed.page_cache import cached_bytes
from testbed.paths import REPOSITORY
from tests.bootseer.cli.json_page import agree
from tests.prefetch.warm.conftest import IMPORT, WarmingNode, evict, is_evicted, make_package

_TOUCHED = {"package/__init__.py", "package/data", *(f"package/m{n}.py" for n in range(12))}


def _name(directory: Path) -> str:
    """Return the name of a directory's warming on its node."""
    _, digest, _ = key_of(identity_of(str(directory), None), "default").split("/")
    return f"{digest[:16]}-default"


def _is_on_disk(directory: Path) -> bool:
    """Return whether pages can be dropped from the cache at all, which is not so on tmpfs."""
    probe = directory / "probe"
    probe.write_bytes(b"x" * 4096)
    return is_evicted(probe)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    directory = tmp_path / "env"
    directory.mkdir()
    if not _is_on_disk(directory):
        raise MissingError(f"{directory} lies in memory: no page of it is ever cold")
    (directory / "probe").unlink()
    make_package(directory)
    evict(directory)
    return directory


@pytest.mark.parametrize("method", ["auto", "fanotify", "inotify", "residency"])
def test_what_a_start_touched_is_recorded_and_read_ahead_on_another_node(
    tree: Path, node: WarmingNode, other_node: WarmingNode, method: str
) -> None:
    if method == "fanotify" and os.geteuid() != 0:
        raise MissingError("fanotify needs CAP_SYS_ADMIN")
    first = node.warm_import(tree, "--method", method)
    assert (first.returncode, first.stdout, first.stderr) == (0, "194", "")
    assert node.last()["action"] == "recorded"
    shown = node.shown(tree)
    agree("warm", shown, free=("last",))
    files = {file["path"]: file for file in shown["files"]}
    assert set(files) == _TOUCHED
    assert method == "auto" or shown["method"] == method
    # Every second page of its first quarter was read, and none behind.
    assert 2**19 <= files["package/data"]["range_bytes"] < 2**21
    if method != "residency":
        assert shown["files"][0]["path"] == "package/__init__.py"

    evict(tree)
    now = other_node.run("warm", tree, "--json")
    assert now.returncode == 0, now.stderr
    figures = json.loads(now.stdout)
    agree("warm", figures)
    assert figures["is_complete"]
    assert figures["read_bytes"] == figures["planned_bytes"] >= shown["range_bytes"]
    assert figures["cached_bytes"] == figures["stale_count"] == figures["failed_count"] == 0
    for name in sorted(_TOUCHED):
        assert cached_bytes(tree / name), name
    assert cached_bytes(tree / "package/never.py") == 0


def test_the_command_starts_while_it_is_read_ahead(tree: Path, node: WarmingNode) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    evict(tree)
    # Until all of it is read: the readahead ends with the command.
    waiting = IMPORT + "\n" + node.until("read")
    second = node.warm_import(tree, code=waiting)
    assert (second.returncode, second.stdout, second.stderr) == (0, "194", "")
    last = node.last()
    assert last["action"] == "read"
    assert last["is_complete"]
    assert last["read_bytes"] + last["cached_bytes"] == last["planned_bytes"]
    assert node.shown(tree)["recording_count"] == 1


def test_a_second_recording_adds_to_the_first(tree: Path, node: WarmingNode) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    node.warm_import(tree, "--record", code="import package.never")
    state = node.last()
    assert state["action"] == "recorded"
    shown = node.shown(tree)
    assert shown["recording_count"] == 2
    assert {file["path"] for file in shown["files"]} == _TOUCHED | {"package/never.py"}
    assert node.run("warm", "--forget", tree).returncode == 0
    assert node.run("warm", "--show", tree).returncode == 10


def test_workloads_and_names_have_records_of_their_own(tree: Path, node: WarmingNode) -> None:
    assert node.warm_import(tree, "--name", "shared").returncode == 0
    assert node.last()["action"] == "recorded"
    assert node.run("warm", tree).returncode == 10
    elsewhere = tree.rename(tree.with_name("moved"))
    done = node.run("warm", "--name", "shared", elsewhere, "--json")
    assert json.loads(done.stdout)["stale_count"] == 0
    assert (
        node.run("--workload", "evaluation", "warm", "--name", "shared", elsewhere).returncode == 10
    )


def test_exit_codes_and_signals_are_the_commands_own(tree: Path, node: WarmingNode) -> None:
    assert node.run("warm", tree, "--", "sh", "-c", "exit 7").returncode == 7
    assert node.run("warm", tree, "--", "sh", "-c", "kill -TERM $$").returncode == -signal.SIGTERM
    missing = node.run("warm", tree, "--", "no-such-command")
    assert missing.returncode == 127
    assert "cannot run no-such-command" in missing.stderr


def test_a_script_that_names_no_interpreter_is_for_sh(
    tree: Path, node: WarmingNode, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    script.write_text('echo "trained $1"; exit 3\n')
    script.chmod(0o755)
    done = node.run("warm", tree, "--", script, "well")
    assert (done.returncode, done.stdout) == (3, "trained well\n")


def test_the_command_finds_no_child_of_ours(tree: Path, node: WarmingNode) -> None:
    done = node.run("warm", tree, "--", "sh", "-c", "cat /proc/$$/task/$$/children; exec true")
    # The trace shows cat itself.
    assert len(done.stdout.split()) == 1, done.stdout


def test_a_file_that_changed_is_not_read(tree: Path, node: WarmingNode) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    os.utime(tree / "package/m3.py", ns=(0, 0))
    (tree / "package/m4.py").unlink()
    evict(tree)
    figures = json.loads(node.run("warm", tree, "--json").stdout)
    assert (figures["stale_count"], figures["failed_count"]) == (2, 0)
    assert cached_bytes(tree / "package/m3.py") == 0
    assert cached_bytes(tree / "package/m5.py") > 0


def test_a_record_of_which_most_has_changed_is_made_anew(tree: Path, node: WarmingNode) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    for path in (tree / "package").iterdir():
        os.utime(path, ns=(0, 0))
    waiting = IMPORT + "\n" + node.until("read")
    assert node.warm_import(tree, code=waiting).stdout == "194"
    assert node.last()["stale_count"] == len(_TOUCHED)
    assert node.run("warm", "--show", tree).returncode == 10
    assert node.warm_import(tree).stdout == "194"
    assert node.last()["action"] == "recorded"


def test_nothing_outside_is_opened_through_links_that_replaced_what_was_recorded(
    tree: Path, node: WarmingNode, tmp_path: Path
) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    # The same names, sizes and times, but another folder.
    outside = (tree / "package").rename(tmp_path / "outside")
    (tree / "package").symlink_to(outside)
    evict(outside)
    figures = json.loads(node.run("warm", tree, "--json").stdout)
    assert figures["read_bytes"] == figures["file_count"] == 0
    assert figures["stale_count"] == len(_TOUCHED)
    (tree / "package").unlink()
    (tree / "package").mkdir()
    for name in sorted(_TOUCHED):
        (tree / name).symlink_to(outside / Path(name).name)
    (tree / "package/data").unlink()
    os.mkfifo(tree / "package/data")
    figures = json.loads(node.run("warm", tree, "--json").stdout)
    assert figures["read_bytes"] == figures["file_count"] == 0
    for path in outside.iterdir():
        assert cached_bytes(path) == 0


def test_a_planted_fifo_with_the_recorded_size_is_not_opened(tree: Path, node: WarmingNode) -> None:
    assert node.run("warm", tree, "--", "cat", tree / "package/m1.py").returncode == 0
    assert node.last()["action"] == "recorded"
    key = node.folder_of_store / key_of(identity_of(str(tree), None), "default")
    record = decode(key.read_bytes(), identity_of(str(tree), None), "default")
    pipe = tree / "pipe"
    os.mkfifo(pipe)
    status = pipe.stat()
    (file,) = record.files
    planted = replace(
        file, path=b"pipe", size_bytes=status.st_size, mtime_ns=status.st_mtime_ns, ranges=()
    )
    key.write_bytes(encode(replace(record, files=(planted,))))
    figures = json.loads(node.run("warm", tree, "--json").stdout)
    assert (figures["file_count"], figures["stale_count"]) == (0, 1)


def test_a_damaged_record_costs_one_warning_and_is_made_anew(tree: Path, node: WarmingNode) -> None:
    key = node.folder_of_store / key_of(identity_of(str(tree), None), "default")
    key.parent.mkdir(parents=True)
    key.write_bytes(b"garbage")
    first = node.warm_import(tree)
    assert (first.returncode, first.stdout) == (0, "194")
    assert len(first.stderr.splitlines()) == 1
    assert "is ignored" in first.stderr
    assert node.last()["action"] == "recorded"
    assert node.shown(tree)["recording_count"] == 1


def test_without_a_store_or_directory_the_command_starts_with_one_warning(
    tree: Path, node: WarmingNode
) -> None:
    node.folder_of_store.write_text("no folder")
    done = node.warm_import(tree)
    assert (done.returncode, done.stdout) == (0, "194")
    assert len(done.stderr.splitlines()) == 1
    assert "is not warmed" in done.stderr
    done = node.run("warm", tree / "absent", "--", "sh", "-c", "exit 5")
    assert (done.returncode, len(done.stderr.splitlines())) == (5, 1)
    assert node.run("warm", tree / "absent").returncode == 10
    (node.base / "run").rename(node.base / "away")
    (node.base / "run").write_text("no folder")
    done = node.run("warm", tree, "--", "sh", "-c", "exit 6")
    assert (done.returncode, len(done.stderr.splitlines())) == (6, 1)


@pytest.mark.needs("fuse")
def test_a_store_that_hangs_delays_the_command_no_longer_than_its_deadline(
    tree: Path, node: WarmingNode, tmp_path: Path
) -> None:
    (tmp_path / "behind" / "warm").mkdir(parents=True)
    hanging = SlowFileSystem(tmp_path / "behind", latency_s=7.0)
    with mounted(hanging, node.folder_of_store, short_options(shutdown_s=2.0)):
        done = node.warm_import(tree, deadline_s=1)
        assert (done.returncode, done.stdout) == (0, "194")
        assert len(done.stderr.splitlines()) == 1
        # The first of the two: a read of the store, or the wait for all of it.
        assert re.search(
            r"is not warmed: (warming was not ready in 6 s|.*no answer within 1 s)", done.stderr
        )
    # Its background process has ended: the lock is free.
    os.close(lock_file(node.base / f"run/services/warm-{_name(tree)}/lock", 0))


def test_an_unmounted_directory_does_not_cost_others_their_record(
    tree: Path, node: WarmingNode
) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    (tree / "package").rename(tree.parent / "package")
    assert node.run("warm", tree, "--", sys.executable, "-c", node.until("read")).returncode == 0
    assert node.last()["action"] == "read"
    assert len(node.shown(tree)["files"]) == len(_TOUCHED)


def test_names_that_are_not_utf8(tree: Path, node: WarmingNode) -> None:
    odd = os.fsdecode(os.fsencode(tree.parent) + b"/\xff env")
    os.rename(tree, odd)
    os.rename(odd + "/package/m1.py", os.fsdecode(os.fsencode(odd) + b"/package/\xfe"))
    name = os.fsdecode(os.fsencode(odd) + b"/package/\xfe")
    assert node.run("warm", odd, "--", "cat", name).returncode == 0
    assert node.last()["action"] == "recorded"
    figures = json.loads(node.run("warm", odd, "--json").stdout)
    assert (figures["file_count"], figures["stale_count"]) == (1, 0)
    assert node.shown(Path(odd))["files"][0]["path"] == "package/\udcfe"
    assert node.run("warm", "--show", odd).returncode == 0


def test_one_of_a_nodes_ranks_warms(tree: Path, node: WarmingNode) -> None:
    lock = lock_file(node.base / f"run/services/warm-{_name(tree)}/lock", 0)
    try:
        done = node.warm_import(tree)
        assert (done.returncode, done.stdout, done.stderr) == (0, "194", "")
        assert not (node.base / "cache/warm").exists()
        assert not (node.base / f"run/logs/warm-{_name(tree)}.log").exists()
    finally:
        os.close(lock)


def test_ready_ends_the_recording(tree: Path, node: WarmingNode) -> None:
    code = (
        f"sys.path.append({str(REPOSITORY)!r}); import bootseer; "
        f"bootseer.ready()\n{node.until('recorded')}import package.never"
    )
    assert node.warm_import(tree, code=IMPORT + "; " + code).stdout == "194"
    assert node.last()["action"] == "recorded"
    names = {file["path"] for file in node.shown(tree)["files"]}
    assert names == _TOUCHED


def test_the_recording_ends_with_its_window_while_the_command_runs(
    tree: Path, node: WarmingNode
) -> None:
    command = [
        sys.executable,
        "-m",
        "bootseer",
        "warm",
        "--set",
        "record_window=3",
        str(tree),
        "--",
    ]
    variables = {
        "BOOTSEER_STORE": str(node.folder_of_store),
        "BOOTSEER_RUN_DIR": str(node.base / "run"),
        "BOOTSEER_CACHE_DIR": str(node.base / "cache"),
    }
    process = subprocess.Popen(
        [*command, "sh", "-c", f"cat {tree}/package/m1.py; exec sleep 60"],
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
    )
    try:
        assert node.last()["file_count"] == 1
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(60)


def test_memory_bounds_what_is_read(tree: Path, node: WarmingNode) -> None:
    assert node.warm_import(tree).returncode == 0
    assert node.last()["action"] == "recorded"
    evict(tree)
    done = node.run("warm", "--memory", "100kB", tree, "--json")
    figures = json.loads(done.stdout)
    assert 0 < figures["planned_bytes"] <= 100_000
    assert figures["read_bytes"] == figures["planned_bytes"]
    assert "--memory" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--show", "--", "true"),
        ("--json", "--", "true"),
        ("--record",),
        ("--forget", "--json"),
        ("--name", "a/b", "--", "true"),
        ("--memory", "much", "--", "true"),
    ],
)
def test_contradictions_are_usage_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    with pytest.raises(SystemExit) as ended:
        main(["warm", *arguments[:at], str(tmp_path), *arguments[at:]])
    assert ended.value.code == 2
    assert capsys.readouterr().err
