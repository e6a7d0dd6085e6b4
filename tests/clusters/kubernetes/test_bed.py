"""The cluster of the other tests works, and leaves nothing behind."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.kubernetes import machine
from testbed.kubernetes.cluster import KubernetesCluster, sweep
from testbed.kubernetes.machine import ADDRESS
from testbed.kubernetes.objects import pod
from testbed.paths import REPOSITORY
from testbed.waiting import wait_for


@pytest.fixture(autouse=True)
def emptied(cluster: KubernetesCluster) -> Iterator[None]:
    """Remove the test's pods."""
    yield
    cluster.kubectl("delete", "pods,services", "--selector=bed=yes")


def test_a_pod_runs_on_each_node_prints_and_is_deleted(
    cluster: KubernetesCluster, shell: str
) -> None:
    for node in cluster.nodes:
        cluster.apply(pod(f"on-{node.name}", shell, "echo printed; hostname", node=node.name))
    for node in cluster.nodes:
        name = f"on-{node.name}"
        cluster.wait_pod(name, "Succeeded")
        assert cluster.kubectl("logs", name) == f"printed\n{name}\n"
        cluster.kubectl("delete", "pod", name)


def test_pods_reach_each_other_services_registry_and_hdfs(
    cluster: KubernetesCluster, shell: str
) -> None:
    first, second = cluster.nodes
    serve = "mkdir /www; echo served > /www/index.html; httpd -f -p 8080 -h /www"
    cluster.apply(pod("server", shell, serve, node=first.name))
    cluster.apply({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "server", "labels": {"bed": "yes"}},
        "spec": {"selector": {"name": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
    })  # fmt: skip
    server = cluster.wait_pod("server", "Running")["status"]["podIP"]
    service = cluster.get("service", "server")["spec"]["clusterIP"]
    name_node = cluster.hdfs.url.rpartition(":")[2]
    ask = f"""set -e
until timeout 2 wget -q -O - http://{server}:8080/; do sleep 0.2; done
until timeout 2 wget -q -O - http://{service}/; do sleep 0.2; done
wget -q -O - http://{ADDRESS}:5000/v2/
nc {ADDRESS} {name_node} < /dev/null
nc $KUBERNETES_SERVICE_HOST $KUBERNETES_SERVICE_PORT < /dev/null"""
    cluster.apply(pod("client", shell, ask, node=second.name))
    cluster.wait_pod("client", "Succeeded")
    assert cluster.kubectl("logs", "client") == "served\nserved\n{}"


def test_a_node_that_lost_its_power_comes_back(cluster: KubernetesCluster, shell: str) -> None:
    node = cluster.nodes[1]
    cluster.apply(pod("there", shell, "sleep 600", node=node.name))
    cluster.wait_pod("there", "Running")
    kept = node.disk / "lib" / "kept"
    kept.touch()
    cluster.power_off(node)
    wait_for(lambda: not cluster.is_ready(node), "the node seen as gone")
    cluster.power_on(node)
    cluster.wait_ready()
    assert kept.exists()
    cluster.wipe(node)
    assert not kept.exists()
    cluster.apply(pod("again", shell, "echo again", node=node.name))
    cluster.wait_pod("again", "Succeeded")


def test_rights_are_those_of_roles(cluster: KubernetesCluster) -> None:
    as_default = "--as=system:serviceaccount:default:default"
    done = cluster.try_kubectl("get", "pods", as_default)
    assert done.returncode != 0
    assert "forbidden" in done.stderr


def test_nothing_remains_of_a_cluster_whose_test_was_killed(tmp_path: Path) -> None:
    program = (
        "from testbed.kubernetes.cluster import KubernetesCluster\n"
        "import sys, time\n"
        "cluster = KubernetesCluster(node_count=1)\n"
        "print(cluster.folder, cluster.nodes[0].pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    before = addresses()
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        folder, pid = process.stdout.readline().split()
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end of the node")
    sweep()
    assert not Path(folder).exists()
    groups = [machine.CGROUPS / each / machine.GROUP for each in machine.hierarchies()]
    assert not [each for group in groups for each in group.glob(f"{Path(folder).name}*")]
    assert Path(folder).name not in Path("/proc/self/mounts").read_text()
    assert addresses() == before


def addresses() -> str:
    """Return the addresses and routes of this machine, which no cluster may change."""
    shown = subprocess.run(
        ["ip", "-brief", "address"], capture_output=True, text=True, check=True
    ).stdout
    return shown + Path("/proc/sys/net/ipv4/ip_forward").read_text()
