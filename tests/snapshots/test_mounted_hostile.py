"""Mounts of snapshots with a hostile index."""

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.blob.keys import index_key
from bootseer.errors import CorruptError
from bootseer.served.overlays import overlay_at
from bootseer.served.service import services_dir
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import create_snapshot
from bootseer.snapshots.restore import restore_snapshot
from bootseer.store import open_store
from testbed.mounts.sweeping import sweep
from testbed.waiting import wait_for
from tests.snapshots.conftest import MakeNode
from tests.support.images.forged_index import forge, sections_of

pytestmark = pytest.mark.needs("mount", "fuse")


@pytest.mark.parametrize(
    ("name", "problem"), [(b"fi/e", "contains"), (b".bootseer-", "reserved name")]
)
@pytest.mark.needs("root", "fuse")
def test_hostile_names_are_never_shown(
    tmp_path: Path, make_node: MakeNode, name: bytes, problem: str
) -> None:
    """The names are checked while the server begins; the server must end if they are hostile."""
    target = tmp_path / "env"
    target.mkdir()
    (target / ("f" * len(name))).write_text("content")
    node = replace(make_node("a"), restore_mode="mount")
    manifest = create_snapshot(node, [str(target)])
    shutil.rmtree(target)
    with open_store(node.store_url) as store:
        (wanted,) = manifest.targets
        tree = catalogue.load_tree(store, wanted)
        sections = {**sections_of(tree), "names": name + b"\0"}
        encoded = forge(sections, tree.inode_count, tree.name_count)
        forged = catalogue.stored_index(encoded)
        store.publish(index_key(forged.digest), encoded)
        catalogue.publish(
            store, replace(manifest, targets=(replace(wanted, index=forged),)), replace=True
        )
    try:
        with pytest.raises(CorruptError, match=problem):
            restore_snapshot(node, manifest.fingerprint)
        assert overlay_at(target) is None
        assert not target.exists()
        # The server removes its folder last, when its end is already known.
        wait_for(lambda: not list(services_dir(node.run_dir).iterdir()), "the folder's end")
    finally:
        sweep(tmp_path, node)
