"""The page of a start, in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from msgspec import to_builtins

from bootseer.report.decoding import imports_of
from bootseer.report.explain import StartModel, compare_starts
from bootseer.report.graph import StartGraph, Track, TrackSpan
from bootseer.report.page import to_page
from testbed.needs import MissingError
from testbed.starts.generate import InjectedFault, Recipe, node_name, some_faults, tracks

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--disable-features=Translate,OptimizationHints,MediaRouter"),
)


def _shown(page: str, folder: Path) -> str:
    """Return the document after its scripts have run."""
    browser = shutil.which("chromium")
    if browser is None:
        raise MissingError("chromium is not installed")
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
    assert 'id="compare"' not in shown


def test_the_page_opens_on_what_held_the_start(tmp_path: Path) -> None:
    model = StartModel(
        StartGraph(tracks(Recipe(2, 2, (InjectedFault(node_name(1), "slow disk", 4.0),))))
    )
    shown = _shown(_page(model), tmp_path)
    answer = shown[shown.index('<dl id="answer">') : shown.index("</dl>")]
    assert re.findall(r'<dd class="big">([^<]*)</dd>', answer)[:2] == [
        f"{model.ready_s:.2f} s",
        node_name(1),
    ]
    assert "<dd>in load checkpoint</dd><dd>slow disk: " in answer
    assert "GPU-seconds" in answer
    even = StartModel(StartGraph(tracks(Recipe(8, 2))))
    assert '<dd class="big">no node</dd>' in _shown(_page(even), tmp_path)


def test_two_starts_are_compared(tmp_path: Path) -> None:
    models = [
        StartModel(StartGraph(tracks(Recipe(8, 2, faults))))
        for faults in ((), (InjectedFault(node_name(2), "slow disk", 3.0),))
    ]
    changes = to_builtins(compare_starts(models[0].summary, models[1].summary))
    comparison = {"start": "s0:0", "ready_s": models[0].ready_s, "changes": changes}
    page = to_page("t", models[1], models[1].analyse(), comparison=comparison)
    shown = _shown(page, tmp_path)
    assert 'data-drawn="1"' in shown
    more = models[1].ready_s - models[0].ready_s
    assert f">Against start s0:0: +{more:.2f} s until ready</h2>" in shown
    assert shown.count("<td>load checkpoint</td>") >= 2


_KEYS = """<script>
addEventListener("load", () => {
  const say = (canvas, tip, ...keys) => {
    for (const key of keys) byId(canvas).dispatchEvent(new KeyboardEvent("keydown", {key}));
    document.body.dataset[canvas] = byId(tip).textContent;
  };
  say("heat", "tip", "End", "PageUp", "Home");
  say("gantt", "gantt-tip", "End", "ArrowDown", "ArrowUp", "Home");
  say("flame", "flame-tip", "ArrowDown");
  byId("node").value = "node00007"; byId("find").requestSubmit();
  document.body.dataset.found = byId("tip").textContent;
  document.body.dataset.focusable = document.querySelectorAll("canvas[tabindex]").length;
});
</script></body>"""


def test_every_drawing_can_be_read_by_keyboard(tmp_path: Path) -> None:
    model = StartModel(
        StartGraph(tracks(Recipe(40, 2, (InjectedFault(node_name(2), "slow disk", 3.0),))))
    )
    imports = '[["torch", 0, 1000, 900000], ["torch._C", 1, 2000, 100000]]'
    page = _page(model, imports=imports).replace("</body>", _KEYS)
    shown = _shown(page, tmp_path)
    said = dict(re.findall(r'data-(heat|gantt|flame|focusable|found)="([^"]*)"', shown))
    assert said["focusable"] == "3"
    # The slowest node is the first one, and why it was slow is said with its figures.
    assert re.match(r"node00002 · scheduling .*slow disk: [0-9.]+ s more pressure", said["heat"])
    assert re.match(r"node\d+ · launcher: start, ", said["gantt"])
    assert said["found"].startswith("node00007 · ")
    assert said["flame"] == "torch._C: 0.10 s"


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    evil = "</script><script>document.body.dataset.evil=1</script><img src=x onerror=alert(1)>"
    spans = [TrackSpan("start", 0, 5), TrackSpan(evil, 1, 4, parent=0)]
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


def test_the_imports_are_those_of_the_process_that_took_longest() -> None:
    """The time of a module includes the modules that it imports, which count no second time."""
    nested = '[["torch", 0, 0, 900], ["torch._C", 1, 0, 800]]'
    longest = '[["numpy", 0, 0, 1000]]'
    for bodies in ([nested, longest], [longest, nested]):
        assert [row[0] for row in imports_of(bodies)] == ["numpy"]


def test_of_many_slow_nodes_the_worst_are_drawn_beside_a_typical_one() -> None:
    model = StartModel(
        StartGraph(tracks(Recipe(300, 4, tuple(some_faults(60, 300, severity=3.0)))))
    )
    found = re.search(r"const data = (\{.*\}), a = ", _page(model))
    assert found is not None
    rows = json.loads(found[1])["gantt"]
    assert len(rows) == 40
    assert any(row["on_path"] for row in rows)
    typical = [row for row in rows if not row["cause"] and not row["on_path"]]
    assert [row["role"] for row in typical] == ["launcher", "train.py"]
    assert not any(span[4] == 2 for row in typical for span in row["spans"])
    worst = [row["name"] for row in rows if any(span[4] == 2 for span in row["spans"])]
    excess = [one.node for one in model.summary.stragglers[:10]]
    assert {name.partition("/")[0] for name in worst} >= set(excess) - {
        one.node for one in model.summary.stragglers if one.cause.name == "late scheduling"
    }


def test_ten_thousand_nodes_fit_in_ten_megabytes() -> None:
    faults = tuple(some_faults(100, 10_000, severity=2.5))
    page = _page(StartModel(StartGraph(tracks(Recipe(10_000, 1, faults)))))
    assert len(page) < 10_000_000
