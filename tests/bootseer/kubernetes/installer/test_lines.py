"""Lines that are added to containerd's configuration, as TOML."""

import tomllib
from typing import Any

from bootseer.kubernetes.containerd_config import lines_for, with_block

_CRI = "io.containerd.grpc.v1.cri"
_RUNTIMES = ("plugins", _CRI, "containerd", "runtimes")


def _runtimes(table: dict[str, Any]) -> dict[str, Any]:
    for name in _RUNTIMES:
        table = table[name]
    return table


def test_the_copied_runtime_keeps_values_of_every_kind() -> None:
    """A named fault: lists of tables, and text beyond the BMP, became no TOML."""
    runtime: dict[str, Any] = {
        "runtime_type": "io.containerd.runc.v2",
        "pod_annotations": ["example.com/*"],
        "container_annotations": [],
        "snapshotter": "",
        "options": {
            "BinaryName": '/usr/bin/nvidia \U0001f680 \x7f "quoted"',
            "SystemdCgroup": True,
            "NoPivotRoot": False,
            "Weight": 1.5,
            "Hooks": [{"path": "/a", "args": ["x"]}, {"path": "/b", "nested": [{"deep": 1}]}],
        },
    }
    config = "version = 2\n"
    dump = {
        "version": 2,
        "plugins": {
            _CRI: {"containerd": {"default_runtime_name": "gpu", "runtimes": {"gpu": runtime}}}
        },
    }
    lines = lines_for(dump, config, "/run/bootseer/snapshotter.sock", "linux/amd64")
    loaded = tomllib.loads(with_block(config, lines))
    assert loaded["proxy_plugins"]["bootseer"]["address"] == "/run/bootseer/snapshotter.sock"
    copied = _runtimes(loaded)["bootseer"]
    assert copied.pop("snapshotter") == "bootseer"
    assert copied["options"] == {name: value for name, value in runtime["options"].items() if value}
    assert copied["pod_annotations"] == ["example.com/*"]
    # A zero value is left out: containerd's versions differ in which of them they print.
    assert "container_annotations" not in copied
    assert _runtimes(loaded)["gpu"]["runtime_type"] == "io.containerd.runc.v2"
