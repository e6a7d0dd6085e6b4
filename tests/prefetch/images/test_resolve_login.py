"""Images behind a login: by a credential helper, and with tokens that expire meanwhile."""

import contextlib
import json
from pathlib import Path

import pytest
from msgspec import structs

from bootseer.errors import PermissionDeniedError
from bootseer.prefetch.images.find import resolve_image
from testbed.images.building import LayoutBuilder, Member, tar_of
from testbed.servers.faulty_relay import Fault, FaultyRelay
from testbed.servers.registry import TokenServer, running_registry
from tests.support.images.pulled import PullingNode

USER, PASSWORD = "me", "s3cret-pass"
HELPER = f"""#!/bin/sh
read host
echo "$1 $host" >> "$0.asked"
[ -e "$0.locked" ] && exit 1
echo '{{"Username": "{USER}", "Secret": "{PASSWORD}"}}'
"""


def test_a_token_expires_while_layers_are_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "docker-credential-tests"
    helper.write_text(HELPER)
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"credsStore": "tests"}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    layers = [tar_of([Member(f"{n}/file", data=b"%d" % n * 400_000)]) for n in range(3)]
    layout = LayoutBuilder(tmp_path / "layout")
    layout.add_image(layers)
    with (
        contextlib.closing(TokenServer(tmp_path / "tokens", USER, PASSWORD)) as tokens,
        running_registry(tmp_path / "registry", tokens.auth) as registry,
        FaultyRelay(registry.host) as relay,
    ):
        registry.push_layout(layout.directory, "latest", "team/train:1", f"{USER}:{PASSWORD}")
        relay.challenge = (
            f'Bearer realm="{tokens.url}",service="tests",scope="repository:team/train:pull"'
        )
        relay.faults = [Fault("GET .*blobs", 1, cut_after_bytes=100), Fault("GET .*blobs", 1, 500)]
        node = PullingNode(tmp_path / "node", tmp_path / "store")
        image = f"registry://{relay.host}/team/train:1"
        said = []

        def say(sentence: str) -> None:
            # The manifest has been read, and the layers come next.
            relay.revoke()
            tokens.requests.clear()
            said.append(sentence)

        resolved = resolve_image(node.settings, image, say=say)
        assert len(node.contents(resolved)) == len(layers)
        resolved.release()
        assert len(said) == 1
        assert tokens.requests
        assert set(asked(helper)) == {f"get {relay.host}"}
        # Without a login a node gets nothing from the registry, whatever it has itself.
        Path(f"{helper}.locked").touch()
        with pytest.raises(PermissionDeniedError, match="docker login"):
            node.obtain(image)
        other = PullingNode(tmp_path / "other", tmp_path / "other-store")
        other.settings = structs.replace(other.settings, deadline_s=60.0)
        with pytest.raises(PermissionDeniedError, match="docker login"):
            other.obtain(image)
        assert other.left_behind() == []


def asked(helper: Path) -> list[str]:
    return Path(f"{helper}.asked").read_text().splitlines()
