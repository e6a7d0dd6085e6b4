"""Takes the store away at the N-th step of a capture or a restore (see `crash_driver`).

`python vanishing_driver.py SCENARIO DIRECTORY POINTS` prints its results. It fails if the
environment differs from the set-up's result, the set-up ran twice, more than one warning was given,
or the next run, with the store back, did not work.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bootseer.settings.config import Settings
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.store import open_store
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.support.crash_driver import no_leftovers, points_of, run_in_child, settings_of


class _Node:
    """Node that makes or restores a tree with every kind of entry, and the folder of its store."""

    def __init__(self, top: Path, mode: str) -> None:
        self.top = top
        self.store, self.away = top / "store", top / "away"
        self.counter = top / "runs"
        self.target = top / "work/env"
        self.target.parent.mkdir()
        make_zoo(top / "zoo")
        script = f"echo >> {self.counter}; rm -rf {self.target}; cp -a {top}/zoo {self.target}"
        self.request = SetupRequest(command=["sh", "-c", script], targets=[str(self.target)])
        self.node = replace(settings_of(top, "b"), restore_mode=mode)

    def run(self, settings: Settings) -> None:
        """Run the set-up as a launch does; keep the messages."""
        said: list[str] = []
        result = run_setup(settings, self.request, report=said.append)
        warnings = [line for line in said if line.startswith("warning")]
        # Changes by other processes of this machine are not tested here.
        warnings = [line for line in warnings if "changed during the set-up" not in line]
        lines = [result.how, *warnings]
        (self.top / "said").write_text("\n".join(lines))

    def vanish(self) -> None:
        """Move the store's folder away, in such a way that none can be made in its place."""
        self.store.rename(self.away)
        self.store.write_bytes(b"")

    def come_back(self) -> None:
        """Put the store's folder back."""
        if self.away.exists():
            self.store.unlink()
            self.away.rename(self.store)

    def seen(self) -> dict[str, dict[str, Any]]:
        """Return the environment's description, without files' numbers of links."""
        tree = describe(self.target)
        for attributes in tree.values():
            attributes.pop("links", None)
        return tree

    def said(self) -> list[str]:
        """Return the result and the warnings of the last run."""
        return (self.top / "said").read_text().splitlines()

    def run_count(self) -> int:
        """Return the number of the command's runs since the last call."""
        count = len(self.counter.read_text().splitlines()) if self.counter.exists() else 0
        self.counter.unlink(missing_ok=True)
        return count


def _at_each_step(node: _Node, wanted: int, prepare: Callable[[], None]) -> None:
    def run() -> None:
        node.run(node.node)

    prepare()
    count = run_in_child(run, None)
    assert count is not None
    original = node.seen()
    node.run_count()
    for point in points_of(count, wanted):
        prepare()
        assert run_in_child(run, point, node.vanish) is not None, point
        how, *warnings = node.said()
        assert differences(original, node.seen()) == [], (point, node.said())
        assert len(warnings) <= 1, (point, warnings)
        assert node.run_count() == (0 if how == "restored" else 1), (point, how)
        node.come_back()
        assert run_in_child(run, None) is not None
        assert node.said()[1:] == [], (point, node.said())
        assert differences(original, node.seen()) == [], (point, node.said())
        with open_store(node.node.store_url) as store:
            for manifest in catalogue.list_all(store):
                assert [catalogue.load_tree(store, one) for one in manifest.targets]
        no_leftovers(node.target.parent)
        node.run_count()
        print(f"{point}/{count} {how}")  # noqa: T201


def restore(top: Path, wanted: int, mode: str = "extract") -> None:
    """Assert that the environment is restored, or made as without Bootseer."""
    node = _Node(top, mode)
    run_setup(settings_of(top, "a"), node.request)

    def prepare() -> None:
        shutil.rmtree(node.target, ignore_errors=True)
        shutil.rmtree(node.node.cache_dir, ignore_errors=True)

    _at_each_step(node, wanted, prepare)


def capture(top: Path, wanted: int) -> None:
    """Assert that the environment is made once, and stored or not."""
    node = _Node(top, "extract")

    def prepare() -> None:
        shutil.rmtree(node.target, ignore_errors=True)
        shutil.rmtree(node.store, ignore_errors=True)
        # A node does not make a store again that it has used.
        shutil.rmtree(node.node.cache_dir / "stores", ignore_errors=True)
        node.store.mkdir()

    _at_each_step(node, wanted, prepare)


if __name__ == "__main__":
    scenario, directory, points = sys.argv[1:]
    globals()[scenario](Path(directory), int(points))
