"""Configuration of a containerd for tests: the guide's example, with folders of its own."""

import re
from pathlib import Path

from testbed.images.building import ARCHITECTURE
from testbed.paths import REPOSITORY

_ROOT = """
version = {version}
root = "{base}/root"
state = "{base}/state"
disabled_plugins = [
  "io.containerd.internal.v1.restart", "io.containerd.internal.v1.tracing",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]
"""
_COMMON = """
[grpc]
address = "{base}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
path = "{base}/opt"
[plugins."io.containerd.grpc.v1.cri"]
stream_server_port = "0"
"""
# Some containers' root users may not lower a process's oom_score_adj.
_VERSION_2 = """
restrict_oom_score_adj = true
sandbox_image = "{pause_image}"
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{base}/cni"
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "{base}/certs.d"
"""
_VERSION_3 = """
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause_image}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.cri.v1.runtime".cni]
conf_dir = "{base}/cni"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{base}/certs.d"
"""


def containerd_config(
    base: Path, version: int, *, runtime_class: bool = False, pause_image: str = ""
) -> str:
    """Return the configuration of docs/containerd.md with folders and sockets below `base`.

    The snapshotter serves all pods or, with `runtime_class`, those of the runtime class "bootseer".
    """
    text = (REPOSITORY / "docs/containerd.md").read_text()
    blocks = re.findall(rf"```toml\nversion = {version}\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    documented = str(blocks[0])
    if runtime_class:
        release = {2: "1.7", 3: "2.x"}[version]
        documented = re.sub(
            r'^(\[plugins[^\n]*\]\n)snapshotter = "bootseer"$', r"\1", documented, flags=re.M
        )
        documented += re.findall(rf"# runtime class of {release}\n(.*?)```", text, re.DOTALL)[0]
    documented = documented.replace("/run/bootseer/snapshotter.sock", f"{base}/snapshotter.sock")
    documented = documented.replace("linux/amd64", f"linux/{ARCHITECTURE}")
    ours = _COMMON + (_VERSION_3 if version == 3 else _VERSION_2)
    ours = ours.format(base=base, pause_image=pause_image)
    return _ROOT.format(base=base, version=version) + documented + ours
