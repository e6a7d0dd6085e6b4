"""Volumes of the three kinds, published and unpublished by a real driver."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from bootseer.kubernetes.csi.service import MESSAGES, REGISTRATION
from bootseer.report.sources import MergedSources, StoredTimelines, TimelineFolder
from bootseer.served.service import services
from bootseer.served.status import status_entry
from bootseer.store import open_own_store
from bootseer.timeline import Timeline
from testbed.images.building import Member, write_layout
from testbed.mounts.image_mounts import index
from testbed.servers.registry import Registry
from testbed.users import as_user
from testbed.waiting import wait_for
from tests.bootseer.kubernetes.csi.conftest import Kubelet, refused

pytestmark = pytest.mark.needs("mount", "fuse")


def _kept(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stored").mkdir(exist_ok=True)
    return {"kind": "checkpoint", "source": (tmp_path / "stored").as_uri()}


def test_an_image_is_shown_read_only_and_served_once(kubelet: Kubelet, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [[Member("etc/", "d"), Member("etc/base", data=b"base")]])
    index(kubelet.settings, tmp_path / "layout", "app:1")
    context = {"kind": "image", "image": "app:1"}
    for pod in ("a", "b"):
        target = kubelet.publish(pod, context)
        assert (target / "etc/base").read_bytes() == b"base"
        with pytest.raises(OSError, match="Read-only"):
            (target / "new").touch()
    (server,) = kubelet.servers()
    (entry,) = [
        status_entry(one, kubelet.settings.run_dir) for one in services(kubelet.settings.run_dir)
    ]
    assert (entry.kind, entry.what, entry.health) == ("volume", "app:1", "ok")
    assert entry.where == (server.directory,)
    usage = kubelet.stats("a")
    assert not usage.volume_condition.abnormal, usage
    for pod in ("a", "b"):
        kubelet.unpublish(pod)
        assert not kubelet.target(pod).exists()
        kubelet.unpublish(pod)


def test_an_image_that_nobody_has_indexed_is_pulled(
    kubelet: Kubelet, registry: Registry, tmp_path: Path
) -> None:
    write_layout(tmp_path / "layout", [[Member("data", data=b"data")]])
    registry.push_layout(tmp_path / "layout", "latest", "csi:v1")
    context = {"kind": "image", "image": f"registry://{registry.host}/csi:v1"}
    for pod in ("a", "b"):
        assert (kubelet.publish(pod, context) / "data").read_bytes() == b"data"
    assert len(kubelet.servers()) == 1


def test_an_environment_is_shared_or_has_a_private_layer_of_its_size(kubelet: Kubelet) -> None:
    kubelet.make_environment("torch", {"lib/a.py": b"a = 1\n", "bin/run": b"#!/bin/sh\n"})
    context = {"kind": "environment", "environment": "torch"}
    shared = kubelet.publish("a", context)
    assert (shared / "lib/a.py").read_bytes() == b"a = 1\n"
    with pytest.raises(OSError, match="Read-only"):
        (shared / "lib/a.py").write_bytes(b"")
    writable = {**context, "writable": "true", "size": "8MiB"}
    one, two = (kubelet.publish(pod, writable) for pod in ("b", "c"))
    (one / "lib/a.py").write_bytes(b"a = 2\n")
    (one / "lib").rename(one / "lib64")
    assert (two / "lib/a.py").read_bytes() == b"a = 1\n"
    with pytest.raises(OSError, match="No space"):
        (one / "large").write_bytes(os.urandom(16 << 20))
    usage = {one.unit: one for one in kubelet.stats("b").usage}
    assert 4 << 20 < usage[1].total <= 8 << 20
    assert usage[1].used > usage[1].available
    assert len(kubelet.servers()) == 1
    for pod in ("a", "b", "c"):
        kubelet.unpublish(pod)
    assert not kubelet.mounted() or "trees" in str(kubelet.mounted()[0])
    assert not list((kubelet.folder / "plugins/csi.bootseer.io/layers").iterdir())


def test_a_pod_that_is_not_root_writes_to_an_environment_of_its_own(kubelet: Kubelet) -> None:
    """Most captured files are root's."""
    kubelet.make_environment("torch", {"lib/a.py": b"a = 1\n"})
    context = {"kind": "environment", "environment": "torch", "writable": "true", "uid": "1000"}
    mine, other = kubelet.publish("a", context), kubelet.publish("b", {**context, "uid": "1001"})
    kubelet.restart()
    assert kubelet.publish("a", context) == mine
    kubelet.let_others_in()
    for path in ("lib/a.py", "lib/b.py", "c.py"):
        run_as(1000, "dd", "if=/dev/null", "status=none", f"of={mine / path}")
    assert (mine / "lib").stat().st_gid == 1000
    assert (other / "lib/a.py").stat().st_uid == 1001
    assert len(kubelet.servers()) == 2


def run_as(user: int, *command: str) -> None:
    subprocess.run([*as_user(user), *command], check=True)


def test_checkpoints_have_one_server_for_all_pods(local: Kubelet, tmp_path: Path) -> None:
    context = _kept(tmp_path)
    one = local.publish("a", context)
    two = local.publish("b", context)
    reader = local.publish("c", context, readonly=True)
    (one / "step").write_bytes(b"s" * 5_000_000)
    assert (two / "step").read_bytes() == b"s" * 5_000_000
    with pytest.raises(OSError, match="Read-only"):
        (reader / "step").unlink()
    (server,) = local.servers()
    # Pods run as any user.
    local.let_others_in()
    run_as(1000, "touch", str(one / "mine"))
    local.unpublish("a")
    assert (two / "mine").exists()
    local.unpublish("c")
    local.unpublish("b")
    assert not local.servers()
    assert not local.mounted()
    assert (tmp_path / "stored/mine").exists()
    other = local.publish("a", {**context, "uid": "1000", "umask": "077"})
    assert other.stat().st_uid == 1000
    assert local.servers()[0].id != server.id


def test_calls_may_be_repeated_and_come_at_once(local: Kubelet, tmp_path: Path) -> None:
    context = _kept(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(local.publish, pod, context) for pod in ("a", "b", "a", "b", "a", "c")]
        for call in calls:
            call.result()
    assert len(local.servers()) == 1
    assert len(local.mounted()) == 4
    with ThreadPoolExecutor(8) as pool:
        ends = [pool.submit(local.unpublish, pod) for pod in ("a", "b", "a", "c", "b")]
        for end in ends:
            end.result()
    assert local.mounted() == []
    wait_for(lambda: not local.servers())


def test_another_volume_at_the_same_target_is_refused(local: Kubelet, tmp_path: Path) -> None:
    local.publish("a", _kept(tmp_path))
    code, said = refused(local.publish, "a", _kept(tmp_path), readonly=True)
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "csi-a" in said


def test_a_volume_that_cannot_be_had_says_why_and_leaves_nothing(kubelet: Kubelet) -> None:
    for context, code, words in (
        ({"kind": "environment", "environment": "none"}, "NOT_FOUND", "no snapshot called 'none'"),
        ({"kind": "image", "image": "none:1"}, "NOT_FOUND", "none:1"),
        ({"kind": "checkpoint", "source": "hdfs://127.0.0.1:9/x"}, "UNAVAILABLE", "127.0.0.1:9"),
    ):
        found, said = refused(kubelet.publish, "a", context)
        assert (found.name, words in said) == (code, True), said
        assert "\n" not in said
    assert not kubelet.mounted()
    assert not kubelet.target("a").exists()
    assert not kubelet.servers()


def test_the_mount_is_a_stage_of_the_pods_start(kubelet: Kubelet) -> None:
    kubelet.make_environment("torch", {"a": b"a"})
    pod = {"name": "train-0", "namespace": "team", "uid": "0b-1"}
    context = {f"csi.storage.k8s.io/pod.{name}": text for name, text in pod.items()}
    context |= {"kind": "environment", "environment": "torch", "job": "train", "attempt": "2"}
    kubelet.publish("a", context)
    settings = kubelet.settings
    # A report finds it also when the node is gone.
    with open_own_store(settings) as store:
        wait_for(lambda: StoredTimelines(store).starts("train"), "the timeline in the store")
        (stored,) = StoredTimelines(store).starts("train")
        (stage,) = stored.stages()
        assert (stored.attempt, stored.submission) == (2, "0b-1")
        assert (stage.name, stage.resource["k8s.pod.uid"]) == ("environment volume", "0b-1")
        # Nobody would tidy up on the node.
        wait_for(lambda: not list(settings.timeline_dir.iterdir()), "the node's own copy to go")
        # The pod's own launcher, on the same node and of the same rank, does not take its place.
        own = Timeline.start(
            settings.timeline_dir,
            job="train",
            submission="0b-1",
            attempt=2,
            node=settings.node,
            rank=0,
        )
        own.span("start").end()
        (start,) = MergedSources(
            TimelineFolder(settings.timeline_dir), StoredTimelines(store)
        ).starts("train")
        assert {stage.name for stage in start.stages()} == {"environment volume", "start"}
        assert len(start.parts(1)) == 1


def test_the_driver_registers_itself(kubelet: Kubelet) -> None:
    socket = kubelet.folder / "plugins_registry/csi.bootseer.io-reg.sock"
    info = kubelet.call("GetInfo", REGISTRATION, socket)
    assert (info.type, info.name) == ("CSIPlugin", "csi.bootseer.io")
    assert info.endpoint == str(kubelet.socket)
    kubelet.call("NotifyRegistrationStatus", REGISTRATION, socket, plugin_registered=True)
    kubelet.call("NotifyRegistrationStatus", REGISTRATION, socket, error="it is called otherwise")
    assert "it is called otherwise" in kubelet.log()
    kubelet.stop(signal.SIGTERM)
    assert not socket.exists()
    assert MESSAGES["PluginInfo"]
