"""The chart's values: each is documented and used, and wrong ones are refused, as Helm does it."""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from jsonschema import Draft7Validator, ValidationError

from bootseer.settings.config import Settings, variable_of
from tests.docs.test_chart import DEFAULTS, EVERYTHING, LEAST
from tests.support.containers.chart import CHART

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
_SAID_ONCE = {"enabled", "resources"}
_WORDS = (("nodeSelector",), ("metrics", "dashboardLabels"))


def check(values: Mapping[str, Any]) -> None:
    """What Helm does before it renders. Raises: ValidationError."""
    Draft7Validator(SCHEMA).validate(merged(DEFAULTS, values))


def merged(defaults: Any, values: Any) -> Any:
    if not (isinstance(defaults, Mapping) and isinstance(values, Mapping)):
        return values
    return {**defaults, **{name: merged(defaults.get(name), one) for name, one in values.items()}}


def leaves(schema: Mapping[str, Any], *path: str) -> Iterator[tuple[str, ...]]:
    """Where values lie, as far as the schema names them."""
    for name, inner in schema.get("properties", {}).items():
        yield (*path, name)
        yield from leaves(inner, *path, name)


def put(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


PATHS = list(leaves(SCHEMA))


@pytest.mark.parametrize("values", [{}, EVERYTHING, LEAST])
def test_right_values_are_taken(values: Mapping[str, Any]) -> None:
    Draft7Validator.check_schema(SCHEMA)
    check(values)


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_a_value_of_another_type_is_refused(path: tuple[str, ...]) -> None:
    """No value may be an object and a number."""
    for wrong in (7.5, None):
        with pytest.raises(ValidationError) as caught:
            check(put(path, wrong))
        assert tuple(caught.value.absolute_path) == path


@pytest.mark.parametrize("path", [(), *PATHS], ids=".".join)
def test_a_misspelt_value_is_refused(path: tuple[str, ...]) -> None:
    inner: Any = DEFAULTS
    for name in path:
        inner = inner[name]
    if isinstance(inner, dict):
        with pytest.raises(ValidationError) as caught:
            check(put(path, {"enable": True}))
        assert "'enable'" in caught.value.message or path in _WORDS


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("image.repository", ""),
        ("image.pullPolicy", "always"),
        ("imagePullSecrets", [{"name": "login"}]),
        ("settings.store", "/mnt/store"),
        ("settings.cache_dir", "/var/cache"),
        ("settings.registry_hosts_dir", "/etc/hosts.d"),
        ("settings.cache_limits", "1GB"),
        ("settings.cache_limit", ["1GB"]),
        ("nodeSelector.gpu", True),
        ("tolerations", [""]),
        ("stateDir", "var/lib/bootseer"),
        ("runDir", "/run/bootseer/"),
        ("mounts.graceSeconds", -1),
        ("containerd.socket", ""),
        ("containerd.registryHostsDir", "certs.d"),
        ("csi.sources", "hdfs://namenode/checkpoints"),
        ("webhook.replicas", 0),
        ("webhook.enabled", "true"),
        ("webhook.resources", {"limit": {"memory": "1Gi"}}),
        ("warm.images", [""]),
        ("warm.everySeconds", 5),
        ("metrics.directory", "node_exporter"),
        ("metrics.dashboardLabels.grafana_dashboard", 1),
    ],
)
def test_a_wrong_value_is_refused(path: str, wrong: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        check(put(tuple(path.split(".")), wrong))
    assert caught.value.absolute_path[0] == path.split(".")[0]


def test_every_setting_of_a_node_is_known() -> None:
    """But for those of one start, and for folders that the chart sets itself."""
    known = set(SCHEMA["properties"]["settings"]["propertyNames"]["enum"])
    of_a_start = {"job", "submission", "attempt", "node", "rank"}
    text = (CHART / "templates" / "config.yaml").read_text()
    of_the_chart = set(re.findall(r"(\w+) = \"", text))
    names = {variable_of(name) for name in Settings.__struct_fields__}
    # Whose files are believed only a variable can say.
    others = of_a_start | of_the_chart | {"trusted_owners"}
    assert {f"BOOTSEER_{name.upper()}" for name in known | others} == names
    assert not known & of_the_chart


def test_every_value_is_documented() -> None:
    """By a comment above it; one may be of several values."""
    is_said = False
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        name = re.match(r"(?:  )?(\w+):", line)
        is_next = is_said and re.match(r"\w+: ", before) is not None
        is_said = before.lstrip().startswith("#") or is_next
        assert name is None or is_said or name[1] in _SAID_ONCE, line


def test_every_value_is_used_and_checked() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert set(SCHEMA["properties"]) == set(DEFAULTS)
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
