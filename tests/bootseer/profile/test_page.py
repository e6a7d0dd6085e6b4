"""The page of a start, in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench.profile.generate import Recipe, some_faults, tracks
from bootseer.profile.model.analysis import StartModel
from bootseer.profile.model.graph import StartGraph
from bootseer.profile.model.tracks import Span, Track
from bootseer.profile.views.page import imports_of, to_page

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def _shown(page: str, folder: Path) -> str:
    """The document after its scripts have run."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    file = folder / "start.html"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [browser, *_FLAGS, f"--user-data-dir={folder / 'browser'}", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _page(model: StartModel, title: str = "a start", imports: str = "[]") -> str:
    return to_page(title, model, model.analyse(), imports_of([imports]))


def test_a_start_is_drawn(tmp_path: Path) -> None:
    model = StartModel(StartGraph(tracks(Recipe(40, 2, tuple(some_faults(3, 40, severity=2.5))))))
    imports = '[["torch", 0, 1000, 900000], ["torch._C", 1, 2000, 100000]]'
    shown = _shown(_page(model, imports=imports), tmp_path)
    assert 'data-drawn="1"' in shown
    assert "data-heat-ms=" in shown
    rows = re.findall(r"<td>([^<]*)</td>", shown)
    assert {"slow disk", "cold cache", "slow network", "no stragglers"} <= set(rows)
    assert 'id="flame"' in shown


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "</script><script>document.body.dataset.evil=1</script><img src=x onerror=alert(1)>"
    spans = [Span("start", 0, 5), Span(evil, 1, 4, parent=0)]
    model = StartModel(StartGraph([Track(f"{evil}{number}", spans) for number in range(3)]))
    page = _page(model, title=evil, imports=f'[["{evil}", 0, 0, 5]]')
    assert page.count("<script>") == 1
    shown = _shown(page, tmp_path)
    assert 'data-drawn="1"' in shown
    assert "data-evil" not in shown
    assert "<img" not in shown


def test_a_start_of_nothing_is_drawn(tmp_path: Path) -> None:
    shown = _shown(_page(StartModel(StartGraph([])), imports="[[1]]"), tmp_path)
    assert 'data-drawn="1"' in shown
    assert 'id="flame"' not in shown


def test_ten_thousand_nodes_fit_in_ten_megabytes() -> None:
    faults = tuple(some_faults(100, 10_000, severity=2.5))
    page = _page(StartModel(StartGraph(tracks(Recipe(10_000, 1, faults)))))
    assert len(page) < 10_000_000
