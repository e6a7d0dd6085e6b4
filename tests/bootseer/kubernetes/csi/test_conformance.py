"""Identity and node cases of the conformance suite of CSI drivers (csi-sanity 4.2).

Each test has the name of the case that it carries out.
"""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from bootseer.kubernetes.csi.service import IDENTITY, NODE
from tests.bootseer.kubernetes.csi.conftest import CAPABILITY, Kubelet, refused

pytestmark = pytest.mark.needs("mount", "fuse")

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


@pytest.fixture(scope="module")
def kubelet() -> Iterator[Kubelet]:
    """Yield one kubelet for all cases; a case that publishes also unpublishes."""
    with Kubelet() as started:
        started.make_environment("torch", {"a": b"a"})
        yield started


def test_identity(kubelet: Kubelet) -> None:
    """GetPluginCapabilities, Probe, GetPluginInfo."""
    kubelet.call("GetPluginCapabilities", IDENTITY)
    assert kubelet.call("Probe", IDENTITY).ready.value
    info = kubelet.call("GetPluginInfo", IDENTITY)
    assert 0 < len(info.name) <= 63
    assert info.name.replace(".", "").replace("-", "").isalnum()
    assert info.vendor_version


def test_node_get_capabilities(kubelet: Kubelet) -> None:
    found = {one.rpc.type for one in kubelet.call("NodeGetCapabilities").capabilities}
    assert found == {2, 4}  # GET_VOLUME_STATS, VOLUME_CONDITION


def test_node_get_info_should_return_appropriate_values(kubelet: Kubelet) -> None:
    info = kubelet.call("NodeGetInfo")
    assert info.node_id == "node-1"
    assert info.max_volumes_per_node >= 0


def _publish(kubelet: Kubelet, **changes: object) -> dict[str, Any]:
    return {
        "volume_id": "v",
        "target_path": str(kubelet.target("sanity")),
        "volume_capability": CAPABILITY,
        "volume_context": {"kind": "environment", "environment": "torch"},
        **changes,
    }


@pytest.mark.parametrize(
    "left_out", ["volume_id", "target_path", "volume_capability"], ids=lambda name: name
)
def test_node_publish_volume_should_fail_without(kubelet: Kubelet, left_out: str) -> None:
    fields = _publish(kubelet)
    del fields[left_out]
    assert refused(kubelet.call, "NodePublishVolume", **fields)[0] is INVALID


@pytest.mark.parametrize("left_out", ["volume_id", "target_path"])
def test_node_unpublish_volume_should_fail_without(kubelet: Kubelet, left_out: str) -> None:
    fields = {"volume_id": "v", "target_path": str(kubelet.target("sanity"))}
    del fields[left_out]
    assert refused(kubelet.call, "NodeUnpublishVolume", **fields)[0] is INVALID


def test_node_unpublish_volume_should_remove_target_path(kubelet: Kubelet) -> None:
    target = kubelet.target("sanity")
    kubelet.call("NodePublishVolume", **_publish(kubelet))
    assert (target / "a").read_bytes() == b"a"
    kubelet.call("NodeUnpublishVolume", volume_id="v", target_path=str(target))
    assert not target.exists()


@pytest.mark.parametrize("left_out", ["volume_id", "volume_path"])
def test_node_get_volume_stats_should_fail_without(kubelet: Kubelet, left_out: str) -> None:
    fields = {"volume_id": "v", "volume_path": "some/path"}
    del fields[left_out]
    assert refused(kubelet.call, "NodeGetVolumeStats", **fields)[0] is INVALID


def test_node_get_volume_stats_should_fail_when_the_volume_is_not_found(kubelet: Kubelet) -> None:
    fields = {"volume_id": "none", "volume_path": "some/path"}
    assert refused(kubelet.call, "NodeGetVolumeStats", **fields)[0] is MISSING


def test_node_get_volume_stats_should_fail_when_it_is_not_at_that_path(kubelet: Kubelet) -> None:
    target = str(kubelet.target("sanity"))
    kubelet.call("NodePublishVolume", **_publish(kubelet))
    fields = {"volume_id": "v", "volume_path": "some/path"}
    assert refused(kubelet.call, "NodeGetVolumeStats", **fields)[0] is MISSING
    kubelet.call("NodeUnpublishVolume", volume_id="v", target_path=target)


@pytest.mark.parametrize("count", [1, 5], ids=["should work", "should be idempotent"])
def test_node_service(kubelet: Kubelet, count: int) -> None:
    target = str(kubelet.target("sanity"))
    for _ in range(count):
        kubelet.call("NodePublishVolume", **_publish(kubelet))
    usages = kubelet.call("NodeGetVolumeStats", volume_id="v", volume_path=target).usage
    assert {usage.unit for usage in usages} == {1, 2}
    for _ in range(count):
        kubelet.call("NodeUnpublishVolume", volume_id="v", target_path=target)


def test_methods_that_no_capability_announces_are_not_there(kubelet: Kubelet) -> None:
    with grpc.insecure_channel(f"unix:{kubelet.socket}") as channel:
        for name in ("NodeStageVolume", "NodeExpandVolume"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{NODE}/{name}")(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
