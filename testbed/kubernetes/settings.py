"""Configuration files and command lines of the cluster's programs."""

import json
from pathlib import Path
from typing import Any

from testbed.kubernetes.machine import ADDRESS, ClusterNode

REGISTRY = f"{ADDRESS}:5000"
PAUSE_IMAGE = f"{REGISTRY}/pause:1"
# The tokens are not secret: their network has no way out.
_USERS = {
    "admin": ("system:masters",),
    "system:kube-controller-manager": (),
    "system:kube-scheduler": (),
    "system:kube-proxy": (),
}
_CONTAINERD = f"""version = 2
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
# The machine may lack the capability to lower oom_score_adj.
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{{cni}}"
conf_dir = "/etc/cni/net.d"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "/etc/containerd/certs.d"
"""
_HOSTS = f'server = "http://{REGISTRY}"\n[host."http://{REGISTRY}"]\n'


def kubeconfig(folder: Path, user: str) -> Path:
    """Write the kubeconfig of a user, and return its path."""
    path = folder / f"{user.replace(':', '-')}.kubeconfig"
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "here",
        "clusters": [{
            "name": "here",
            "cluster": {"server": f"https://{ADDRESS}:6443", "insecure-skip-tls-verify": True},
        }],
        "users": [{"name": user, "user": {"token": f"token-{user}"}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": user}}],
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path


def write_tokens(path: Path, nodes: list[ClusterNode]) -> None:
    """Write the users' tokens with their groups; RBAC decides their rights."""
    users = {**_USERS, **{f"system:node:{node.name}": ("system:nodes",) for node in nodes}}
    lines = [f'token-{user},{user},{user},"{",".join(of)}"\n' for user, of in users.items()]
    path.write_text("".join(lines))


def etcd(data: Path) -> list[str]:
    """Return the command of etcd, which never waits for a disk."""
    return ["etcd", "--data-dir", str(data), "--unsafe-no-fsync", "--log-level", "error"]


def api_server(folder: Path) -> list[str]:
    """Return the command of the API server, with RBAC and webhooks."""
    return [
        "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--secure-port=6443",
        f"--bind-address={ADDRESS}", f"--advertise-address={ADDRESS}", f"--cert-dir={folder}/tls",
        f"--token-auth-file={folder}/tokens.csv", "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
        "--service-cluster-ip-range=10.99.0.0/24", "--enable-aggregator-routing=true",
        "--service-account-issuer=https://kubernetes", "--api-audiences=api",
        f"--service-account-signing-key-file={folder}/accounts.key",
        f"--service-account-key-file={folder}/accounts.key",
        "--kubelet-preferred-address-types=InternalIP",
        # Pods leave a node without power after 10 seconds, not after five minutes.
        "--default-not-ready-toleration-seconds=10", "--default-unreachable-toleration-seconds=10",
    ]  # fmt: skip


def controllers(folder: Path) -> list[str]:
    """Return the command of the controllers, which notice the loss of a node quickly."""
    config = kubeconfig(folder, "system:kube-controller-manager")
    return [
        "kube-controller-manager", f"--kubeconfig={config}", "--leader-elect=false",
        f"--service-account-private-key-file={folder}/accounts.key",
        f"--root-ca-file={folder}/tls/apiserver.crt", "--use-service-account-credentials=true",
        "--node-monitor-period=2s", "--node-monitor-grace-period=16s",
    ]  # fmt: skip


def scheduler(folder: Path) -> list[str]:
    """Return the command of the scheduler."""
    config = kubeconfig(folder, "system:kube-scheduler")
    return ["kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false"]


def proxy(folder: Path, node: ClusterNode, release: tuple[int, int]) -> list[str]:
    """Return the command of kube-proxy, without limits for the machine's connections."""
    # API servers from 1.25 on lack the EndpointSlices of kube-proxies before 1.23.
    older = ["--feature-gates=EndpointSliceProxying=false"]
    return [
        "kube-proxy", f"--kubeconfig={kubeconfig(folder, 'system:kube-proxy')}",
        f"--hostname-override={node.name}", "--proxy-mode=iptables",
        "--cluster-cidr=10.88.0.0/16", "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
        *(older if release < (1, 23) else []),
    ]  # fmt: skip


def kubelet(folder: Path, node: ClusterNode, release: tuple[int, int]) -> list[str]:
    """Return the command of a kubelet whose files are on the node's own disk."""
    path = folder / f"{node.name}.kubelet"
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"}, "failSwapOn": False, "cgroupDriver": "cgroupfs",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100, "nodeStatusUpdateFrequency": "4s",
        "syncFrequency": "10s", "volumePluginDir": "/var/lib/kubelet/plugins_exec",
        "serializeImagePulls": False,
    }  # fmt: skip
    if release >= (1, 31):
        document["failCgroupV1"] = False
    path.write_text(json.dumps(document))
    config = kubeconfig(folder, f"system:node:{node.name}")
    # Until 1.26, kubelets also supported Docker.
    older = ["--container-runtime=remote", f"--pod-infra-container-image={PAUSE_IMAGE}"]
    return [
        "kubelet", f"--config={path}", f"--kubeconfig={config}",
        f"--hostname-override={node.name}", f"--node-ip={node.address}",
        "--root-dir=/var/lib/kubelet", "--cert-dir=/var/lib/kubelet/pki",
        "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
        *(older if release < (1, 27) else []),
    ]  # fmt: skip


def write_node_files(node: ClusterNode, programs: Path) -> None:
    """Write the files that an administrator puts into /etc of a node."""
    network = {
        "cniVersion": "0.4.0", "name": "pods",
        "plugins": [{
            "type": "bridge", "bridge": "pods", "isDefaultGateway": True, "ipMasq": False,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local", "ranges": [[{"subnet": node.pods}]],
                "dataDir": "/run/cni-ipam",
            },
        }],
    }  # fmt: skip
    for name, text in (
        ("containerd/config.toml", _CONTAINERD.format(cni=programs / "cni")),
        (f"containerd/certs.d/{REGISTRY}/hosts.toml", _HOSTS),
        ("cni/net.d/10-pods.conflist", json.dumps(network)),
        ("hosts", f"127.0.0.1 localhost\n{node.address} {node.name}\n"),
        ("resolv.conf", ""),
    ):
        path = node.disk / "etc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def registry(folder: Path) -> Path:
    """Write the registry's configuration (JSON is YAML) and return its path."""
    path = folder / "registry.json"
    document = {
        "version": "0.1", "log": {"level": "warn"},
        "storage": {
            "filesystem": {"rootdirectory": str(folder / "registry")}, "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": REGISTRY, "relativeurls": True},
    }  # fmt: skip
    path.write_text(json.dumps(document))
    return path
