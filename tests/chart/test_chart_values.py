"""The chart's values: each is documented and used, and Helm refuses wrong ones by name."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest

from bootseer.settings.config import Settings, variable_of
from testbed.containers.chart import CHART, render
from testbed.containers.helm import HELM_3, HELM_4
from tests.chart.test_chart import DEFAULTS

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
_SAID_ONCE = {"enabled", "resources"}
# Values of Helm for a chart that contains this one.
_OF_HELM = {"global"}
Keys = tuple[str, ...]


def leaves(schema: Mapping[str, Any], *path: str) -> Iterator[Keys]:
    """Yield the paths of values that the schema names."""
    for name, inner in schema.get("properties", {}).items():
        if name not in _OF_HELM:
            yield (*path, name)
            yield from leaves(inner, *path, name)


def put(values: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return the values with another one at a path."""
    if not path:
        return {**values, **value}
    name, *rest = path
    inner = put(values.get(name, {}), tuple(rest), value) if rest else value
    return {**values, name: inner}


def at_all(paths: list[Keys], value: Any) -> dict[str, Any]:
    """Return values that are all the same, at these paths."""
    return reduce(lambda values, path: put(values, path, value), paths, {})


PATHS = list(leaves(SCHEMA))
DEPTHS = sorted({len(path) for path in PATHS})


@pytest.fixture(params=[HELM_3, HELM_4])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def refusals(values: Mapping[str, Any], version: str) -> list[tuple[Keys, str]]:
    """Return the places at which Helm refuses the values, with its messages."""
    with pytest.raises(ValueError) as caught:
        render(values, version=version)
    lines = re.findall(r"^ *- (?:at '/?(.*?)'|([^ ]+)): (.*)", str(caught.value), re.MULTILINE)
    places = [
        ("" if dots == "(root)" else dots or slashes, words) for slashes, dots, words in lines
    ]
    return [
        (tuple(re.split("[./]", place)) if place else (), words)
        for place, words in places
        if words != "validation failed"
    ]


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_value_of_another_type_is_refused(depth: int, version: str) -> None:
    """No value may be an object or a number instead."""
    paths = [path for path in PATHS if len(path) == depth]
    values = at_all(paths, 7.5)
    assert {path for path, _ in refusals(values, version)} == set(paths)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_value_that_is_taken_away_is_missed(depth: int, version: str) -> None:
    """Removed by `null`, or missing through `--reuse-values` of an older release."""
    paths = [path for path in PATHS if len(path) == depth]
    values = at_all(paths, None)
    said = refusals(values, version)
    for *folder, name in paths:
        words = " ".join(words for path, words in said if path == tuple(folder))
        assert re.search(rf"\b{name}\b", words), name


def test_a_misspelt_value_is_refused(version: str) -> None:
    paths: list[Keys] = [()]
    for path in PATHS:
        if isinstance(reduce(lambda inner, name: inner[name], path, DEFAULTS), dict):
            paths.append(path)
    said = refusals(at_all(paths, {"enable": True}), version)
    for path in paths:
        if path == ("settings",):
            # Helm 4 names another place.
            assert re.search("""(propertyName|Property name of) ['"]enable['"]""", str(said))
        else:
            assert any(
                (where == path and "enable" in words) or where == (*path, "enable")
                for where, words in said
            ), path


WRONG = {
    "image.repository": "",
    "image.pullPolicy": "always",
    "imagePullSecrets": [{"name": "login"}],
    "settings.store": "/mnt/store",
    "settings.cache_dir": "/var/cache",
    "settings.registry_hosts_dir": "/etc/hosts.d",
    "settings.cache_limits": "1GB",
    "settings.cache_limit": ["1GB"],
    "nodeSelector.gpu": True,
    "tolerations": [""],
    "stateDir": "var/lib/bootseer",
    "runDir": "/run/bootseer/",
    "mounts.graceSeconds": -1,
    "containerd.socket": "",
    "containerd.registryHostsDir": "certs.d",
    "csi.sources": "hdfs://namenode/checkpoints",
    "webhook.replicas": 0,
    "webhook.enabled": "true",
    "webhook.nodeSelector.zone": 1,
    "webhook.tolerations": ["key"],
    "webhook.priorityClassName": 1000,
    "webhook.resources": {"limit": {"memory": "1Gi"}},
    "warm.images": [""],
    "warm.everySeconds": 5,
    "metrics.directory": "node_exporter",
    "metrics.dashboardLabels.grafana_dashboard": 1,
}


def test_a_wrong_value_is_refused(version: str) -> None:
    paths = [tuple(name.split(".")) for name in WRONG]
    each = zip(paths, WRONG.values(), strict=True)
    values: dict[str, Any] = reduce(lambda values, one: put(values, *one), each, {})
    said = refusals(values, version)
    for path in paths:
        named = re.compile(f"""['"]{path[-1]}['"]""")
        assert any(where[: len(path)] == path or named.search(words) for where, words in said), path


def test_every_setting_of_a_node_is_known() -> None:
    """Except those of a single start, and folders that the chart sets itself."""
    known = set(SCHEMA["properties"]["settings"]["propertyNames"]["enum"])
    of_a_start = {"job", "submission", "attempt", "node", "rank"}
    of_a_start |= {"fanout", "fanout_hosts", "fanout_port", "fanout_key_file"}
    text = (CHART / "templates" / "config.yaml").read_text()
    of_the_chart = set(re.findall(r"(\w+) = \"", text))
    names = {variable_of(name) for name in Settings.__struct_fields__}
    # The users whose files are trusted are set by a variable only.
    others = of_a_start | of_the_chart | {"trusted_owners"}
    assert {f"BOOTSEER_{name.upper()}" for name in known | others} == names
    assert not known & of_the_chart


def test_every_value_is_documented() -> None:
    """The comment above a value documents it; a comment may be for several values."""
    is_said = False
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        name = re.match(r"(?:  )?(\w+):", line)
        is_next = is_said and re.match(r"\w+: ", before) is not None
        is_said = before.lstrip().startswith("#") or is_next
        assert name is None or is_said or name[1] in _SAID_ONCE, line


def test_every_value_is_used_and_checked() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(SCHEMA["properties"]) - _OF_HELM == set(DEFAULTS)
    for name, value in DEFAULTS.items():
        inner = SCHEMA["properties"][name].get("properties")
        if isinstance(value, dict) and inner is not None and name != "settings":
            assert set(inner) == set(value), name
            assert not SCHEMA["properties"][name]["additionalProperties"]
            for key in value:
                assert f".Values.{name}.{key}" in templates, f"{name}.{key}"
        else:
            assert f".Values.{name}" in templates, name
    assert not SCHEMA["additionalProperties"]
    unknown = set(re.findall(r"\.Values\.(\w+)", templates)) - set(DEFAULTS)
    assert not unknown
