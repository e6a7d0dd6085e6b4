"""Links in an untrusted tree lead nowhere outside it."""

from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.linux.root_paths import resolve_in_root


def test_links_of_an_image_stay_inside(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").write_text("secret")
    (root / "absolute").symlink_to("/etc")
    (root / "up").symlink_to("../../../../etc")
    (root / "out").symlink_to(str(tmp_path / "outside"))
    (root / "chain").symlink_to("absolute/../up")
    (root / "loop").symlink_to("loop")
    for path in ("/absolute/passwd", "up/passwd", "/chain/passwd", "/../../etc/./passwd"):
        assert resolve_in_root(root, path) == root / "etc/passwd"
    assert resolve_in_root(root, "/out") == root.joinpath(*(tmp_path / "outside").parts[1:])
    assert resolve_in_root(root, "/new/../dir") == root / "dir"
    assert resolve_in_root(root, "/") == root
    with pytest.raises(InvalidInputError, match="too many"):
        resolve_in_root(root, "/loop/x")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("/etc", "etc"),
        ("../../../../etc", "etc"),
        ("inner/../..", ""),
        ("missing/x", "a/missing/x"),
        ("/b", "etc"),
    ],
)
def test_links_stay_in_the_root(tmp_path: Path, link: str, expected: str) -> None:
    (tmp_path / "a/inner").mkdir(parents=True)
    (tmp_path / "b").symlink_to("../../etc")
    (tmp_path / "a/link").symlink_to(link)
    assert resolve_in_root(tmp_path, b"/a/link") == tmp_path / expected


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(InvalidInputError, match="symbolic links"):
        resolve_in_root(tmp_path, b"/a/x")
