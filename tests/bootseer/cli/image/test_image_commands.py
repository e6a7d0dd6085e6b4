"""`bootseer image index`, `list`, `show` and `ls`: output, and one sentence and code per error."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.prefetch.index.catalogue import image_key
from bootseer.store import TEST_NETWORK, open_store
from testbed.images.building import NASTY, Member, digest, tar_of, write_layout
from testbed.needs import MissingError, require
from testbed.waiting import wait_for
from tests.support.images.indexed import unsigned
from tests.support.images.pulled import note_store

RUN = {"Env": ["A=1"], "Cmd": ["python"]}


class Cli:
    """Runner of the command line in a process, as a user would run it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = directory / "store"
        # None of the caller's own settings.
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("BOOTSEER_")}
        self.environ |= {
            "HOME": str(directory),
            "BOOTSEER_STORE": str(self.store),
            "BOOTSEER_CACHE_DIR": str(directory / "cache"),
        }

    def run(
        self,
        *arguments: str | Path,
        code: int = 0,
        prefix: tuple[str, ...] = (),
        group: tuple[str, ...] = ("image",),
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*prefix, sys.executable, "-m", "bootseer", *group, *map(str, arguments)],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            env=self.environ,
            cwd=self.directory,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def fails(self, code: int, *arguments: str | Path, prefix: tuple[str, ...] = ()) -> str:
        """Return the one line of an error, after the note that a store is new."""
        done = self.run(*arguments, code=code, prefix=prefix)
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        if lines[0].startswith("bootseer: a new store begins in "):
            del lines[0]
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("bootseer: ")
        return lines[0]


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    write_layout(tmp_path / "layout", NASTY, compression="gzip", tag="v1", run=RUN)
    return tmp_path / "layout"


def test_index_list_show_ls(cli: Cli, layout: Path) -> None:
    done = cli.run("index", layout)
    assert done.stdout.startswith("sha256:")
    assert "0 of 3 layers" in done.stderr
    again = json.loads(cli.run("index", layout, "--name", "train:v1", "--json").stdout)
    assert (again["layers_reused"], again["layers_written"], again["bytes_written"]) == (3, 0, 0)
    assert again["reference"] == "train:v1"
    assert again["index_digest"] == done.stdout.strip()
    assert again["files"] > 30
    assert again["seconds"] >= 0

    listed = json.loads(cli.run("list", "--json").stdout)
    assert [entry["reference"] for entry in listed] == ["layout:v1", "train:v1"]
    assert "train:v1" in cli.run("list").stdout

    shown = json.loads(cli.run("show", "train:v1", "--json").stdout)
    assert shown["config"]["cmd"] == ["python"]
    assert [layer["digest"] for layer in shown["layers"]] == [digest(tar_of(m)) for m in NASTY]
    assert {k: shown[k] for k in listed[1]} == listed[1]
    table = cli.run("show", shown["index_digest"][:20]).stdout
    assert "A=1" in table

    assert "tool-link" in cli.run("ls", "train:v1", "/bin").stdout
    entries = json.loads(cli.run("ls", "train:v1", "bin/", "--json").stdout)
    assert {entry["name"]: entry["mode"] for entry in entries} == {
        "tool": "-rwxr-xr-x",
        "tool-link": "-rwsr-xr-x",
    }
    (entry,) = json.loads(cli.run("ls", "train:v1", "long/link", "--json").stdout)
    assert entry["target"].endswith("/end")


def test_names_that_are_not_text(cli: Cli, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [[Member("caf\udce9", data=b"x")]])
    cli.run("index", "layout")
    assert "caf\udce9" in cli.run("ls", "layout:latest").stdout
    assert "caf" in cli.run("ls", "layout", "--json").stdout


def test_an_empty_store(cli: Cli) -> None:
    assert json.loads(cli.run("list", "--json").stdout) == []
    cli.run("list")


def test_every_command_has_an_example(cli: Cli) -> None:
    for command in ("index", "list", "show", "ls"):
        assert "Example: bootseer image" in cli.run(command, "--help").stdout


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def biggest_blob(layout: Path) -> Path:
    return max(layout.glob("blobs/sha256/*"), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize(
    ("break_it", "source", "code", "message"),
    [
        (lambda layout: None, "absent", 10, "absent"),
        (lambda layout: None, "oci:layout:v2", 10, "'v2'"),
        (lambda layout: None, "layout/index.json", 2, "not an image archive"),
        (lambda layout: None, "s3://bucket/image", 2, "s3://"),
        (lambda layout: flip(biggest_blob(layout)), "layout", 15, "layer sha256:"),
        (lambda layout: biggest_blob(layout).unlink(), "layout", 10, "No such file"),
        (lambda layout: (layout / "index.json").write_text("{"), "layout", 15, "index.json"),
        (
            lambda layout: (layout / "index.json").write_text('{"schemaVersion": 3}'),
            "layout",
            16,
            "version 3",
        ),
    ],
)
def test_what_cannot_be_indexed(
    break_it: Callable[[Path], object],
    source: str,
    code: int,
    message: str,
    cli: Cli,
    layout: Path,
) -> None:
    break_it(layout)
    assert message in cli.fails(code, "index", source)


def test_a_name_that_is_none(cli: Cli, layout: Path) -> None:
    assert "name an image" in cli.fails(2, "index", layout, "--name", "a b")
    assert "name an image" in cli.fails(2, "show", "../x")


def test_no_docker_engine(cli: Cli) -> None:
    cli.environ["DOCKER_HOST"] = f"unix://{cli.directory}/absent.sock"
    assert "docker save" in cli.fails(17, "index", "docker://tool:1")


def test_an_image_or_file_that_is_not_there(cli: Cli, layout: Path) -> None:
    assert "image list" in cli.fails(10, "show", "absent")
    cli.run("index", layout)
    assert "no file" in cli.fails(10, "ls", "layout:v1", "bin/absent")


def test_records_that_cannot_be_read(cli: Cli, layout: Path) -> None:
    cli.run("index", layout)
    key = image_key("layout:v1")
    with open_store(str(cli.store)) as store:
        record = store.read(key)
        later = json.dumps({**unsigned(record), "version": 7}).encode()
        store.publish(key, later, replace=True)
        assert "version 7" in cli.fails(16, "show", "layout:v1")
        assert "version 7" in cli.fails(16, "list")
        store.publish(key, record.replace(b'"version": 1', b'"version": 7'), replace=True)
        assert "checksum" in cli.fails(15, "show", "layout:v1")
        store.publish(key, record[:-10], replace=True)
        assert "JSON" in cli.fails(15, "show", "layout:v1")
        store.publish(key, record, replace=True)
        (index,) = [
            info.path
            for info in store.list("indexes/")
            if info.path.rpartition("/")[2] in record.decode()
        ]
        store.publish(index, b"damaged", replace=True)
        assert "digest" in cli.fails(15, "ls", "layout:v1")


def test_a_source_that_may_not_be_read(cli: Cli, layout: Path) -> None:
    (layout / "index.json").chmod(0)
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        # Root without the capabilities that make it root.
        require(programs=["setpriv"])
        lost = "-dac_override,-dac_read_search"
        prefix = ("setpriv", f"--inh-caps={lost}", f"--bounding-set={lost}")
    assert "Permission denied" in cli.fails(12, "index", layout, prefix=prefix)


def test_an_interrupted_index_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [[Member("x", data=os.urandom(4_000_000))]] * 3)
    cli.environ[TEST_NETWORK] = os.environ[TEST_NETWORK]
    cli.environ["BOOTSEER_STORE"] = f"limit+file://{cli.store}?stream_bytes_per_s=1000000"
    child = subprocess.Popen(
        [sys.executable, "-m", "bootseer", "image", "index", "layout"],
        env=cli.environ,
        cwd=cli.directory,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: list(cli.store.glob(".tmp/*")), "a temporary file", interval_s=0.01)
        child.send_signal(signal.SIGINT)
        _, message = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 130
    assert message.strip() == "bootseer: interrupted"
    with open_store(str(cli.store)) as store:
        assert list(store.list()) == []
    assert list(cli.store.glob(".tmp/*")) == []
    assert list((cli.directory / "cache/tmp").iterdir()) == []


@pytest.mark.needs("root", "mount")
def test_a_full_store_has_an_exit_code_of_its_own(cli: Cli, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", [[Member("x", data=os.urandom(3_000_000))]])
    cli.store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(cli.store)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        raise MissingError("cannot mount a tmpfs here")
    try:
        # Before it says that a new store begins there.
        assert "No space left" in cli.run("index", "layout", code=13).stderr
    finally:
        subprocess.run(["umount", "-l", str(cli.store)], check=False)


def test_a_source_is_warmed_and_indexed_in_the_background(cli: Cli) -> None:
    write_layout(cli.directory / "image", NASTY)
    source = f"oci:{cli.directory}/image:latest"
    done = cli.run("fetch", source)
    assert "pulling it whole" in done.stderr
    cli.run("status", "--wait", "60", group=())
    (record,) = json.loads(cli.run("list", "--json").stdout)
    assert record["reference"] == "image:latest"
    # Whole on this node, which then needs neither source nor store.
    shutil.rmtree(cli.directory / "image")
    cli.environ["BOOTSEER_STORE"] = "hdfs://127.0.0.1:9/store"
    cli.environ["BOOTSEER_DEADLINE"] = "1"
    note_store(Path(cli.environ["BOOTSEER_CACHE_DIR"]), cli.environ["BOOTSEER_STORE"])
    done = cli.run("fetch", "image:latest")
    assert done.stderr.count("warning") == 1, done.stderr


def test_what_this_node_pulled_is_not_fetched_once_another_has_published_it(cli: Cli) -> None:
    write_layout(cli.directory / "image", NASTY)
    source = f"oci:{cli.directory}/image:latest"
    first, second = cli.environ["BOOTSEER_CACHE_DIR"], cli.directory / "second"
    cli.environ |= {"BOOTSEER_CACHE_DIR": str(second), "BOOTSEER_AUTO_INDEX": "off"}
    cli.run("fetch", source)
    cli.environ |= {"BOOTSEER_CACHE_DIR": first, "BOOTSEER_AUTO_INDEX": "on"}
    cli.run("fetch", source)
    cli.run("status", "--wait", "60", group=())
    cli.environ["BOOTSEER_CACHE_DIR"] = str(second)
    done = cli.run("fetch", source)
    assert "pulling" not in done.stderr
    assert [path for path in second.rglob("frames-*") if path.is_dir()] == []
