"""Programs that are started below `bootseer run`, and their timelines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.report.decoding import decode
from bootseer.report.graph import Track, tracks_of
from bootseer.timeline.otlp import Stage


class ProgramFolder:
    """Folder with programs, and starts of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "BOOTSEER_TIMELINE_DIR": str(self.folder / "timeline"),
            "BOOTSEER_STORE": str(self.folder / "store"),
            **variables,
        }

    def start(self, *command: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a command below `bootseer run`, with one pipe for its output."""
        return subprocess.Popen(
            [sys.executable, "-m", "bootseer", "--job", "j", "run", "--", *command],
            env=self.environment(**variables),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *command: str, options: tuple[str, ...] = (), **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "--job", "j", "run", *options, "--", *command],
            env=self.environment(**variables),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return done

    def report(self) -> str:
        """Return the output of `bootseer report` for the newest start, with single spaces."""
        done = subprocess.run(
            [sys.executable, "-m", "bootseer", "report", "j"],
            env=self.environment(COLUMNS="200"),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return " ".join(done.stdout.split())

    def stages(self) -> list[Stage]:
        files = (self.folder / "timeline").rglob("*.jsonl")
        return [stage for file in files for stage in decode(file.read_bytes())]

    def tracks(self) -> dict[str, Track]:
        return {track.role: track for track in tracks_of(self.stages(), 0)}

    def names(self, role: str) -> list[str]:
        return [span.name for span in self.tracks()[role].spans]


@pytest.fixture
def job(tmp_path: Path) -> ProgramFolder:
    found = ProgramFolder(tmp_path)
    found.write("large/__init__.py", "import time; time.sleep(0.15); from . import part")
    found.write("large/part.py", "import time; time.sleep(0.05)")
    return found
