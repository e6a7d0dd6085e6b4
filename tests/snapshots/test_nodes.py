"""`run_setup` on several nodes at once: exactly one runs the command, also after faults."""

import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots import environment as run_module
from bootseer.snapshots.environment import SetupResult, run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.store import Store, open_store
from bootseer.store.objects import lease
from testbed.trees import describe, differences
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.counted import counted_request, rooted, runs


class _Meeting:
    """Step of a set-up's command that ends once each of `count` nodes runs the set-up or waits for
    it.

    All nodes are then in the set-up at once, however slow the machine is.
    """

    def __init__(self, tmp_path: Path, count: int) -> None:
        self._all_here = tmp_path / "all-here"
        self._count = count
        self._names: set[str] = set()
        look = f"test -e {self._all_here}"
        self.script = f"for i in $(seq 3000); do {look} && break; sleep 0.02; done; {look}"

    def hear(self, name: str, sentence: str) -> None:
        """Note a message of a node. Any thread."""
        if "running the set-up" in sentence or sentence.endswith("; waiting"):
            self._names.add(name)
        if len(self._names) == self._count:
            self._all_here.touch()


def _on_nodes(
    requests: Mapping[str, tuple[Settings, SetupRequest]],
    meeting: _Meeting | None = None,
    said: dict[str, list[str]] | None = None,
) -> dict[str, SetupResult]:
    """Run the set-ups at once; `said` gets the messages of each node."""
    results: dict[str, SetupResult] = {}

    def run(name: str) -> None:
        settings, request = requests[name]
        sentences: list[str] = []

        def report(sentence: str) -> None:
            sentences.append(sentence)
            if meeting is not None:
                meeting.hear(name, sentence)

        results[name] = run_setup(settings, request, report=report, wait_s=60)
        if said is not None:
            said[name] = sentences

    threads = [threading.Thread(target=run, args=(name,), name=name) for name in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_many_nodes_at_once_run_it_once(tmp_path: Path, make_node: MakeNode) -> None:
    names = ["a", "b", "c", "d"]
    said: dict[str, list[str]] = {}
    meeting = _Meeting(tmp_path, len(names))
    requests = {name: (make_node(name), rooted(tmp_path, name, meeting.script)) for name in names}
    results = _on_nodes(requests, meeting, said)
    assert runs(tmp_path) == 1
    # The time of other nodes is reported apart from the restore's.
    for name, sentences in said.items():
        has_waited = any(sentence.endswith("; waiting") for sentence in sentences)
        assert has_waited == (results[name].how == "restored")
        assert has_waited == ("; waited " in sentences[-1])
    hows = sorted(result.how for result in results.values())
    assert hows == ["captured", "restored", "restored", "restored"]
    trees = [describe(tmp_path / "roots" / name / "opt/env") for name in names]
    assert all(differences(trees[0], tree) == [] for tree in trees[1:])


def test_other_set_ups_at_once_do_not_wait_for_one_another(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """The command of each of two nodes waits until the other one's has begun."""
    begun = {name: tmp_path / f"begun-{name}" for name in ("a", "b")}
    requests = {}
    for name, other in (("a", "b"), ("b", "a")):
        wait = f"for i in $(seq 3000); do test -e {begun[other]} && break; sleep 0.02; done"
        script = f"touch {begun[name]}; {wait}; test -e {begun[other]}"
        requests[name] = (make_node(name), rooted(tmp_path, name, f"{script}; : {name}"))
    results = _on_nodes(requests)
    assert [result.how for result in results.values()] == ["captured", "captured"]
    assert len({result.fingerprint for result in results.values()}) == 2
    with open_store(make_node("a").store_url) as store:
        assert len(list(catalogue.list_all(store))) == 2


class _ClocksOfNodes:
    """Module `time` for nodes whose clocks are an hour ahead or behind."""

    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def time_ns() -> int:
        """Return the time of the node of this thread."""
        hours = {"ahead": 1, "behind": -1}.get(threading.current_thread().name, 0)
        return time.time_ns() + hours * 3600 * 10**9


def test_clocks_that_differ_cost_time_and_no_more(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may take over a held lease, or lose its own; nothing else goes wrong."""
    monkeypatch.setattr(lease, "time", _ClocksOfNodes)
    names = ["exact", "ahead", "behind"]
    meeting = _Meeting(tmp_path, len(names))
    requests = {name: (make_node(name), rooted(tmp_path, name, meeting.script)) for name in names}
    results = _on_nodes(requests, meeting)
    assert "captured" in {result.how for result in results.values()}
    # A node that lost its lease finds the other node's snapshot stored.
    assert {result.how for result in results.values()} <= {"captured", "restored", "ran"}
    trees = [(tmp_path / "roots" / name / "opt/env/file").read_text() for name in names]
    assert trees == ["Linux\n"] * 3
    with open_store(make_node("exact").store_url) as store:
        assert len(list(catalogue.list_all(store))) == 1
    late = rooted(tmp_path, "late", meeting.script)
    assert run_setup(make_node("late"), late).how == "restored"


def test_many_processes_of_one_node_run_it_once(tmp_path: Path, make_node: MakeNode) -> None:
    meeting = _Meeting(tmp_path, 3)
    request = counted_request(tmp_path, meeting.script)
    node = make_node("a")
    results = _on_nodes({str(number): (node, request) for number in range(3)}, meeting)
    assert runs(tmp_path) == 1
    assert sorted(result.how for result in results.values()) == ["captured", "in place", "in place"]


@pytest.mark.parametrize("ahead_s", [0, 24 * 3600], ids=["exact", "ahead"])
def test_a_dead_holder_costs_its_lease(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """The dead node's clock may differ."""
    monkeypatch.setattr(lease, "SKEW_S", 0.0)
    node = make_node("a")
    request = counted_request(tmp_path)
    key = run_setup(node, request).fingerprint
    shutil.rmtree(tmp_path / "env")
    with open_store(node.store_url) as store:
        store.delete(catalogue.manifest_key(key))
        with monkeypatch.context() as patched:
            now_ns = time.time_ns()
            patched.setattr(time, "time_ns", lambda: now_ns + ahead_s * 10**9)
            assert store.lease(catalogue.lease_key(key), ttl_s=0.5, owner="dead") is not None
    said: list[str] = []
    result = run_setup(make_node("b"), request, report=said.append)
    assert result.how == "captured"
    # The exact snapshot may be complete by now.
    assert not ahead_s or any("another node is running" in sentence for sentence in said)


def test_a_holder_that_never_finishes_is_not_waited_for_for_ever(
    tmp_path: Path, make_node: MakeNode
) -> None:
    node = make_node("a")
    request = counted_request(tmp_path)
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


def test_what_is_published_before_the_lease_is_taken_is_used(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two nodes run the set-up: one finds no snapshot, and then gets the other's
    lease."""
    request = counted_request(tmp_path)
    key = run_setup(make_node("a"), request).fingerprint
    shutil.rmtree(tmp_path / "env")
    manifest = tmp_path / "store" / catalogue.manifest_key(key)
    away = manifest.rename(tmp_path / "away")
    take_lease = Store.lease

    def publish_first(store: Store, *args: object, **options: object) -> object:
        if away.exists():
            away.rename(manifest)
        return take_lease(store, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "lease", publish_first)
    assert run_setup(make_node("b"), request).how == "restored"
    assert runs(tmp_path) == 1


class _Clock:
    """Module `time` for a node whose sleeps take no time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def time_ns(self) -> int:
        return int(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


def test_nodes_that_wait_do_not_ask_in_step(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store cannot bear a thousand nodes that ask at the same moment."""
    request = counted_request(tmp_path)
    key = run_setup(make_node("a"), request).fingerprint
    with open_store(make_node("a").store_url) as store:
        store.delete(catalogue.manifest_key(key))
        held = store.lease(catalogue.lease_key(key), ttl_s=600, owner="slow")
        assert held is not None
        clocks = []
        for name in ("b", "c"):
            shutil.rmtree(tmp_path / "env")
            clocks.append(_Clock())
            monkeypatch.setattr(run_module, "time", clocks[-1])
            assert run_setup(make_node(name), request, wait_s=60).how == "ran"
        held.release()
    for clock in clocks:
        # The last attempt ends with the wait.
        assert all(0.05 <= pause <= 2.0 for pause in clock.pauses[:-1])
        assert len(clock.pauses) < 100
    assert clocks[0].pauses[:10] != clocks[1].pauses[:10]


@pytest.mark.hdfs
def test_nodes_share_through_hdfs(tmp_path: Path, make_node: MakeNode, hdfs_url: str) -> None:
    names = ["a", "b"]
    nodes = {name: replace(make_node(name), store_url=hdfs_url) for name in names}
    meeting = _Meeting(tmp_path, len(names))
    requests = {name: (nodes[name], rooted(tmp_path, name, meeting.script)) for name in names}
    results = _on_nodes(requests, meeting)
    assert runs(tmp_path) == 1
    assert sorted(result.how for result in results.values()) == ["captured", "restored"]
    trees = [describe(tmp_path / "roots" / name / "opt/env") for name in names]
    assert differences(trees[0], trees[1]) == []
