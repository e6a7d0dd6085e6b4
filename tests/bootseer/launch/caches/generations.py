"""Nodes that share a store and keep one cache."""

import os
import time
from pathlib import Path

from bootseer.launch.caches.finding import Cache
from bootseer.launch.caches.publishing import PublishingStart, PublishResult, publish
from bootseer.launch.caches.records import RestoreResult
from bootseer.launch.caches.restoring import restore
from bootseer.settings.config import Settings, load_settings
from bootseer.snapshots.key_parts import Part
from bootseer.store import open_own_store


def entry(number: int) -> str:
    """Return a file name as TorchInductor makes it for a library."""
    letters = "abcdefghijklmnopqrstuvwxyz234567"
    return f"3b/{letters[number % 32] * 52}.py"


class CachingNode:
    """Node with a folder of its own at a path that is the same on all nodes."""

    def __init__(
        self,
        base: Path,
        name: str,
        *,
        torch: str = "2.6.0",
        limit: str = "1MB",
        store: str = "",
    ) -> None:
        self.settings: Settings = load_settings(
            {
                "store_url": store or (base / "store").as_uri(),
                "cache_dir": str(base / name / "cache"),
                "run_dir": str(base / name / "run"),
                "node": name,
                "deadline_s": "20",
                "keep_limit_bytes": limit,
            }
        )
        self.folder = base / name / "folder"
        self.begun_ns = time.time_ns()
        parts = (Part("cache", "X_CACHE"), Part("package torch", torch), Part("folder", "/x"))
        self.cache = Cache(
            name="X_CACHE", path="/x", folder=self.folder, is_ours=True, sets=True, parts=parts
        )

    def write(self, files: dict[str, str], *, age_s: float = 0.0) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            made_ns = time.time_ns() - int(age_s * 1e9)
            os.utime(path, ns=(made_ns, made_ns))

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.folder)): path.read_text()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }

    def restore(self) -> RestoreResult:
        with open_own_store(self.settings) as store:
            return restore(self.settings, store, self.cache)

    def publish(self, *, is_damaged: bool = False) -> PublishResult:
        facts = PublishingStart(self.begun_ns, is_damaged=is_damaged)
        with open_own_store(self.settings) as store:
            return publish(self.settings, store, self.cache, facts, wait_s=30)
