"""Starts whose store is away cost one short wait and one warning; a late store is used."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.node import Completed, node_at
from testbed.servers.faulty_relay import Fault, FaultyRelay

JOB = (
    *("--setup", "mkdir -p env; echo one > env/a", "--setup", "echo two > env/b"),
    *("--target", "env", "--", "cat", "env/a", "env/b"),
)
# The submission is agreed on in the store.
STORED = {"BOOTSEER_PUBLISH_TIMELINES": "on", "BOOTSEER_DEADLINE": "2"}


def check_ordinary(done: Completed) -> None:
    """Check that a start did without its store, after one wait and one warning."""
    assert (done.returncode, done.stdout) == (0, "one\ntwo\n"), done.stderr
    assert done.stderr.count("warning:") == 1, done.stderr
    assert done.stderr.startswith("bootseer: warning: starting without the store "), done.stderr
    assert done.stderr.count("without a snapshot") == 2, done.stderr
    assert done.stderr.count(", in earlier calls") == 2, done.stderr
    assert "waiting up to" not in done.stderr


def check_start_without(away: str, url: str, tmp_path: Path, *, deadline_s: int = 2) -> None:
    """Check a start whose store would be at `away`."""
    variables = {
        "AWS_ENDPOINT_URL": f"http://{away}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        **STORED,
        "BOOTSEER_DEADLINE": str(deadline_s),
    }
    with node_at(tmp_path / "node", url.format(away), variables=variables) as node:
        check_ordinary(node.run("run", *JOB))
        node.sweep()


@pytest.fixture
def away(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yield the HOST:PORT of a server that refuses or drops connections, or never answers."""
    with contextlib.ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        if request.param != "refuses":
            taken.listen(64 if request.param == "silent" else 0)
        if request.param == "drops":
            # Two wait to be accepted; the kernel drops what comes then, as a firewall does.
            for _ in range(2):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(taken.getsockname())
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("away", ["refuses", "silent"], indirect=True)
@pytest.mark.parametrize("url", ["hdfs://{}/store", "s3://bucket/store"])
def test_a_server_that_is_away(tmp_path: Path, away: str, url: str) -> None:
    check_start_without(away, url, tmp_path)


@pytest.mark.parametrize("away", ["drops"], indirect=True)
@pytest.mark.parametrize("url", ["hdfs://{}/store", "s3://bucket/store"])
def test_a_machine_that_is_off_is_waited_for_once(tmp_path: Path, away: str, url: str) -> None:
    """Regression: clients gave a connection up before the limit of the first answer."""
    check_start_without(away, url, tmp_path, deadline_s=60)


def test_a_store_that_answers_late_is_used(tmp_path: Path, moto: dict[str, str]) -> None:
    """A failover or a slow login takes longer than a usual request, but only seconds."""
    with FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://")) as relay:
        relay.faults = [Fault("", hang_s=2.0)]
        variables = {
            **moto,
            "AWS_ENDPOINT_URL": f"http://{relay.host}",
            **STORED,
            "BOOTSEER_DEADLINE": "60",
        }
        url = f"s3://conformance/{tmp_path.name}"
        with node_at(tmp_path / "node", url, variables=variables) as node:
            line = "mkdir -p env; echo one > env/a"
            done = node.run("run", "--setup", line, "--target", "env", "--", "cat", "env/a")
            assert (done.returncode, done.stdout) == (0, "one\n"), done.stderr
            assert "stored snapshot" in done.stderr
            assert "warning:" not in done.stderr
            node.wait_clean()
