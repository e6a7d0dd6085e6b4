"""The files in docker/ use commands, options, settings and folders that exist."""

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.settings.config import Settings, variable_of
from testbed.containers.chart import objects, render
from tests.support.cli_reference import root_context

DOCKER = Path(__file__).parent.parent.parent / "docker"
UNITS = sorted((DOCKER / "systemd").iterdir())
MANIFESTS = sorted((DOCKER / "kubernetes").glob("*.yaml"))
# These variables are no settings.
OTHERS = {"BOOTSEER_CONFIG", "BOOTSEER_IMAGE", "BOOTSEER_SPAWNER"}
VARIABLES = {variable_of(name) for name in Settings.__struct_fields__}


def parse(words: list[str]) -> None:
    """Fail if bootseer has no such command or option."""
    ours = [*itertools.takewhile(lambda word: word != "--", words), "--help"]
    done = CliRunner().invoke(cli, ours)
    assert done.exit_code == 0, done.output


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield each call of bootseer in a line of shell."""
    for part in re.split(r"\|\||&&|;|\n", text):
        words = shlex.split(part)
        names = [number for number, word in enumerate(words) if Path(word).name == "bootseer"]
        if names:
            yield words[names[0] + 1 :]


def calls_in(node: Any) -> Iterator[list[str]]:
    """Yield each call of bootseer by a container."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "command" and value[0] == "bootseer":
                yield value[1:]
            elif key == "command" and value[0] == "sh":
                yield from commands_in(value[-1])
            else:
                yield from calls_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from calls_in(value)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_units_call_commands_that_exist(path: Path) -> None:
    text = path.read_text().replace("${DIRECTORY}", "/mnt").replace("${URL}", "file:///tmp")
    lines = re.findall(r"^Exec\w+=-?(.*)$", text.replace("$OPTIONS ", ""), re.MULTILINE)
    assert lines
    for line in lines:
        for words in commands_in(line):
            parse(words)
    assert set(re.findall(r"^Environment=(BOOTSEER_\w+)=", text, re.MULTILINE)) <= VARIABLES


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_manifests_call_commands_that_exist(path: Path) -> None:
    _check_calls(list(yaml.safe_load_all(path.read_text())))


def test_the_chart_calls_commands_that_exist() -> None:
    _check_calls(objects(render()))


def _check_calls(documents: list[Any]) -> None:
    assert all(document["kind"] for document in documents)
    found = list(calls_in(documents))
    assert found
    for words in found:
        parse(words)
    assert set(variables_in(documents)) <= VARIABLES | OTHERS


def variables_in(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if str(node.get("name", "")).startswith("BOOTSEER_"):
            yield node["name"]
        for value in node.values():
            yield from variables_in(value)
    elif isinstance(node, list):
        for value in node:
            yield from variables_in(value)


def test_the_snapshotter_s_pod_sees_what_it_needs() -> None:
    command = cli.get_command(root_context(), "snapshotter")
    assert command is not None
    defaults = {option.name: option.default for option in command.params}
    root, address = Path(str(defaults["root"])), Path(str(defaults["address"]))
    (pod,) = [
        one["spec"]["template"]["spec"]
        for one in objects(render())
        if one["kind"] == "DaemonSet" and one["metadata"]["name"] == "bootseer-node"
    ]
    (container,) = [one for one in pod["containers"] if one["name"] == "snapshotter"]
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[str(root)]["mountPropagation"] == "Bidirectional"
    assert mounts[str(root.parent / "io.containerd.content.v1.content")]["readOnly"]
    assert str(address.parent) in mounts
    assert {f"--root={root}", f"--address={address}"} <= set(container["command"])
