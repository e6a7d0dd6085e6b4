"""An image that only the store has is worth a longer wait than the first answer's."""

import math
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.base.wait_budget import WAIT_BUDGET
from testbed.mounts.image_mounts import index
from testbed.servers.faulty_relay import Fault, FaultyRelay
from tests.support.images.pulled import PullingNode


def test_a_named_image_is_waited_for(
    tmp_path: Path, moto: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "code").write_bytes(b"print(1)" * 5000)
    with FaultyRelay(moto["AWS_ENDPOINT_URL"].removeprefix("http://")) as relay:
        for name, value in {**moto, "AWS_ENDPOINT_URL": f"http://{relay.host}"}.items():
            monkeypatch.setenv(name, value)
        node = PullingNode(tmp_path / "node", f"s3://conformance/{tmp_path.name}")
        node.settings = replace(node.settings, deadline_s=60.0)
        index(node.settings, root, "image:1")
        shutil.rmtree(node.settings.cache_dir)
        relay.faults = [Fault("", hang_s=600.0)]
        WAIT_BUDGET.limit(60.0, first_answer_s=0.6)
        try:
            node.obtain("image:1").release()
        finally:
            WAIT_BUDGET.limit(math.inf)
    (said,) = node.said
    assert said.startswith("waiting for the store, since nothing else has image image:1: ")
    assert "no answer within 0.6 s" in said
