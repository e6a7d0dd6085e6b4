"""`run_setup`: hits and misses, the parts of a key, and targets of all kinds."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from bootseer.errors import InvalidInputError, NotFoundError
from bootseer.snapshots import catalogue
from bootseer.snapshots.environment import run_setup
from bootseer.snapshots.key import SetupRequest
from bootseer.store import open_store
from testbed.needs import MissingError
from testbed.trees import describe, differences, make_zoo
from tests.snapshots.conftest import MakeNode
from tests.snapshots.support.counted import counted_request, rooted, rooted_runner, runs


def test_miss_in_place_restore(tmp_path: Path, make_node: MakeNode) -> None:
    request = counted_request(tmp_path)
    first = run_setup(make_node("a"), request)
    assert (first.how, first.hit, runs(tmp_path)) == ("captured", False, 1)
    again = run_setup(make_node("a"), request)
    assert (again.how, again.hit, runs(tmp_path)) == ("in place", True, 1)
    original = describe(tmp_path / "env")
    shutil.rmtree(tmp_path / "env")
    other = run_setup(make_node("b"), request)
    assert (other.how, other.hit, runs(tmp_path)) == ("restored", True, 1)
    assert other.fingerprint == first.fingerprint == again.fingerprint
    assert differences(original, describe(tmp_path / "env")) == []


def test_a_touched_target_is_not_in_place(tmp_path: Path, make_node: MakeNode) -> None:
    request = counted_request(tmp_path)
    run_setup(make_node("a"), request)
    (tmp_path / "env/file").write_text("edited")
    assert run_setup(make_node("a"), request).how == "captured"
    assert (tmp_path / "env/file").read_text() == "Linux\n"
    assert runs(tmp_path) == 2


def test_a_forged_time_is_noticed(tmp_path: Path, make_node: MakeNode) -> None:
    request = counted_request(tmp_path)
    run_setup(make_node("a"), request)
    file = tmp_path / "env/file"
    info = file.stat()
    file.write_text("HELLO\n")
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    assert run_setup(make_node("a"), request).how == "captured"
    assert file.read_text() == "Linux\n"


def test_a_restored_zoo_is_in_place_until_it_is_touched(
    tmp_path: Path, make_node: MakeNode
) -> None:
    zoo, target = tmp_path / "zoo", tmp_path / "env"
    make_zoo(zoo)
    cache = zoo / "package/__pycache__"
    cache.mkdir(parents=True)
    (cache / "module.cpython-311.pyc").write_bytes(b"bytecode")
    (cache / "other").write_bytes(b"x")
    request = SetupRequest(command=["cp", "-a", str(zoo), str(target)], targets=[str(target)])
    run_setup(make_node("a"), request)
    shutil.rmtree(target)
    node = make_node("b")
    result = run_setup(node, request)
    assert (result.how, result.mode) == ("restored", "extract")
    assert run_setup(node, request).how == "in place"
    (target / "package/__pycache__/module.cpython-311.pyc").unlink()
    (target / "package/__pycache__/module.cpython-311.pyc").write_bytes(b"newer bytecode")
    assert run_setup(node, request).how == "in place"
    (target / "package/__pycache__/other").touch()
    assert run_setup(node, request).how != "in place"


def test_a_changed_mode_of_a_directory_is_noticed(tmp_path: Path, make_node: MakeNode) -> None:
    request = counted_request(tmp_path)
    run_setup(make_node("a"), request)
    (tmp_path / "env").chmod(0o711)
    assert run_setup(make_node("a"), request).how == "captured"


def test_a_file_from_after_2262(tmp_path: Path, make_node: MakeNode) -> None:
    """Regression: a time beyond 64 bits of nanoseconds ended the command."""
    file = tmp_path / "env/file"
    text = f"mkdir {file.parent}; touch -d @9300000000 {file}"
    request = SetupRequest(command=["sh", "-ec", text], targets=[str(file.parent)])
    assert run_setup(make_node("a"), request).how == "captured"
    if file.stat().st_mtime_ns < 2**63:
        raise MissingError("this file system has no times after 2262")
    assert run_setup(make_node("a"), request).how == "in place"


def test_what_changes_the_key(tmp_path: Path, make_node: MakeNode) -> None:
    (tmp_path / "input").write_text("1")
    node = make_node("a")
    environ = {**os.environ, "CUDA": "12"}
    base = counted_request(
        tmp_path, inputs=[str(tmp_path / "input")], variables=["CUDA"], environ=environ
    )
    keys = set()

    def run(request: SetupRequest) -> None:
        shutil.rmtree(tmp_path / "env", ignore_errors=True)
        result = run_setup(node, request)
        assert result.how == "captured"
        keys.add(result.fingerprint)

    run(base)
    run(replace(base, salt="x"))
    run(replace(base, base="sha256:123"))
    run(replace(base, environ={**environ, "CUDA": "13"}))
    run(replace(base, environ={**environ, "PIP_INDEX_URL": "https://other/simple"}))
    (tmp_path / "input").write_text("2")
    run(base)
    assert len(keys) == 6


def test_requirement_files_are_inputs(tmp_path: Path, make_node: MakeNode) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.txt").write_text("-r more/inner.txt\n")
    (tmp_path / "more/inner.txt").write_text("-c pins.txt\na\n")
    (tmp_path / "more/pins.txt").write_text("a==1\n")
    said: list[str] = []
    request = SetupRequest(
        # pip is only a word of the command here, which runs `true`.
        command=["sh", "-c", "true || pip install -r requirements.txt; mkdir env"],
        targets=["env"],
        directory=str(tmp_path),
    )
    first = run_setup(make_node("a"), request, report=said.append)
    assert "requirements.txt, more/inner.txt, more/pins.txt" in " ".join(said)
    (tmp_path / "env").rmdir()
    (tmp_path / "more/pins.txt").write_text("a==2\n")
    second = run_setup(make_node("a"), request)
    assert first.how == second.how == "captured"
    assert first.fingerprint != second.fingerprint


def test_the_output_of_the_command_stays_off_stdout(
    tmp_path: Path, make_node: MakeNode, capfd: pytest.CaptureFixture[str]
) -> None:
    run_setup(make_node("a"), counted_request(tmp_path, "echo out; echo err >&2"))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.split() == ["out", "err"]


def test_targets_that_do_not_appear(tmp_path: Path, make_node: MakeNode) -> None:
    said: list[str] = []
    request = SetupRequest(command=["true"], targets=[str(tmp_path / "env")])
    result = run_setup(make_node("a"), request, report=said.append)
    assert result.how == "ran"
    assert "warning: the set-up ran but was not stored" in said[-1]


def test_declarations_that_cannot_be_used(tmp_path: Path, make_node: MakeNode) -> None:
    node = make_node("a")
    with pytest.raises(NotFoundError, match="missing"):
        run_setup(node, counted_request(tmp_path, inputs=[str(tmp_path / "missing")]))
    for targets in (["/"], [""], ["a\0b"]):
        with pytest.raises(InvalidInputError):
            run_setup(node, SetupRequest(command=["true"], targets=targets, directory="/"))
    with pytest.raises(InvalidInputError):
        run_setup(node, SetupRequest(command=[]))
    assert runs(tmp_path) == 0


def test_targets_that_cannot_be_inferred(tmp_path: Path, make_node: MakeNode) -> None:
    said: list[str] = []
    request = SetupRequest(command=["touch", str(tmp_path / "x")], directory=str(tmp_path))
    assert run_setup(make_node("a"), request, report=said.append).how == "ran"
    assert "--target" in said[0]


def test_a_root_cannot_be_left(tmp_path: Path, make_node: MakeNode) -> None:
    """Links of the image that point out of its root are followed as in the container."""
    (tmp_path / "outside").mkdir()
    for name in ("a", "b"):
        request = rooted(tmp_path, name, "rm $ROOT/opt/env/file; echo in > $ROOT/real/x")
        root = request.root
        (root / "real").mkdir()
        (root / "links").symlink_to("/../../../links2")
        (root / "links2").symlink_to(f"../../../../..{tmp_path}/outside/../../real")
        inside = root / str(tmp_path).lstrip("/")
        inside.mkdir(parents=True)
        (inside / "outside").mkdir()
        (inside.parent / "real").symlink_to("/real")
        result = run_setup(make_node(name), replace(request, targets=["/links", "/opt/env"]))
        assert (root / "real/x").read_text() == "in\n"
        assert result.how == ("captured" if name == "a" else "restored")
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.needs("root", "mount")
def test_an_overlay_root(tmp_path: Path, make_node: MakeNode) -> None:
    """In a container's root, lower directories cannot be renamed, and files are copied up."""
    lower = tmp_path / "lower"
    for folder in ("lib/pkg/old", "lib/pkg2"):
        (lower / "usr" / folder).mkdir(parents=True)
    for name in ("lib/pkg/a.py", "lib/pkg/old/b.py", "lib/pkg2/c.py", "lib/kept.py"):
        (lower / "usr" / name).write_text(name)
    trees = []
    for name in ("a", "b"):
        upper, work, merged = (tmp_path / name / part for part in ("upper", "work", "merged"))
        for layer in (upper, work, merged):
            layer.mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        command = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            raise MissingError("overlayfs cannot be mounted here")
        try:
            text = (
                f"echo run >> {tmp_path}/runs; cd $ROOT/usr/lib; rm pkg/a.py; rm -r pkg/old; "
                "mkdir pkg/old pkg/new; echo 1 > pkg/old/fresh; echo 2 > pkg/new/x; "
                "rm -r pkg2; echo now a file > pkg2; chmod 600 kept.py; mkdir -p $ROOT/opt/venv; "
                "echo 3 > $ROOT/opt/venv/y"
            )
            request = SetupRequest(
                command=["sh", "-e", "-c", text],
                targets=["/usr/lib", "/opt/venv"],
                root=merged,
                runner=rooted_runner(merged),
            )
            result = run_setup(make_node(name), request)
            assert result.how == ("captured" if name == "a" else "restored")
            trees.append((describe(merged / "usr/lib"), describe(merged / "opt/venv")))
        finally:
            subprocess.run(["umount", "-l", str(merged)], check=False)
    assert differences(trees[0][0], trees[1][0]) == []
    assert differences(trees[0][1], trees[1][1]) == []
    assert runs(tmp_path) == 1
    assert (lower / "usr/lib/pkg/a.py").exists()


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
@pytest.mark.needs("root")
def test_a_mount_point_as_target(tmp_path: Path, make_node: MakeNode, kind: str) -> None:
    top = tmp_path / "with blank"
    target = top / "env"
    target.mkdir(parents=True)
    script = f"mkdir -p '{target}/sub'; echo x > '{target}/sub/x'"
    request = replace(
        counted_request(top, script),
        command=[
            "sh",
            "-e",
            "-c",
            f"echo >> {tmp_path}/runs; {script}; touch '{target}/file'; touch -d @1 '{target}'",
        ],
    )
    for name in ("a", "b"):
        (tmp_path / "sources" / name).mkdir(parents=True)
        mount = ["mount", "--bind", str(tmp_path / "sources" / name), str(target)]
        if kind == "tmpfs":
            mount = ["mount", "-t", "tmpfs", "tmpfs", str(target)]
        if subprocess.run(mount, check=False, capture_output=True).returncode:
            raise MissingError(f"{kind} cannot be mounted here")
        try:
            result = run_setup(make_node(name), request)
            assert result.how == ("captured" if name == "a" else "restored")
            assert (target / "sub/x").read_text() == "x\n"
            assert sorted(os.listdir(target)) == ["file", "sub"]
            # Regression: its time was that of the restore's last step.
            assert target.stat().st_mtime_ns == 1_000_000_000
        finally:
            subprocess.run(["umount", "-l", str(target)], check=False)
    assert runs(tmp_path) == 1


@pytest.mark.parametrize(
    ("what", "part", "values"),
    [
        ("version", "interpreter", ("3.11.1", "3.12.1")),
        # Regression: environments contain the path of their Python, which another node did not
        # have.
        ("base_prefix", "installation", ("/opt/one", "/opt/two")),
    ],
)
def test_the_interpreter_is_part_of_the_key(
    tmp_path: Path, make_node: MakeNode, what: str, part: str, values: tuple[str, str]
) -> None:
    """Two nodes with different Pythons in their PATH must not share an environment."""
    said = []
    for value in values:
        shutil.rmtree(tmp_path / "env", ignore_errors=True)
        folder = tmp_path / value.rpartition("/")[2]
        folder.mkdir()
        fake = folder / "python3"
        fake.write_text(
            f'#!/bin/sh\n{sys.executable} "$@" | sed \'s|"{what}": "[^"]*"|"{what}": "{value}"|\'\n'
        )
        fake.chmod(0o755)
        environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        result = run_setup(make_node("a"), counted_request(tmp_path, environ=environ))
        said.append(result.fingerprint)
        with open_store(make_node("a").store_url) as store:
            manifest = catalogue.find(store, result.fingerprint)
        assert value in {one.name: one.value for one in manifest.parts}[part]
    assert said[0] != said[1]


def test_a_launcher_that_chooses_another_interpreter_changes_the_key(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: the answer of pyenv's `python3` was kept while `pyenv global` chose another."""
    launcher = tmp_path / "shims/python3"
    launcher.parent.mkdir()
    chosen = tmp_path / "version"
    launcher.write_text(
        f"#!/bin/sh\nchosen=$(cat {chosen})\n"
        f'{sys.executable} "$@" | sed "s|\\"version\\": \\"[^\\"]*|\\"version\\": \\"$chosen|"\n'
    )
    launcher.chmod(0o755)
    environ = {**os.environ, "PATH": f"{launcher.parent}:{os.environ['PATH']}"}
    for runs_expected, version in enumerate(("3.11.1", "3.12.1"), 1):
        chosen.write_text(version)
        for _ in range(2):
            run_setup(make_node("a"), counted_request(tmp_path, environ=environ))
            assert runs(tmp_path) == runs_expected
        shutil.rmtree(tmp_path / "env")


@pytest.mark.parametrize("mode", ["extract", "link", "mount"])
def test_the_working_directory_as_target(
    tmp_path: Path, make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """A process whose working directory it is, such as an entrypoint's shell, sees the restored
    files."""
    request = counted_request(tmp_path, "mkdir sub; echo x > sub/file", directory=str(tmp_path))
    request = replace(request, command=[*request.command[:3], f"cd env; {request.command[3]}"])
    target = tmp_path / "env"
    target.mkdir()
    run_setup(make_node("a"), request)
    original = describe(target)
    shutil.rmtree(target)
    target.mkdir()
    monkeypatch.chdir(target)
    result = run_setup(replace(make_node("b"), restore_mode=mode), request)
    assert result.how == "restored"
    assert result.mode != "mount"
    assert sorted(os.listdir()) == ["file", "sub"]
    for tree in (original, now := describe(target)):
        for attributes in tree.values():
            attributes.pop("links", None)  # of what is linked, the node has another
    assert differences(original, now) == []


def test_a_miss_says_what_has_changed_and_a_capture_that_it_began(
    tmp_path: Path, make_node: MakeNode
) -> None:
    """Regression: users could not see why a set-up ran again, nor that a capture took minutes."""
    target, file = tmp_path / "env", tmp_path / "versions"
    request = SetupRequest(["cp", str(file), str(target)], targets=[str(target)])
    request = replace(request, command=["sh", "-ec", f"mkdir {target}; cp {file} {target}/"])
    said: list[str] = []
    for text in ("1", "2"):
        file.write_text(text)
        said.clear()
        assert run_setup(make_node("a"), request, report=said.append).how == "captured"
        shutil.rmtree(target)
    (sentence,) = (one for one in said if one.startswith("nearest is"))
    assert sentence.endswith(f"; it differs in input {file} (its contents have changed)")
    began = [i for i, one in enumerate(said) if f"capturing {target}" in one]
    ended = [i for i, one in enumerate(said) if one.startswith("stored snapshot")]
    assert len(began) == len(ended) == 1
    assert began < ended
    # A completely different environment is not compared.
    other = SetupRequest(["mkdir", str(tmp_path / "other")], targets=[str(tmp_path / "other")])
    said.clear()
    run_setup(make_node("a"), other, report=said.append)
    assert not [one for one in said if one.startswith("nearest is")]
