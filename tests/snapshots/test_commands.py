import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from bootseer.snapshots.commands import hints_of


def told(
    python_words: tuple[str, ...] = (), environment_dirs: tuple[str, ...] = (), **others: object
) -> dict[str, object]:
    """Return the names and values of the variables, without empty ones."""
    words = {"python_words": python_words, "environment_dirs": environment_dirs, **others}
    return {name: value for name, value in words.items() if value}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["pip", "install", "-r", "requirements.txt"],
            told(
                ("pip",),
                files=("requirements.txt",),
                uses_pip=True,
                requirement_files=("requirements.txt",),
                indexed_files=("requirements.txt",),
                tools=("pip",),
            ),
        ),
        (
            [
                "python3",
                "-m",
                "pip",
                "install",
                "--no-index",
                "--find-links=wheels",
                "a",
                "./b.whl",
            ],
            told(
                ("python3",),
                files=("a", "./b.whl"),
                link_dirs=("wheels",),
                uses_pip=True,
                tools=("pip",),
            ),
        ),
        (
            ["pip", "install", "--target", "/opt/x", "-cconstraints.txt", "a==1"],
            told(
                ("pip",),
                install_dirs=("/opt/x",),
                files=("constraints.txt", "a==1"),
                requirement_files=("constraints.txt",),
                requirements=("a==1",),
                tools=("pip",),
            ),
        ),
        (["python3", "-m", "venv", "--prompt", "p", "env"], told(("python3",), ("env",))),
        (["virtualenv", "-p", "python3.12", "env"], told(("python3.12",), ("env",))),
        (
            ["sh", "-c", "python3 -m venv /e && /e/bin/pip install -r r.txt"],
            told(
                ("python3", "/e/bin/pip"),
                ("/e",),
                files=("r.txt",),
                uses_pip=True,
                requirement_files=("r.txt",),
                indexed_files=("r.txt",),
                tools=("pip",),
            ),
        ),
        (
            ["bash", "-ec", ". env/bin/activate; X=1 pip install a"],
            told(
                ("pip",),
                ("env",),
                files=("a",),
                uses_pip=True,
                requirements=("a",),
                tools=("pip",),
                words=("1",),
            ),
        ),
        (
            ["bash", "setup.sh", "x"],
            told(files=("setup.sh",), scripts=("setup.sh",), words=("x",)),
        ),
        (
            ["uv", "pip", "install", "a"],
            told(
                ("python3",),
                files=("a",),
                uses_pip=True,
                uses_uv=True,
                requirements=("a",),
                tools=("uv",),
            ),
        ),
        (
            ["conda", "env", "create", "-p", "/c", "-f", "environment.yml"],
            told(
                environment_dirs=("/c",),
                files=("environment.yml",),
                spec_files=("environment.yml",),
                tools=("conda",),
            ),
        ),
        (
            ["pip", "install", "--user", "a"],
            told(
                ("pip",),
                files=("a",),
                uses_pip=True,
                uses_user_site=True,
                requirements=("a",),
                tools=("pip",),
            ),
        ),
    ],
)
def test_what_a_command_hints_at(command: list[str], expected: dict[str, object]) -> None:
    found = asdict(hints_of(command))
    # Everything else is empty.
    assert {name: value for name, value in found.items() if value} == expected


def test_redirections_are_no_words() -> None:
    script = "pip install 'a<2' -r r.txt > log 2> r.log && ./more.sh x"
    found = hints_of(["sh", "-c", script])
    assert found.files == ("r.txt", "a<2", "./more.sh")
    assert not {"log", "r.log", "2"}.intersection(found.words)


@pytest.mark.parametrize(
    "command",
    [
        "/job/x.sh",
        "source /job/x.sh",
        ". /job/x.sh",
        "bash -eux /job/x.sh",
        "bash -euxo pipefail /job/x.sh a",
        "sh -o errexit -- /job/x.sh",
        "bash --norc --rcfile rc /job/x.sh",
        "sudo -u me -E /job/x.sh",
        "timeout -k 5 10m /job/x.sh",
        "nice -n 10 /job/x.sh",
        "ionice -c 3 nice /job/x.sh",
        "env -u X A=b /job/x.sh",
        "nohup stdbuf -oL /job/x.sh > log 2>&1 &",
        "exec time -p /job/x.sh",
        "cat list | xargs -n 1 /job/x.sh",
        "flock /lock /job/x.sh",
        "flock /lock -c '/job/x.sh a'",
        "su - me -c '/job/x.sh'",
        "if true; then /job/x.sh; fi",
        "while /job/x.sh; do sleep 1; done",
        "eval /job/x.sh",
        "# why\n/job/x.sh",
        "true # why\n/job/x.sh",
        "cd /elsewhere; /job/x.sh",
        "uv run /job/x.sh",
        "srun -N 1 --ntasks=1 /job/x.sh",
    ],
)
def test_scripts_are_found_behind_what_runs_them(command: str) -> None:
    """Regression: a script was in the key only as the first word, with "./" in front."""
    is_plain = not any(letter in command for letter in ";|&#\n")
    for words in (["sh", "-c", command], *([shlex.split(command)] if is_plain else [])):
        found = hints_of(words)
        assert "/job/x.sh" in found.files, words
        assert "/job/x.sh" in (*found.scripts, *found.programs), words


def test_files_that_commands_read_are_found() -> None:
    script = """
        fetch() { true; }
        fetch
        cp a.cfg b.cfg /opt/env/
        tar -xzf wheels.tar.gz -C /opt
        xargs pip install < list.txt
        pip install $(cat more.txt)
        cd sub; pip install -r r.txt
    """
    found = hints_of(["sh", "-c", script])
    named = {*found.files, *found.words}
    assert {"a.cfg", "b.cfg", "wheels.tar.gz", "list.txt", "more.txt"} <= named
    # The "cd" may belong to another command.
    assert {"r.txt", "sub/r.txt"} <= set(found.requirement_files)
    assert found.programs == ()


@given(st.lists(st.text(max_size=20), max_size=6))
def test_nothing_makes_it_fail(words: list[str]) -> None:
    hints_of(words)
    hints_of(["sh", "-c", " ".join(words)])
