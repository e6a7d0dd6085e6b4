"""Deaths of drivers, servers and machines with volumes, as pods, kubelets and storage see them."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from bootseer.fuse.kernel.unmount import detach
from bootseer.linux.processes import stat_fields
from bootseer.served.processes import SPAWNER
from bootseer.store import open_store
from testbed.cgroups import in_own_cgroup
from testbed.hdfs.cluster import MiniHdfs
from testbed.waiting import wait_for
from tests.bootseer.kubernetes.csi.conftest import CONTAINER, Kubelet, refused
from tests.bootseer.kubernetes.test_spawner import running

pytestmark = pytest.mark.needs("mount", "fuse")

_ENVIRONMENT = {"kind": "environment", "environment": "torch"}


def _kept(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "stored").mkdir(exist_ok=True)
    return {"kind": "checkpoint", "source": (tmp_path / "stored").as_uri()}


@contextlib.contextmanager
def writing(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Yield a pod's process that has written to a file and holds it open."""
    code = "import sys; f = open(sys.argv[1], 'wb', 0); f.write(b'x' * 2**23); print(1, flush=True)"
    code += "; sys.stdin.read(1); f.close()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_volumes_outlive_the_driver(local: Kubelet, tmp_path: Path, sign: signal.Signals) -> None:
    local.make_environment("torch", {"a": b"a"})
    tree, kept = local.publish("a", _ENVIRONMENT), local.publish("b", _kept(tmp_path))
    private = local.publish("c", {**_ENVIRONMENT, "writable": "true"})
    (private / "mine").write_bytes(b"mine")
    servers = local.servers()
    with writing(kept / "step") as writer:
        local.stop(sign)
        assert (tree / "a").read_bytes() == b"a"
        local.driver = local.start_driver()
        writer.communicate(b"\n")
    assert (kept / "step").stat().st_size == 2**23
    # A kubelet that was restarted, too, asks again.
    for pod, context in (("a", _ENVIRONMENT), ("b", _kept(tmp_path))):
        local.publish(pod, context)
    assert (private / "mine").read_bytes() == b"mine"
    assert local.servers() == servers
    for pod in ("a", "b", "c"):
        local.unpublish(pod)
    assert (tmp_path / "stored/step").exists()


def test_volumes_outlive_the_drivers_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers are the spawner's, in another cgroup."""
    monkeypatch.setenv(SPAWNER, str(tmp_path / "spawner.sock"))
    with Kubelet("--source", (tmp_path / "stored").as_uri()) as local:
        with running(local.settings.run_dir, tmp_path / "spawner.sock", "--grace", "5") as spawner:
            kept = local.publish("a", _kept(tmp_path))
            with in_own_cgroup(local.driver.pid) as container:
                local.publish("b", _kept(tmp_path))
                (container / "cgroup.kill").write_text("1")
                local.driver.wait(60)
            (server,) = local.servers()
            assert int(stat_fields(server.pid)[1]) == spawner.pid
            (kept / "step").write_bytes(b"saved")
            local.driver = local.start_driver()
            local.unpublish("b")
            assert (kept / "step").read_bytes() == b"saved"
        # Nothing stays, what was closed is stored, and nothing is mounted again by the driver.
        assert local.mounted() == []
        assert (tmp_path / "stored/step").read_bytes() == b"saved"
        local.unpublish("a")


def test_driver_spawner_and_node_have_mount_namespaces_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount or unmount in one of them is propagated to all, as with pods."""
    monkeypatch.setenv(SPAWNER, str(tmp_path / "spawner.sock"))
    with Kubelet("--source", (tmp_path / "stored").as_uri(), in_container=True) as node:
        node.make_environment("torch", {"a": b"a"})
        options = ("--grace", "5")
        with running(node.settings.run_dir, tmp_path / "spawner.sock", *options, prefix=CONTAINER):
            tree, kept = node.publish("a", _ENVIRONMENT), node.publish("b", _kept(tmp_path))
            private = node.publish("c", {**_ENVIRONMENT, "writable": "true"})
            (private / "mine").write_bytes(b"mine")
            (kept / "step").write_bytes(b"saved")
            node.restart()
            assert (tree / "a").read_bytes() == b"a"
            assert (private / "mine").read_bytes() == b"mine"
            node.unpublish("b")
            assert len(node.servers()) == 1
            node.publish("b", _kept(tmp_path))
            assert (kept / "step").read_bytes() == b"saved"
            node.kill_servers()
            wait_for(lambda: not any(node.stats(pod).volume_condition.abnormal for pod in "abc"))
            assert (tree / "a").read_bytes() == b"a"
            for pod in "abc":
                node.unpublish(pod)
            assert not [path for path in node.mounted() if "trees" not in path.parts]
            node.publish("a", {**_ENVIRONMENT, "writable": "true"})
            node.publish("b", _kept(tmp_path))
        assert node.mounted() == []


def test_a_volume_whose_server_was_killed_is_mended(local: Kubelet, tmp_path: Path) -> None:
    local.make_environment("torch", {"a": b"a"})
    tree, kept = local.publish("a", _ENVIRONMENT), local.publish("b", _kept(tmp_path))
    (kept / "step").write_bytes(b"saved")
    local.kill_servers()
    assert local.stats("a").volume_condition.abnormal
    assert local.stats("b").volume_condition.abnormal
    # At once where a kubelet asks, else when the driver looks, or starts.
    local.publish("b", _kept(tmp_path))
    assert (kept / "step").read_bytes() == b"saved"
    local.restart()
    wait_for(lambda: not local.stats("a").volume_condition.abnormal)
    assert (tree / "a").read_bytes() == b"a"
    for pod in ("a", "b"):
        local.unpublish(pod)
    wait_for(lambda: not [one for one in local.servers() if one.purpose == "checkpoint"])


def test_a_volume_that_cannot_be_mended_yet_shows_no_folder_of_the_node(
    local: Kubelet, tmp_path: Path
) -> None:
    """A trainer would otherwise save to that folder."""
    kept = local.publish("a", _kept(tmp_path))
    local.stop()
    local.kill_servers()
    shutil.move(tmp_path / "stored", tmp_path / "away")
    (tmp_path / "stored").write_bytes(b"no folder")
    local.driver = local.start_driver()
    wait_for(lambda: "has a problem" in local.log())
    with pytest.raises(OSError, match="not connected"):
        (kept / "step").write_bytes(b"saved")
    (tmp_path / "stored").unlink()
    shutil.move(tmp_path / "away", tmp_path / "stored")
    local.publish("a", _kept(tmp_path))
    (kept / "step").write_bytes(b"saved")
    local.unpublish("a")
    assert (tmp_path / "stored/step").read_bytes() == b"saved"
    assert local.mounted() == []


def test_a_dead_volume_can_be_taken_off(local: Kubelet, tmp_path: Path) -> None:
    local.make_environment("torch", {"a": b"a"})
    local.publish("a", {**_ENVIRONMENT, "writable": "true"})
    local.publish("b", _kept(tmp_path))
    local.stop()
    local.kill_servers()
    local.driver = local.start_driver()
    for pod in ("a", "b"):
        local.unpublish(pod)
        assert not local.target(pod).exists()


def test_a_machine_that_starts_again_has_the_volumes_that_are_asked_for_again(
    local: Kubelet, tmp_path: Path
) -> None:
    local.make_environment("torch", {"a": b"a"})
    local.publish("a", _ENVIRONMENT)
    gone = local.publish("gone", _kept(tmp_path))
    local.stop(signal.SIGKILL)
    local.kill_servers()
    for path in reversed(local.mounted()):
        detach(path, lazy=True)
    shutil.rmtree(local.settings.run_dir)
    local.driver = local.start_driver()
    assert (local.publish("a", _ENVIRONMENT) / "a").read_bytes() == b"a"
    # Its pod was ended by the restart: what is mounted there, nobody would take off.
    assert gone not in local.mounted()
    assert len(list((local.settings.run_dir / "volumes").iterdir())) == 1
    local.unpublish("a")
    local.unpublish("gone")


def test_unpublish_waits_for_what_is_being_written(local: Kubelet, tmp_path: Path) -> None:
    """While a process of the pod still writes, the kubelet must ask again."""
    kept = local.publish("a", _kept(tmp_path))
    with writing(kept / "step") as writer:
        code, said = refused(local.unpublish, "a")
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "step" in said
        assert kept in local.mounted()
        writer.communicate(b"\n")
    local.unpublish("a")
    assert (tmp_path / "stored/step").stat().st_size > 0
    assert not local.servers()


def test_a_pod_that_is_killed_while_it_writes_leaves_what_was_there(
    local: Kubelet, tmp_path: Path
) -> None:
    kept = local.publish("a", _kept(tmp_path))
    (kept / "step").write_bytes(b"whole")
    with writing(kept / "step") as writer:
        writer.kill()
        writer.wait()
        local.unpublish("a")
    assert (tmp_path / "stored/step").read_bytes() == b"whole"


def test_another_pods_writer_does_not_hold_up_an_end(local: Kubelet, tmp_path: Path) -> None:
    local.publish("a", _kept(tmp_path))
    kept = local.publish("b", _kept(tmp_path))
    with writing(kept / "step") as writer:
        local.unpublish("a")
        writer.communicate(b"\n")
    assert (kept / "step").stat().st_size == 2**23


def test_a_target_in_use_stays(kubelet: Kubelet) -> None:
    kubelet.make_environment("torch", {"a": b"a"})
    target = kubelet.publish("a", _ENVIRONMENT)
    with (target / "a").open("rb") as file:
        code, said = refused(kubelet.unpublish, "a")
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert str(target) in said
        assert os.pread(file.fileno(), 1, 0) == b"a"
    kubelet.unpublish("a")


@pytest.mark.hdfs
def test_checkpoints_on_hdfs_are_durable_when_the_volume_is_gone(
    kubelet: Kubelet, hdfs: MiniHdfs, hdfs_url: str
) -> None:
    context = {"kind": "checkpoint", "source": hdfs_url, "stripe_unit": "1MiB"}
    data = os.urandom(5_000_000)
    one, two = kubelet.publish("a", context), kubelet.publish("b", context)
    (one / "step-1").mkdir()
    (one / "step-1/model.pt").write_bytes(data)
    assert (two / "step-1/model.pt").read_bytes() == data
    kubelet.kill_servers(only_worker=True)
    assert (two / "step-1/model.pt").read_bytes() == data
    (two / "step-1/last").write_bytes(data)
    kubelet.restart()
    kubelet.unpublish("a")
    kubelet.unpublish("b")
    assert not kubelet.servers()
    with open_store(hdfs_url) as store:
        assert store.exists("step-1/model.pt")
        assert store.exists("step-1/last")
    again = kubelet.publish("c", context, readonly=True)
    assert (again / "step-1/last").read_bytes() == data
