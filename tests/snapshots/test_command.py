import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.snapshots.setup.command import Hints, hints_of, simple_commands


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            ["pip", "install", "-r", "requirements.txt"],
            Hints(("pip",), files=("requirements.txt",), uses_pip=True),
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
            Hints(("python3",), files=("a", "./b.whl"), link_dirs=("wheels",), uses_pip=True),
        ),
        (
            ["pip", "install", "--target", "/opt/x", "-cconstraints.txt", "a==1"],
            Hints(("pip",), install_dirs=("/opt/x",), files=("constraints.txt", "a==1")),
        ),
        (["python3", "-m", "venv", "--prompt", "p", "env"], Hints(("python3",), ("env",))),
        (["virtualenv", "-p", "python3.12", "env"], Hints(("python3.12",), ("env",))),
        (
            ["sh", "-c", "python3 -m venv /e && /e/bin/pip install -r r.txt"],
            Hints(("python3", "/e/bin/pip"), ("/e",), files=("r.txt",), uses_pip=True),
        ),
        (
            ["bash", "-ec", ". env/bin/activate; X=1 pip install a"],
            Hints(("pip",), ("env",), files=("a",), uses_pip=True),
        ),
        (["bash", "setup.sh", "x"], Hints(files=("setup.sh",))),
        (
            ["uv", "pip", "install", "a"],
            Hints(("python3",), files=("a",), uses_pip=True, uses_uv=True),
        ),
        (
            ["conda", "env", "create", "-p", "/c", "-f", "environment.yml"],
            Hints(environment_dirs=("/c",), files=("environment.yml",)),
        ),
        (
            ["pip", "install", "--user", "a"],
            Hints(("pip",), files=("a",), uses_pip=True, uses_user_site=True),
        ),
    ],
)
def test_what_a_command_hints_at(command: list[str], expected: Hints) -> None:
    assert hints_of(command) == expected


def test_redirections_are_no_words() -> None:
    script = "pip install 'a<2' -r r.txt > log && ./more.sh x"
    assert simple_commands(["sh", "-c", script]) == [
        ["pip", "install", "a<2", "-r", "r.txt"],
        ["./more.sh", "x"],
    ]
    assert hints_of(["sh", "-c", script]).files == ("r.txt", "a<2", "./more.sh")


def test_shells_inside_shells_are_read() -> None:
    assert simple_commands(["sh", "-c", "cd x; bash -c 'pip install a | tee log'"]) == [
        ["cd", "x"],
        ["pip", "install", "a"],
        ["tee", "log"],
    ]


@given(st.lists(st.text(max_size=20), max_size=6))
def test_nothing_makes_it_fail(words: list[str]) -> None:
    hints_of(words)
    hints_of(["sh", "-c", " ".join(words)])
