"""Files, modules and pages that the documents name exist."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from testbed.paths import REPOSITORY

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
# These pages describe the past, and keep the old names of files.
_HISTORIES = ("CHANGELOG.md",)
# Attributes of timelines and names of settings look like modules, too.
_PACKAGES = "(?:blob|cli|fuse|launch|prefetch|registry|snapshots|store|transfer)"


def test_links_lead_to_pages_and_their_headings() -> None:
    assert [line for page in PAGES for line in _broken_links(page)] == []


def _broken_links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists():
            yield f"{page.name} links to {target}, which is not there"
        elif heading and heading not in _headings(path):
            yield f"{page.name} links to {target}: {path.name} has no such heading"


def _headings(path: Path) -> set[str]:
    """Return GitHub's anchors of the headings of a page."""
    lines = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.M)
    kept = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", line.lower())) for line in lines)
    return {line.strip().replace(" ", "-") for line in kept}


def test_named_files_and_modules_exist() -> None:
    pages = [page for page in PAGES if page.name not in _HISTORIES]
    assert [line for page in pages for line in _absent_names(page)] == []


def _absent_names(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    roots = r"(?:bootseer|prefetch|snapshots|fuse|bench|testbed|tests)"
    for name in re.findall(rf"(?<![\w/.-]){roots}/[a-z_0-9/]+\.py\b", text):
        if not (REPOSITORY / name).is_file():
            yield f"{page.name} names {name}, which is not there"
    for name in re.findall(rf"`(?:python -m )?(bootseer\.{_PACKAGES}(?:\.\w+)+)`", text):
        if not _exists(name):
            yield f"{page.name} names {name}, which is not there"


def _exists(name: str) -> bool:
    """Return whether this is a module, or a name in a module."""
    parent, _, last = name.rpartition(".")
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(parent), last)


def test_every_decision_is_in_the_index() -> None:
    folder = REPOSITORY / "docs/decisions"
    pages = sorted(path.name for path in folder.glob("[0-9]*.md"))
    listed = re.findall(r"\]\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text())
    assert listed == pages
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    for name in pages:
        assert re.match(r"# .+\n\n\d{4}-\d\d-\d\d\n\n\*\*", (folder / name).read_text()), name
