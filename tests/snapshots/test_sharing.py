"""Snapshots that use content of earlier blobs: exact, and only if it saves enough."""

import os
import py_compile
import random
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bootseer.blob.build import build_tree
from bootseer.blob.tree import Blob, Extent, Frame, Inode, Tree
from bootseer.prefetch.stored_frames import plan_stored_frames
from bootseer.snapshots import catalogue
from bootseer.snapshots.archive import export_snapshot
from bootseer.snapshots.capture import Change, capture, make_manifest
from bootseer.snapshots.catalogue import Verifier
from bootseer.snapshots.fetch import fetch_tree
from bootseer.snapshots.key_parts import Part
from bootseer.snapshots.manifest import EARLIER_MAX, Manifest, Target, decode, encode
from bootseer.snapshots.scan import scan
from bootseer.snapshots.sharing import RULE, Place, Rule, bytecode_then, choose_blobs
from bootseer.store import Store, open_store
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.conftest import MakeNode

_ALWAYS = Rule(shared_bytes_min=0, shared_ratio_min=0, used_ratio_min=0)

# Few different contents, so that they repeat; empty, small, and larger than a frame.
_CONTENTS = [b"", b"x", *(random.Random(seed).randbytes(size) for seed, size in enumerate(
    (10, 10, 4000, 100_000, 140_000, 300_000)
))]  # fmt: skip
_PATHS = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "d.x", "f/a"])
_FILES = st.tuples(_PATHS, st.just("file"), st.integers(0, len(_CONTENTS) - 1))
_NAMES = st.tuples(_PATHS, st.sampled_from(["link", "hard link", "gone"]), st.integers(0, 3))
_STEPS = st.lists(st.one_of(_FILES, _FILES, _NAMES), max_size=8)


def _change(top: Path, steps: Sequence[tuple[str, str, int]]) -> None:
    for name, kind, number in steps:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        files = sorted(one for one in top.rglob("*") if one.is_file() and not one.is_symlink())
        if kind == "file":
            path.write_bytes(_CONTENTS[number])
            path.chmod(0o600 + number)
        elif kind == "link":
            path.symlink_to(f"to/{number}")
        elif kind == "hard link" and files:
            path.hardlink_to(files[number % len(files)])


def _captured(
    store: Store, top: Path, source: Path, base: Manifest | None, rule: Rule = _ALWAYS
) -> Manifest:
    change = Change(b"/env", source, {}, scan(source))
    target = capture(
        store, top / "cache", change, base=base.targets[0] if base else None, rule=rule
    )
    parts = [Part("kind", "test"), Part("index", target.index.digest)]
    manifest = make_manifest(parts, [target], setup_ns=0, node="n")
    catalogue.publish(store, manifest)
    return decode(encode(manifest), manifest.fingerprint)


@settings(max_examples=8)
@given(st.lists(_STEPS, min_size=2, max_size=4))
def test_chains_are_restored_exactly(chain: list[list[tuple[str, str, int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder, "s").as_uri()) as store:
        top = Path(folder)
        source = top / "source"
        source.mkdir()
        base = None
        for number, steps in enumerate(chain):
            _change(source, steps)
            base = _captured(store, top, source, base)
            (target,) = base.targets
            original = describe(source)
            restored = top / str(number)
            tree = catalogue.load_tree(store, target)
            fetch_tree(store, target, tree, restored, 20)
            assert differences(original, describe(restored)) == []
            assert Verifier(store).check(base.fingerprint).problems == ()
            # Only new content is stored.
            kept = {inode.digest for inode in map(tree.inode, range(tree.inode_count))}
            contents = [path.read_bytes() for path in source.rglob("*") if path.is_file()]
            assert len(kept - {None}) == len(set(contents))


def test_everything_nasty_on_top_of_itself(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    source = tmp_path / "zoo"
    make_zoo(source)
    with open_store(node.store_url) as store:
        first = _captured(store, tmp_path, source, None)
        (source / "one more").write_text("new")
        second = _captured(store, tmp_path, source, first)
        (target,) = second.targets
        assert target.earlier == (first.targets[0].blob,)
        fetch_tree(store, target, catalogue.load_tree(store, target), tmp_path / "out", 20)
        assert differences(describe(source), describe(tmp_path / "out")) == []
        exported = tmp_path / "zoo.tar.zst"
        export_snapshot(store, second, exported, lambda count: None)
    (tmp_path / "tar").mkdir()
    tar = ["tar", "--zstd", "--xattrs", "-xpf", str(exported), "-C", str(tmp_path / "tar")]
    subprocess.run(tar, check=True, timeout=60)
    names = set(describe(source))
    assert set(describe(tmp_path / "tar")) == names


def _tree(*blob_bytes: int, uses: Sequence[tuple[int, int]]) -> Tree:
    """Return a tree with a file for each (blob, length) in `uses`, in blobs of these sizes."""
    blobs = [
        Blob(
            f"sha256:{number:064x}",
            20,
            (
                Frame(0, 10, 0, size // 2, bytes(32)),
                Frame(10, 10, size // 2, size - size // 2, bytes(32)),
            ),
            f"blake3:{0:064x}",
            size,
        )
        for number, size in enumerate(blob_bytes)
    ]
    inodes = [Inode(0o40755)]
    inodes += [
        Inode(0o100644, size_bytes=length, extents=(Extent(0, blob, 0, length),))
        for blob, length in uses
    ]
    return build_tree([(b"%d" % i, i) for i in range(1, len(inodes))], inodes, blobs)


def test_when_it_pays() -> None:
    mib = 1 << 20
    base = _tree(100 * mib, 8 * mib, uses=[(0, 60 * mib), (1, 6 * mib), (1, mib)])

    def places(*numbers: int) -> list[list[Place]]:
        return [base.extents(number) for number in numbers]

    assert choose_blobs(base, places(1, 2, 3), 70 * mib) == {0, 1}
    # Little of the second blob is needed any more, so its content is stored again.
    assert choose_blobs(base, places(1, 3), 70 * mib) == {0}
    # Most of the content is new.
    assert choose_blobs(base, places(1, 2), 140 * mib) == frozenset()
    assert choose_blobs(base, places(2), 10 * mib) == {1}
    assert choose_blobs(base, places(), 10 * mib) == frozenset()
    assert choose_blobs(base, places(), 0, _ALWAYS) == frozenset()
    # The blobs that give most, if there are too many.
    assert choose_blobs(base, places(1, 2), 70 * mib, replace(RULE, blobs_max=1)) == {0}


def test_only_what_is_needed_of_an_earlier_blob_is_fetched(
    tmp_path: Path, make_node: MakeNode
) -> None:
    with open_store(make_node("a").store_url) as store:
        source = tmp_path / "source"
        source.mkdir()
        for number in range(4):
            (source / str(number)).write_bytes(random.Random(number).randbytes(1_000_000))
        first = _captured(store, tmp_path, source, None)
        for name in ("1", "2"):
            (source / name).unlink()
        second = _captured(store, tmp_path, source, first)
        target: Target = second.targets[0]
        plan = plan_stored_frames(catalogue.load_tree(store, target))
        assert 2_000_000 <= plan.wanted_bytes < 2_400_000


def test_bytecode_whose_source_has_another_time(tmp_path: Path, make_node: MakeNode) -> None:
    """Two installations of the same packages differ only in the source's time in each `.pyc`."""
    source = tmp_path / "source"
    with open_store(make_node("a").store_url) as store:
        base = None
        for time_s in (1_000_000_000, 1_100_000_000, 1_200_000_000):
            shutil.rmtree(source, ignore_errors=True)
            for number in range(30):
                path = source / f"package/module{number}.py"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"TEXT = '{random.Random(number).randbytes(5000).hex()}'\n")
                os.utime(path, (time_s, time_s))
                py_compile.compile(str(path), doraise=True)
            base = _captured(store, tmp_path, source, base, replace(_ALWAYS, used_ratio_min=0.25))
            (target,) = base.targets
            tree = catalogue.load_tree(store, target)
            fetch_tree(store, target, tree, tmp_path / str(time_s), 20)
            assert differences(describe(source), describe(tmp_path / str(time_s))) == []
            assert Verifier(store).check(base.fingerprint).problems == ()
        # The second blob holds only first bytes of files: the third takes nothing from it.
        assert len(target.earlier) == 1
        assert target.blob.size_bytes < target.earlier[0].size_bytes / 20
        assert bytecode_then(tree, b"package/__pycache__/other.cpython-311.pyc", bytes(99)) == b""
        assert bytecode_then(tree, b"package/module1.pyc", bytes(99)) == b""


def test_a_chain_of_small_steps_stays_short(tmp_path: Path, make_node: MakeNode) -> None:
    source = tmp_path / "source"
    source.mkdir()
    base = None
    with open_store(make_node("a").store_url) as store:
        for number in range(EARLIER_MAX + 3):
            (source / str(number)).write_bytes(random.Random(number).randbytes(5000))
            base = _captured(store, tmp_path, source, base)
            (target,) = base.targets
            assert len(target.earlier) == min(number, EARLIER_MAX)
        fetch_tree(store, target, catalogue.load_tree(store, target), tmp_path / "out", 20)
    assert differences(describe(source), describe(tmp_path / "out")) == []


class _Gathering:
    """Store whose manifests come once several of them are asked for at the same time."""

    def __init__(self, store: Store, count: int) -> None:
        self._store = store
        self._gate = threading.Barrier(count)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read(self, key: str, offset: int, length: int) -> bytes:
        self._gate.wait(60)
        return self._store.read(key, offset, length)


def test_earlier_snapshots_are_looked_at_side_by_side(tmp_path: Path, make_node: MakeNode) -> None:
    """Regression: reading them one after another took seconds, while all nodes waited for the
    lease."""
    with open_store(make_node("a").store_url) as store:
        for number in range(4):
            source = tmp_path / str(number)
            source.mkdir()
            (source / "file").write_text(str(number))
            _captured(store, tmp_path, source, None)
        gathering = cast(Store, _Gathering(store, 4))
        assert len(list(catalogue.list_newest(gathering, 4))) == 4
        # After this time no manifest is asked for.
        assert list(catalogue.list_newest(store, 4, within_s=-1.0)) == []
