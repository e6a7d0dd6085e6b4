"""`bootseer run --setup`: run once, restored later, and never a reason for a start to fail."""

import subprocess
from pathlib import Path

import pytest

from testbed.needs import MissingError
from testbed.node import Node, attribute, node_at
from testbed.waiting import wait_for

COUNTED = "echo ran >> ../count; mkdir -p env; echo {text} > env/{name}"


def counted(node: Node) -> int:
    path = node.base.parent / "count"
    return len(path.read_text().splitlines()) if path.exists() else 0


def setup(text: str = "a", name: str = "x") -> tuple[str, ...]:
    return ("--setup", COUNTED.format(text=text, name=name))


TARGET = ("--target", "env")


def forget(node: Node) -> None:
    """Move the node's environment, cache and run folder aside, as if the node were new."""
    for name in ("env", "cache", "run"):
        path = node.base / name
        path.rename(node.base.parent / f"{name}-{len(list(node.base.parent.iterdir()))}")


def test_miss_then_hit_on_another_node(node: Node) -> None:
    job = (*setup(), *TARGET, "--", "cat", "env/x")
    first = node.run("run", *job)
    assert (first.returncode, first.stdout) == (0, "a\n"), first.stderr
    assert "no snapshot" in first.stderr
    assert attribute(node.spans()["environment"], "bootseer.hit") is False
    forget(node)
    second = node.run("run", *job)
    assert (second.returncode, second.stdout) == (0, "a\n"), second.stderr
    assert "restored" in second.stderr
    assert attribute(node.spans()["environment"], "bootseer.hit") is True
    third = node.run("run", *job)
    assert "in place" in third.stderr
    assert counted(node) == 1


@pytest.mark.needs("mount", "fuse")
def test_what_is_mounted_goes_with_the_job(node: Node) -> None:
    job = (*setup(), *TARGET, "--mode", "mount", "--", "sh", "-c", "cat env/x; echo b > env/x")
    assert node.run("run", *job).stdout == "a\n"
    (node.base / "env/x").unlink()
    (node.base / "env").rmdir()
    for _ in range(2):
        done = node.run("run", *job)
        assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr
        assert "mounted: it was asked for" in done.stderr
        assert attribute(node.spans()["environment"], "bootseer.mode") == "mount"
        node.wait_clean()
        assert list((node.base / "env").iterdir()) == []
    assert counted(node) == 1


def test_the_setups_own_exit_code_and_no_job(node: Node) -> None:
    for line, code in (
        ("echo broken >&2; exit 9", 9),
        ("no-such-program --x", 127),
        ("kill -TERM $$", 128 + 15),
    ):
        done = node.run("run", "--setup", line, *TARGET, "--", "touch", "job-ran")
        assert done.returncode == code, done.stderr
        assert not (node.base / "job-ran").exists()
        assert "Traceback" not in done.stderr
    assert not any((node.base.parent / "store").rglob("snapshots/*.json"))


def test_output_goes_to_stderr_and_input_stays_for_the_job(node: Node) -> None:
    line = "echo noise; cat > stolen; mkdir -p env; touch env/x"
    done = node.run("run", "--setup", line, *TARGET, "--", "cat", stdin="for the job")
    assert done.stdout == "for the job", done.stderr
    assert "noise" in done.stderr
    assert (node.base / "stolen").read_text() == ""


def test_a_store_that_cannot_be_used(node: Node) -> None:
    (node.base / "file").write_text("no folder")
    for url in (
        "hdfs://127.0.0.1:9/store",
        (node.base / "file" / "store").as_uri(),
        "nosuch://host/store",
    ):
        before = counted(node)
        job = (*setup(), *TARGET, "--", "cat", "env/x")
        done = node.run("run", *job, variables={"BOOTSEER_STORE": url, "BOOTSEER_DEADLINE": "2"})
        assert (done.returncode, done.stdout) == (0, "a\n"), done.stderr
        assert done.stderr.count("warning:") == 1, done.stderr
        assert counted(node) == before + 1


def test_set_ups_run_in_the_order_given(node: Node) -> None:
    first = "mkdir -p env; echo 1 > env/order"
    second = "cp env/order env/copy; echo 2 >> env/order; echo ran >> ../count"
    job = ("--setup", first, "--setup", second, *TARGET, "--", "cat", "env/order", "env/copy")
    for how in ("stored", "restored"):
        done = node.run("run", *job)
        assert done.stdout == "1\n2\n1\n", done.stderr
        assert done.stderr.count(how) == 2, done.stderr
        spans = node.spans()
        assert int(spans["environment 2"]["startTimeUnixNano"]) >= int(
            spans["environment 1"]["endTimeUnixNano"]
        )
        forget(node)
    assert counted(node) == 1


def test_what_decides_the_result(node: Node) -> None:
    (node.base / "list").write_text("one")
    job = (*setup(), *TARGET, "--input", "list", "--input-env", "FLAVOUR", "--", "true")
    for flavour, content, runs in (("a", "one", 1), ("a", "one", 1), ("b", "one", 2)):
        (node.base / "list").write_text(content)
        assert node.run("run", *job, variables={"FLAVOUR": flavour}).returncode == 0
        forget(node)
        assert counted(node) == runs
    (node.base / "list").write_text("two")
    assert node.run("run", *job, variables={"FLAVOUR": "b"}).returncode == 0
    assert counted(node) == 3


def test_an_input_that_is_missing_is_an_error(node: Node) -> None:
    done = node.run("run", *setup(), *TARGET, "--input", "no-such-file", "--", "true")
    assert done.returncode == 10
    assert "no-such-file" in done.stderr
    assert counted(node) == 0


def test_two_starts_at_once_run_the_setup_once(node: Node) -> None:
    go = node.base.parent / "go"
    # By a variable: the key of a set-up tells whether a file exists that the command names.
    line = "echo ran >> ../count; until [ -e $GO ]; do sleep 0.05; done; mkdir -p env"
    job = ("--setup", f"{line}; echo done > env/x", *TARGET, "--", "cat", "env/x")
    started = [node.start("run", *job, variables={"GO": str(go)}) for _ in range(3)]
    wait_for(lambda: node.count_begun("environment") == 3, "all three")
    go.touch()
    for process in started:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "done\n"), err
    assert counted(node) == 1


def test_two_nodes_at_once_run_the_setup_once(node: Node, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], check=False).returncode:
        raise MissingError("no user namespaces here")
    target = tmp_path / "target"
    target.mkdir()
    go = tmp_path / "go"
    # By a variable: the key of a set-up tells whether a file exists that the command names.
    line = f"echo ran >> $COUNT; until [ -e $GO ]; do sleep 0.05; done; echo done > {target}/x"
    variables = {"COUNT": str(tmp_path / "count"), "GO": str(go)}
    with node_at(tmp_path / "second", node.store) as second:
        started = []
        for one in (node, second):
            own = one.base / "own"
            own.mkdir()
            # A mount namespace, in which the same path is each node's own folder.
            script = f'mount --bind {own} {target} && exec "$@"'
            prefix = ("unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh")
            started.append(
                one.start(
                    "run",
                    *("--setup", line, "--target", target, "--", "cat", target / "x"),
                    prefix=prefix,
                    variables={**variables, "BOOTSEER_NODE": one.base.name},
                )
            )
        wait_for(
            lambda: node.count_begun("environment") == second.count_begun("environment") == 1,
            "both",
        )
        go.touch()
        for process in started:
            out, err = process.communicate(timeout=60)
            assert (process.returncode, out) == (0, "done\n"), err
    assert counted(node) == 1
