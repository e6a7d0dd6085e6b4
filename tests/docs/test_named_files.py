"""Files, modules and pages that the documents name exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from testbed.paths import REPOSITORY

PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").rglob("*.md"))]
# These tell what was: files that were renamed since keep their old names there.
_HISTORIES = ("CHANGELOG.md",)
# Attributes of timelines and names of settings look like modules, too.
_PACKAGES = "(?:blob|cli|fuse|launch|prefetch|registry|snapshots|store|transfer)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_pages_and_their_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        if heading:
            assert heading in _headings(path), f"{path.name} has no heading #{heading}"


def _headings(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    lines = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.M)
    kept = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", line.lower())) for line in lines)
    return {line.strip().replace(" ", "-") for line in kept}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_named_files_and_modules_exist(page: Path) -> None:
    if page.name in _HISTORIES:
        return
    text = page.read_text(encoding="utf-8")
    roots = r"(?:bootseer|prefetch|snapshots|fuse|bench|tests)"
    for name in re.findall(rf"(?<![\w/.-]){roots}/[a-z_0-9/]+\.py\b", text):
        assert (REPOSITORY / name).is_file(), f"{page.name} names {name}, which is not there"
    for name in re.findall(rf"`(?:python -m )?(bootseer\.{_PACKAGES}(?:\.\w+)+)`", text):
        assert _exists(name), f"{page.name} names {name}, which is not there"


def _exists(name: str) -> bool:
    """Whether this is a module, or a name that one has."""
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
