"""`bootseer run` with kept caches: from one node to the next, and back."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from bootseer.launch.caches.records import records
from bootseer.served.service import attendants
from testbed.node import Completed, Node, attribute, node_at
from testbed.users import folder_for_all_users, unprivileged
from testbed.waiting import wait_for
from tests.bootseer.launch.conftest import IMAGE_PATH, Image

COMPILES = """
import os, sys, json
from pathlib import Path
cache = Path(sys.argv[1] if len(sys.argv) > 1 else os.environ["TORCHINDUCTOR_CACHE_DIR"])
entry = cache / "3b" / ("c" * 52 + ".py")
hit = entry.exists()
if not hit:
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_text("compiled")
names = [one for one in os.environ if one.endswith(("_CACHE_DIR", "_EXTENSIONS_DIR"))]
print(json.dumps({"hit": hit, "set": sorted(set(names) - {"BOOTSEER_CACHE_DIR"})}))
"""
READY = "import bootseer; bootseer.ready(); import time; time.sleep(600)"


@pytest.fixture
def torch(tmp_path: Path) -> dict[str, str]:
    """Return a path of packages with a stand-in for torch."""
    packages = tmp_path / "packages"
    (packages / "torch-9.9.9.dist-info").mkdir(parents=True)
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{os.getcwd()}:{packages}"}


def said(done: Completed) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def compile_job(*options: str) -> list[str]:
    return [*options, "--", sys.executable, "-c", COMPILES]


def test_the_next_node_has_what_the_first_compiled(
    node: Node, tmp_path: Path, torch: dict[str, str]
) -> None:
    # The same path on each node, as in a cluster: it is part of the key.
    variables = {**torch, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    assert said(node.run("run", *compile_job(), variables=variables))["hit"] is False
    node.wait_clean()
    (tmp_path / "inductor").rename(tmp_path / "of the first node")
    with node_at(tmp_path / "second", node.store) as second:
        done = second.run("run", *compile_job(), variables=variables)
        assert said(done)["hit"] is True
        assert "restored the cache TORCHINDUCTOR_CACHE_DIR: 1 files" in done.stderr
        span = second.spans()["caches"]
        # Of two caches one was there.
        assert attribute(span, "bootseer.how") == "extracted, miss"
        assert attribute(span, "bootseer.files") == "1"
        second.wait_clean()


def test_a_folder_of_ours_is_named_and_private(node: Node, torch: dict[str, str]) -> None:
    result = said(node.run("run", *compile_job(), variables=torch))
    assert {"TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR"} <= set(result["set"])  # type: ignore[call-overload]
    folder = node.base / "cache/kept/folders"
    assert folder.stat().st_mode & 0o777 == 0o700
    node.wait_clean()
    # The node itself has the cache, whatever happens to the store.
    assert said(node.run("run", *compile_job(), variables=torch))["hit"] is True
    node.wait_clean()
    (record,) = (
        one for one in records(node.base / "cache") if one.name == "TORCHINDUCTOR_CACHE_DIR"
    )
    assert (record.hits, record.misses, record.new_files) == (1, 1, 1)


def test_a_launcher_of_interpreters_is_asked_once(node: Node, tmp_path: Path) -> None:
    """Regression: torch's packages were looked for beside the script, such as pyenv's."""
    python = tmp_path / "version/bin/python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    (tmp_path / "version/pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "version/lib" / version / "site-packages/torch-9.9.9.dist-info").mkdir(parents=True)
    launcher, asked = tmp_path / "shims/python", tmp_path / "asked"
    launcher.parent.mkdir()
    launcher.write_text(
        f'#!/bin/sh\ncase "$2" in *sysconfig*) echo >> {asked} ;; esac\nexec {python} "$@"\n'
    )
    launcher.chmod(0o755)
    set_up = tmp_path / "set-up.py"
    set_up.write_text("import pathlib; pathlib.Path('made').mkdir()")
    words = ["--setup", f"python {set_up}", "--target", "made", "--set", "restore_mode=extract"]
    variables = {"PATH": f"{launcher.parent}:/usr/bin:/bin"}
    # A set-up that has run may have made the launcher choose another interpreter.
    for questions in (2, 3):
        done = node.run("run", *words, "--", "python", "-c", COMPILES, variables=variables)
        assert "TORCHINDUCTOR_CACHE_DIR" in str(said(done)["set"])
        assert len(asked.read_text()) == questions
        node.wait_clean()


def test_nothing_is_set_where_nothing_is_to_be_kept(
    node: Node, tmp_path: Path, torch: dict[str, str]
) -> None:
    job = ["--set", "keep_caches=off", "--", sys.executable, "-c", COMPILES, str(tmp_path / "own")]
    assert said(node.run("run", *job, variables=torch))["set"] == []
    assert not (node.base / "cache/kept").exists()


def test_the_setting_switches_it_off(node: Node, tmp_path: Path, torch: dict[str, str]) -> None:
    job = ["--", sys.executable, "-c", COMPILES, str(tmp_path / "own")]
    assert (
        said(node.run("run", *job, variables={**torch, "BOOTSEER_KEEP_CACHES": "off"}))["set"] == []
    )


def test_a_directory_that_is_named_is_kept(node: Node, tmp_path: Path) -> None:
    folder = tmp_path / "some cache"
    job = ["--keep", str(folder), "--", sys.executable, "-c", COMPILES, str(folder)]
    assert said(node.run("run", *job))["hit"] is False
    node.wait_clean()
    folder.rename(tmp_path / "gone")
    with node_at(tmp_path / "second", node.store) as second:
        assert said(second.run("run", *job))["hit"] is True
        second.wait_clean()


def test_what_is_new_is_published_when_the_job_is_ready(
    node: Node, tmp_path: Path, torch: dict[str, str]
) -> None:
    """A scheduler that ends the job also ends processes that would publish later."""
    script = f"import sys; sys.argv[1:] = []\n{COMPILES}\n{READY}"
    variables = {**torch, "BOOTSEER_PUBLISH_TIMELINES": "on"}
    with node.start("run", "--", sys.executable, "-c", script, variables=variables) as job:
        # The background process is shown.
        wait_for(lambda: list(attendants(node.base / "run")), "the attendant")
        published = tmp_path / "store/snapshots"
        wait_for(lambda: any(published.glob("*.json")), "a generation")
        job.kill()
        job.communicate()
    node.wait_clean()
    wait_for(lambda: not list(attendants(node.base / "run")), "the attendant's end")


def test_what_could_not_be_published_is_tried_again(
    node: Node, tmp_path: Path, torch: dict[str, str]
) -> None:
    """The store fails when the job is ready, and works again when it ends."""
    in_the_way, go = tmp_path / "store/snapshots", tmp_path / "go"
    script = (
        f"import sys; sys.argv[1:] = []\n{COMPILES}\nfrom pathlib import Path\n"
        f"place = Path({str(in_the_way)!r})\nplace.parent.mkdir(exist_ok=True)\n"
        "place.write_text('')\nimport bootseer, time; bootseer.ready()\n"
        f"while not Path({str(go)!r}).exists(): time.sleep(.02)"
    )
    with node.start("run", "--", sys.executable, "-c", script, variables=torch) as job:
        logs = node.base / "run/logs"
        wait_for(
            lambda: any("not published" in one.read_text() for one in logs.glob("start-*.log")),
            "a failed look",
            timeout_s=240,
        )
        in_the_way.unlink()
        go.touch()
        assert job.wait(240) == 0
    node.wait_clean()
    assert any(in_the_way.glob("*.json"))


@pytest.mark.parametrize("folder", ["/", ""])
def test_a_folder_that_cannot_be_kept_is_a_usage_error(node: Node, folder: str) -> None:
    done = node.run("run", "--keep", folder, "--", "true")
    assert done.returncode == 2
    assert "target" in done.stderr


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_damaged_generation_is_one_warning_and_is_replaced(
    node: Node, tmp_path: Path, torch: dict[str, str], is_gone: bool
) -> None:
    variables = {**torch, "BOOTSEER_CACHE_DIR": str(tmp_path / "cache")}
    assert said(node.run("run", *compile_job(), variables=variables))["hit"] is False
    node.wait_clean()
    (blob,) = (path for path in (tmp_path / "store/blobs").rglob("*") if path.is_file())
    blob.chmod(0o600)
    if is_gone:
        blob.unlink()
    else:
        blob.write_bytes(bytes(255 - byte for byte in blob.read_bytes()))
    hits = []
    for number in (2, 3):
        shutil.rmtree(tmp_path / "cache")
        with node_at(tmp_path / f"node-{number}", node.store) as one:
            done = one.run("run", *compile_job(), variables=variables)
            hits.append(said(done)["hit"])
            assert done.stderr.count("warning:") == (number == 2), done.stderr
            one.wait_clean()
    assert hits == [False, True]


def test_a_killed_job_leaves_no_process_and_no_half_generation(
    node: Node, tmp_path: Path, torch: dict[str, str]
) -> None:
    with node.start("run", "--", sys.executable, "-c", READY, variables=torch) as job:
        wait_for(lambda: len(node.processes()) >= 2, "the keeper")
        job.kill()
        job.communicate()
    node.wait_clean()
    # Nothing was compiled, so nothing was written.
    assert not (tmp_path / "store/snapshots").exists()


def test_a_killed_keeper_costs_nothing_but_the_generation(
    node: Node, tmp_path: Path, torch: dict[str, str]
) -> None:
    began, wait = tmp_path / "began", tmp_path / "go"
    script = (
        f"import time; from pathlib import Path\nPath({str(began)!r}).touch()\n"
        f"while not Path({str(wait)!r}).exists(): time.sleep(.02)\n{COMPILES}"
    )
    with node.start("run", "--", sys.executable, "-c", script, variables=torch) as job:
        wait_for(began.exists, "the command")
        for pid in set(node.processes()) - {job.pid}:
            os.kill(pid, 9)
        wait.touch()
        out, err = job.communicate(timeout=60)
    assert (job.returncode, err) == (0, "")
    assert json.loads(out)["hit"] is False
    node.wait_clean()


def test_two_jobs_of_a_node_at_once(node: Node, torch: dict[str, str], tmp_path: Path) -> None:
    jobs = [node.start("run", *compile_job(), variables=torch) for _ in range(2)]
    for job in jobs:
        with job:
            out, err = job.communicate(timeout=60)
            assert (job.returncode, err) == (0, "")
            assert "hit" in json.loads(out)
    node.wait_clean()
    assert len(list((tmp_path / "store/snapshots").glob("*.json"))) == 1


def test_without_a_configured_store_the_node_keeps_its_own(
    node: Node, torch: dict[str, str]
) -> None:
    variables = {**torch, "BOOTSEER_STORE": ""}
    assert said(node.run("run", *compile_job(), variables=variables))["hit"] is False
    # No process behind the job, and no copy beside the folder.
    assert not (node.base / "run/logs").exists()
    assert not (node.base / ".local/share/bootseer/store").exists()
    assert said(node.run("run", *compile_job(), variables=variables))["hit"] is True


def test_a_store_that_is_silent_is_one_line_and_a_short_wait(
    node: Node, torch: dict[str, str]
) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"hdfs://127.0.0.1:{server.getsockname()[1]}/store"
        variables = {**torch, "BOOTSEER_STORE": url, "BOOTSEER_DEADLINE": "2"}
        done = node.run("run", *compile_job(), variables=variables)
    assert said(done)["hit"] is False
    # One wait for all caches, one warning.
    (line,) = done.stderr.splitlines()
    assert "warning: the kept cache TORCHINDUCTOR_CACHE_DIR is not used" in line
    node.sweep()


def test_a_folder_that_cannot_be_made_is_one_line(node: Node, torch: dict[str, str]) -> None:
    (node.base / "cache").mkdir()
    (node.base / "cache/kept").write_text("in the way")
    done = node.run("run", "--", sys.executable, "-c", "print('ran')", variables=torch)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert all("warning: the kept cache" in line for line in done.stderr.splitlines())
    node.wait_clean()


@pytest.mark.needs("mount", "fuse")
def test_in_an_image_the_user_of_the_image_writes(
    node: Node, known_image: Image, tmp_path: Path
) -> None:
    """The folder is the host's, so it outlives the container; its path there is fixed."""
    script = COMPILES.replace("TORCHINDUCTOR_CACHE_DIR", "X_CACHE_DIR")
    job = ("--image", known_image.source, "--keep", "/var/cache/x", "--")
    command = ("python3", "-c", script, "/var/cache/x")
    assert said(node.run("run", *job, *command))["hit"] is False
    node.wait_clean()
    with node_at(tmp_path / "second", node.store) as second:
        done = second.run("run", *job, *command)
        assert said(done)["hit"] is True, done.stderr
        second.wait_clean()


@pytest.mark.needs("mount", "fuse")
def test_in_an_image_with_torch_the_path_is_the_same_everywhere(
    node: Node, image_root: Path, tmp_path: Path
) -> None:
    """No option names a folder, and the image's user differs from ours."""
    shutil.copytree(image_root, tmp_path / "root", symlinks=True)
    (library,) = (tmp_path / "root").rglob("lib/python3.*/os.py")
    (library.parent / "site-packages/torch-9.9.9.dist-info").mkdir(parents=True)
    image = Image(tmp_path / "img", tmp_path / "root")
    image.build(User="worker", WorkingDir="/job", Env=[f"PATH={IMAGE_PATH}"])
    show = f"{COMPILES}\nprint(os.environ['TORCHINDUCTOR_CACHE_DIR'], os.getuid())"
    job = ("--image", image.source, "--", "python3", "-c", show)
    hits = []
    for number in (1, 2):
        with node_at(tmp_path / f"node-{number}", node.store) as one:
            done = one.run("run", *job)
            assert done.returncode == 0, done.stderr
            told, place = done.stdout.splitlines()
            assert place == "/run/bootseer/caches/torchinductor-cache-dir 1000"
            hits.append(json.loads(told)["hit"])
            one.wait_clean()
    assert hits == [False, True]


@pytest.mark.needs("fuse")
def test_in_an_image_without_root(image_root: Path) -> None:
    with folder_for_all_users() as base, node_at(base / "node", (base / "store").as_uri()) as node:
        prefix = unprivileged(node.base.parent)
        script = COMPILES.replace("TORCHINDUCTOR_CACHE_DIR", "X_CACHE_DIR")
        job = ("--image", image_root, "--keep", "/x", "--", "python3", "-c", script, "/x")
        hits = []
        for _ in range(2):
            hits.append(said(node.run("run", *job, prefix=prefix))["hit"])
            node.wait_clean()
        assert hits == [False, True]
