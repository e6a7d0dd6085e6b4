"""The examples of docs/checkpoints.md run."""

import importlib.util
import random
import re
from pathlib import Path
from typing import Any

import pytest

from bootseer.cli.command_tree import cli
from testbed.needs import MissingError
from tests.support.cli_reference import root_context

PAGE = (Path(__file__).parent.parent.parent / "docs/checkpoints.md").read_text(encoding="utf-8")


# torch warns that there is no process group.
@pytest.mark.filterwarnings("ignore")
def test_the_guides_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOTSEER_RUN_DIR", str(tmp_path / "run"))
    (tmp_path / "local").write_bytes(random.Random(0).randbytes(5 * 2**20))
    names: dict[str, Any] = {
        "local_file": tmp_path / "local",
        "local_copy": tmp_path / "copy",
        "print": lambda *values: None,
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 5
    left_out = set()
    for block in blocks:
        wanted = set(re.findall(r"\b(torch|safetensors)\b", block))
        missing = {name for name in wanted if importlib.util.find_spec(name) is None}
        if missing:
            left_out |= missing
            continue
        text = block.replace("hdfs://namenode", tmp_path.as_uri())
        exec(compile(text, "docs/checkpoints.md", "exec"), names)
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "local").read_bytes()
    if left_out:
        raise MissingError(
            f"not installed, so their recipes did not run: {', '.join(sorted(left_out))}"
        )


@pytest.mark.parametrize(
    "line", re.findall(r"^    bootseer (checkpoint (?!mount|unmount).*)$", PAGE, re.MULTILINE)
)
def test_the_guides_commands_exist(line: str) -> None:
    group, name, *arguments = line.split()
    context = root_context()
    checkpoint = cli.get_command(context, group)
    command = checkpoint.get_command(context, name)  # type: ignore[union-attr]
    assert command is not None
    command.make_context(name, arguments, parent=context)
