"""The content of a target by the layers of its root equals that of a scan."""

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bootseer.blob.pack.packing import pack_directory
from bootseer.blob.tree import Tree
from bootseer.errors import InvalidInputError
from bootseer.linux import namespaces
from bootseer.linux.root_paths import resolve_in_root
from bootseer.snapshots import layers as layered_scan
from bootseer.snapshots.layers import Layers, scan_after, scan_before
from bootseer.snapshots.scan import Scan, base_digest, diff, scan
from testbed.mounts.overlays import overlay as overlay_over
from testbed.needs import require

pytestmark = pytest.mark.needs("mount")


def _make_lower(lower: Path) -> None:
    """Make names that `_PATHS` refer to, and some beside them."""
    for top in ("a", "b"):
        for below in ("a", "b"):
            (lower / "t" / top / below).mkdir(parents=True)
            (lower / "t" / top / below / "a").write_text("lower")
            (lower / "t" / top / below / "kept").write_text("lower")
        (lower / "t" / top / "c").symlink_to("a")
    (lower / "t/c").write_text("lower")
    (lower / "t/d").hardlink_to(lower / "t/c")
    (lower / "t/.bootseer-x").mkdir()
    (lower / "t/.bootseer-x/y").touch()
    (lower / "u").mkdir()


@pytest.fixture(scope="module", params=["", ",userxattr", ",redirect_dir=on"])
def mounting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Overlay":
    return _made_overlay(tmp_path_factory, request.param)


@pytest.fixture(scope="module", params=["", ",redirect_dir=on"])
def overlay(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Overlay":
    """Overlay with either kind of attributes."""
    return _made_overlay(tmp_path_factory, request.param)


def _made_overlay(tmp_path_factory: pytest.TempPathFactory, options: str) -> "Overlay":
    require("mount", "fuse")
    base = tmp_path_factory.mktemp("layers")
    _make_lower(base / "lower")
    with tempfile.TemporaryFile() as file:
        tree = pack_directory(base / "lower", file)
    return Overlay(base, options, tree)


class Overlay:
    def __init__(self, base: Path, options: str, tree: Tree) -> None:
        self.base, self.options, self.tree = base, options, tree
        self.may_redirect = "redirect" in options

    def layers(self) -> contextlib.AbstractContextManager[Layers]:
        """Mount a new overlay over the lower directory."""
        return overlay_over(self.base / "lower", self.options, lambda: self.tree)


_PATHS = st.sampled_from(
    ("a", "b", "c", "d", "e", "a/a", "a/b", "a/c", "a/e", "b/a", "b/e", "a/a/a", "a/a/kept", "e/a")
)
_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            (
                *("write", "append", "remove", "rename", "rename", "mkdir", "again", "chmod"),
                *("chown", "link", "symlink", "xattr", "touch", "fifo", "open"),
            )
        ),
        _PATHS,
        _PATHS,
    ),
    max_size=12,
)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _do(top: Path, operation: str, one: str, other: str) -> None:
    """Do an operation, or nothing if it is impossible here."""
    path, second = top / one, top / other
    with contextlib.suppress(OSError):
        if operation in ("write", "append", "open") and path.is_fifo():
            return  # it would wait for a reader
        match operation:
            case "write":
                path.write_text(other)
            case "append":
                with path.open("a") as file:
                    file.write(other)
            case "open":
                path.open("r+").close()
            case "remove":
                _remove(path)
            case "rename":
                if os.path.lexists(second) and not path.is_relative_to(second):
                    _remove(second)
                path.rename(second)
            case "mkdir":
                if path.exists():
                    _remove(path)
                path.mkdir()
            case "again":
                _remove(path)
                path.mkdir()
                (path / "new").touch()
            case "chmod":
                path.chmod(0o700)
            case "chown":
                os.chown(path, 5, 6, follow_symlinks=False)
            case "link":
                second.hardlink_to(path)
            case "symlink":
                path.symlink_to(other)
            case "xattr":
                os.setxattr(path, "user.note", b"x", follow_symlinks=False)
            case "touch":
                os.utime(path, (1, 1), follow_symlinks=False)
            case "fifo":
                os.mkfifo(path)


def _comparable(found: Scan) -> Scan:
    """Return the scan without directories' inode numbers, which overlayfs may change at any
    time."""
    return {
        path: entry._replace(inode=0) if stat.S_ISDIR(entry.mode) else entry
        for path, entry in found.items()
    }


def _settled(target: Path) -> Scan:
    """Return a scan after overlayfs's "impure" attributes have settled.

    Reading a directory may remove the attribute, which changes the directory's ctime.
    """
    scan(target)
    return scan(target)


def _no_scan(directory: Path) -> Scan:
    assert not directory.is_dir(), "a scan where the layers tell"
    return scan(directory)


@given(_OPERATIONS, _OPERATIONS)
@example([("mkdir", "e", "a"), ("link", "a/c", "e/a")], [])
@settings(max_examples=25)
def test_what_was_written_is_found_as_by_a_scan(
    mounting: Overlay, first: list[tuple[str, str, str]], second: list[tuple[str, str, str]]
) -> None:
    with mounting.layers() as layers, contextlib.ExitStack() as stack:
        if not mounting.may_redirect:
            stack.enter_context(patch.object(layered_scan, "scan", _no_scan))
        target = layers.root / "t"
        for operation in first:
            _do(target, *operation)
        before, known = _settled(target), scan_before(layers, target)
        assert known.keys() == before.keys()
        assert base_digest(known) == base_digest(before)
        for operation in second:
            _do(target, *operation)
        after = _settled(target)
        assert _comparable(scan_after(layers, target, before)) == _comparable(after)
        wanted = diff(before, after)
        found = diff(known, scan_after(layers, target, known))
        assert found.deleted == wanted.deleted
        # The lower directory is no served tree, so a scan makes its files look changed.
        if not mounting.may_redirect:
            assert found.packed_paths() == wanted.packed_paths()


def test_directories_that_come_and_go(overlay: Overlay) -> None:
    """Among them are the target itself and the directories above it."""
    with overlay.layers() as layers:
        target = layers.root / "x/y"
        assert scan_before(layers, target) == {}
        assert scan_after(layers, target, {}) == {}
        target.mkdir(parents=True)
        (target / "file").touch()
        made = scan_after(layers, target, {})
        assert made == scan(target)
        assert len(made) == 2
        shutil.rmtree(layers.root / "x")
        assert scan_after(layers, target, made) == {}
        deep = layers.root / "t/a/a"
        before = scan_before(layers, deep)
        assert len(before) == 3
        shutil.rmtree(layers.root / "t/a")
        assert scan_after(layers, deep, before) == {}
        deep.mkdir(parents=True)
        assert scan_after(layers, deep, before) == scan(deep)
        shutil.rmtree(layers.root / "t/a")
        (layers.root / "t/a").symlink_to("b")
        resolved = resolve_in_root(layers.root, "/t/a/a")
        assert resolved == layers.root / "t/b/a"
        assert _comparable(scan_after(layers, resolved, {})) == _comparable(scan(resolved))
        (layers.root / "u").rmdir()
        (layers.root / "u").touch()
        with pytest.raises(InvalidInputError, match="not a directory"):
            scan_before(layers, layers.root / "u")
        with pytest.raises(InvalidInputError, match="not a directory"):
            scan_after(layers, layers.root / "u", {})


def test_where_the_layers_do_not_tell_a_scan_does(
    overlay: Overlay, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with overlay.layers() as layers:
        target = layers.root / "t"
        before = scan(target)
        assert scan_before(layers, target).keys() == before.keys()
        assert scan_after(layers, target, before) is before
        # As for a served tree.
        unseen = {path: entry._replace(device=0, inode=0) for path, entry in before.items()}
        assert not caplog.messages

        def check(reason: str) -> None:
            caplog.clear()
            assert _comparable(scan_after(layers, target, before)) == _comparable(scan(target))
            assert reason in caplog.text
            # Nor do files look changed then that no process has read.
            wanted, found = diff(before, scan(target)), scan_after(layers, target, unseen)
            assert diff(unseen, found).packed_paths() == wanted.packed_paths()
            assert scan_before(layers, target) == scan(target)

        place = target / "b"
        namespaces.mount("tmpfs", place, "tmpfs")
        try:
            (place / "over").touch()
            check("something is mounted")
            assert b"b/a" not in scan_before(layers, target)
        finally:
            namespaces.unmount(place)
        if overlay.may_redirect:
            (target / "a").rename(target / "e")
            (target / "b/a").rename(target / "a")
            check("trusted.overlay.redirect")
        # As on an unknown kernel.
        (target / "b/new").touch()
        os.setxattr(layers.upper / "t/b", "trusted.overlay.future", b"y")
        shutil.rmtree(target / "e", ignore_errors=True)
        check("the attribute trusted.overlay.")
