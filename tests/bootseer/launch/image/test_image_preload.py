"""`bootseer run --image --preload`: workers in a container are forked after their imports."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.served.preload.programs import read_record, read_refused, take_record
from testbed.node import Completed, Node, node_at
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import Image

LIBRARIES = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
SHOW = """
import json, os, sys
from pathlib import Path

def name_of(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()

def show(who, module):
    print(json.dumps({
        "who": who, "uid": os.getuid(), "cwd": os.getcwd(), "root": sorted(os.listdir("/")),
        "loaded": module in sys.modules, "parent": name_of(os.getppid()),
        "value": __import__(module).VALUE, "arguments": sys.argv[1:],
    }), flush=True)
"""
TRAIN = (
    SHOW
    + """
show("program", "large")
"""
)
# The parts of torch's launcher that the preloader looks at.
RUN = """
import os, subprocess, sys
import torch.distributed.launcher.api
sys.path.insert(0, "/source")
from show import show

show("launcher", "torch")
worker = subprocess.Popen(
    [os.getenv("PYTHON_EXEC", sys.executable), "-u", "/source/train.py"],
    env={**os.environ, "TORCHELASTIC_RUN_ID": "1", "LOCAL_RANK": "0"},
    start_new_session=True,
)
sys.exit(worker.wait())
"""


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a folder that the job sees as /source, also as Python's user base."""
    folder = tmp_path / "work"
    slow = "import time; time.sleep(0.15); VALUE = 5"
    files = {
        "train.py": TRAIN,
        "show.py": SHOW,
        f"{LIBRARIES}/large.py": slow,
        f"{LIBRARIES}/torch/__init__.py": slow,
        f"{LIBRARIES}/torch/distributed/__init__.py": "",
        f"{LIBRARIES}/torch/distributed/run.py": RUN,
        f"{LIBRARIES}/torch/distributed/launcher/__init__.py": "",
        f"{LIBRARIES}/torch/distributed/launcher/api.py": "",
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


class _Job:
    def __init__(self, node: Node, image: Image, work: Path) -> None:
        self.node = node
        self._options = ("--image", image.source, "--preload", "--bind", f"{work}:/source")

    def run(self, *command: str, options: tuple[str, ...] = ()) -> Completed:
        return self.node.run(
            *("run", *self._options, *options, "--", *command),
            variables={"PYTHONUSERBASE": "/source"},
            start_new_session=True,
        )

    def shown(self, *command: str, options: tuple[str, ...] = ()) -> list[dict[str, object]]:
        done = self.run(*command, options=options)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def record(self, name: str = "job") -> Path:
        return self.node.base / f"cache/preload/image/{name}.json"

    def interpreter(self, name: str = "job") -> str:
        """Return the interpreter of a record: a command of another name is another program."""
        wait_for(self.record(name).exists, "the record")
        return str(json.loads(self.record(name).read_text())["executable"])


@pytest.fixture
def job(node: Node, known_image: Image, work: Path) -> Iterator[_Job]:
    yield _Job(node, known_image, work)
    node.wait_clean()
    # What was recorded may be published a moment later.
    wait_for(lambda: not list(node.base.glob("run/services/*")), "the end of all services")


pytestmark = pytest.mark.needs("mount", "fuse")


def test_a_program_is_forked_in_its_container(job: _Job) -> None:
    command = ("-u", "/source/train.py", "a word")
    (first,) = job.shown("python3", *command)
    assert (first["loaded"], first["uid"], first["arguments"]) == (False, 1000, ["a word"])
    interpreter = job.interpreter()
    # Nobody else writes where the next start on the host would read.
    assert not (job.node.base / "cache/preload/job.json").exists()
    (second,) = job.shown(interpreter, *command)
    assert second == {**first, "parent": "bootseer-guard"}


def test_a_launcher_and_its_workers_are_forked_each_from_its_own(job: _Job) -> None:
    command = ("-m", "torch.distributed.run")
    first = job.shown("python3", *command)
    assert [one["who"] for one in first] == ["launcher", "program"]
    wait_for(job.record().exists, "the workers' record")
    second = job.shown(job.interpreter("job.launcher"), *command)
    assert second == [{**one, "parent": "bootseer-guard"} for one in first]


def test_another_node_imports_what_the_first_one_has(
    job: _Job, tmp_path: Path, known_image: Image, work: Path
) -> None:
    (tmp_path / "kept").mkdir()
    command = ("-u", "/source/train.py")
    job.shown("python3", *command, options=("--keep", str(tmp_path / "kept")))
    wait_for((tmp_path / "store/preload/image/job.json").exists, "the record in the store")
    with node_at(tmp_path / "second", job.node.store) as other:
        (shown,) = _Job(other, known_image, work).shown(job.interpreter(), *command)
        assert shown["parent"] == "bootseer-guard"
        other.wait_clean()


@pytest.mark.needs(programs=["runc"])
def test_runc_starts_a_program_ordinarily(job: _Job) -> None:
    # In a PID namespace of its own.
    done = job.run("python3", "-c", "print('ran')", options=("--runtime", "runc"))
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    line = "workers start without a preloader: --preload does not work with --runtime runc"
    assert done.stderr.count(line) == 1, done.stderr


def test_what_a_container_writes_is_taken_only_if_it_is_a_record(tmp_path: Path) -> None:
    good = {
        "version": 1,
        "arguments": [],
        "varying": [],
        "missing": [],
        "modules": [],
        "extra": {},
        "changed": {},
        "words": ["train.py"],
        "executable": "/usr/bin/python3",
        "salt": "",
    }
    source, kept = tmp_path / "record.json", tmp_path / "kept/job.json"
    source.write_text(json.dumps(good))
    (tmp_path / "record.refused.json").write_text('{"a": "starts a thread"}')
    take_record(source, kept)
    assert read_record(kept) == good
    assert json.loads(read_refused(kept)) == {"a": "starts a thread"}
    for number, text in enumerate(("[" * 100_000, "{}", json.dumps({**good, "words": 7}), "\xff")):
        source.write_text(text, encoding="latin-1")
        (tmp_path / "record.refused.json").write_text(text, encoding="latin-1")
        take_record(source, kept)
        assert read_record(kept) == good, number
    source.unlink()
    source.symlink_to("/etc/passwd")
    take_record(source, kept)
    source.unlink()
    os.mkfifo(source)
    take_record(source, kept)
    assert read_record(kept) == good
