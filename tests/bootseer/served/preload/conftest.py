"""A start with a preloader and a record of imports, and programs that its launcher starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from testbed.waiting import polling

# This process stays, as the launcher does that `bootseer run` becomes.
LAUNCHER = """
import json, os, sys
from bootseer.served.preload import launching
from bootseer.profile.collect import recording_environment
from bootseer.settings.config import load_settings

settings = load_settings()
environ = recording_environment(os.environ)
folders = launching.make_preloaders(settings)
command = tuple(json.loads(sys.argv[1]))
added, _ = launching.begin_preloaders(settings, folders, environ, command)
print(json.dumps({**environ, **added}), flush=True)
sys.stdin.read()
"""


def places(folder: Path, libraries: str = "lib") -> dict[str, str]:
    """Return the variables that put every folder of Bootseer and Python's user into `folder`."""
    names = {"TIMELINE_DIR": "timeline", "STORE": "store", "CACHE_DIR": "cache", "RUN_DIR": "run"}
    return {
        "PYTHONPATH": str(folder / libraries),
        "PYTHONUSERBASE": str(folder),
        **{f"BOOTSEER_{name}": str(folder / place) for name, place in names.items()},
    }


class PreloadingNode:
    """Folder with modules and programs, a record of imports, and a launcher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ: dict[str, str] = {}
        self._launcher: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[str]] = []
        (folder / "cache" / "preload").mkdir(parents=True, mode=0o700)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def begin(
        self,
        *modules: str,
        words: tuple[str, ...] = ("-u", "program.py"),
        extra: Mapping[str, str] | None = None,
        varying: tuple[str, ...] = (),
        changed: Mapping[str, str] | None = None,
        launcher: Mapping[str, str] | None = None,
    ) -> None:
        """Begin the preloader of a start; the job's last start imported `modules`."""
        record = {
            "version": 1,
            "executable": sys.executable,
            "words": words,
            "arguments": ["as long as what is started now"],
            "extra": extra or {},
            "varying": varying,
            "missing": [],
            "salt": "salt",
            "changed": changed or {},
            "modules": modules,
        }
        (self.folder / "cache/preload/j.json").write_text(json.dumps(record), encoding="utf-8")
        names = ("BOOTSEER_PRELOAD", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
        environ = {name: value for name, value in os.environ.items() if name not in names}
        self._launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, json.dumps([sys.executable, *words])],
            env={
                **environ,
                **places(self.folder, "modules"),
                "BOOTSEER_JOB": "j",
                **(launcher or {}),
            },
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._launcher.stdout is not None
        self.environ = json.loads(self._launcher.stdout.readline())

    @property
    def run_folder(self) -> Path:
        return Path(self.environ["BOOTSEER_PRELOAD"])

    @property
    def preloader(self) -> int:
        """Return the preloader's process id."""
        for _ in polling():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    words = Path("/proc", pid, "cmdline").read_bytes()
                    environ = Path("/proc", pid, "environ").read_bytes()
                except OSError:
                    continue
                is_one = words.startswith(b"bootseer preload\0j")
                if is_one and os.fsencode(self.run_folder) in environ:
                    return int(pid)
        raise AssertionError(f"there is no preloader: {self.log()}")

    def log(self) -> str:
        files = (self.folder / "run/logs").glob("preload-*")
        return "\n".join(file.read_text(encoding="utf-8") for file in files)

    def start(
        self, *words: str, ordinarily: bool = False, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a worker as torchrun does."""
        program = sys.executable if ordinarily else str(self.run_folder / "python")
        variables = options.pop("env", {})
        name = "BOOTSEER_PRELOAD_PYTHON"
        base = {key: value for key, value in self.environ.items() if key != name}
        ours = {} if ordinarily else {name: sys.executable}
        process = subprocess.Popen(
            [program, *(words or ("-u", "program.py"))],
            env={**base, **ours, **variables},
            cwd=options.pop("cwd", self.folder),
            start_new_session=options.pop("start_new_session", True),
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=options.pop("stdout", subprocess.PIPE),
            stderr=options.pop("stderr", subprocess.PIPE),
            text=True,
            **options,
        )
        self._started.append(process)
        return process

    def run(
        self, *words: str, ordinarily: bool = False, **options: Any
    ) -> "subprocess.CompletedProcess[str]":
        process = self.start(*words, ordinarily=ordinarily, **options)
        try:
            output, errors = process.communicate(timeout=120)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(words, process.returncode, output, errors)

    def end(self) -> None:
        """End the launcher, and all processes that it started."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self._started.clear()
        self.end_launcher()

    def end_launcher(self) -> None:
        if self._launcher is not None:
            self._launcher.communicate("", timeout=60)
            self._launcher = None

    def kill_preloader(self) -> None:
        os.kill(self.preloader, signal.SIGKILL)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[PreloadingNode]:
    found = PreloadingNode(tmp_path)
    yield found
    found.end()
