"""`bootseer config`, and numbers that settings and options refuse."""

from pathlib import Path
from typing import Any

import pytest

from bootseer.settings.config import Settings, load_config, variable_of
from tests.bootseer.cli.conftest import World


@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "BOOTSEER_KEEP_CACHES": "off",
            "BOOTSEER_LINGER": "10m",
            "BOOTSEER_SNAPSHOT_MAX_AGE": "off",
            "BOOTSEER_METRICS_DIR": "/var/metrics",
            "BOOTSEER_RESTORE_PRIVILEGES": "on",
        },
    ],
)
def test_what_is_shown_can_be_set(world: World, tmp_path: Path, given: dict[str, Any]) -> None:
    """`keep_caches` was once shown as True, and an age as -1.0, which no setting accepts."""
    shown = world("config", "--json", **given).json
    values = {name: str(one["value"]) for name, one in shown.items()}
    again = {variable_of(name): text for name, text in values.items()}
    expected = load_config({}, {**world.environment, **given}).settings
    assert load_config({}, {**world.environment, **again}).settings == expected
    assert set(values) == set(Settings.__struct_fields__)
    table = world("config", **given)
    assert "True" not in table.out
    assert "False" not in table.out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("DEADLINE", text) for text in ("nan", "inf", "-inf", "-1", "0", "1e400", "9" * 400)),
        *(("LINGER", text) for text in ("nan", "inf", "-1")),
        *(("SNAPSHOT_MAX_AGE", text) for text in ("nan", "inf", "-1", "9" * 400)),
        *(("CACHE_LIMIT", text) for text in ("nan", "inf", "-1", "9" * 400)),
        *(("ATTEMPT", text) for text in ("nan", "-1", "1.5", "9" * 12, "9" * 5000)),
    ],
)
def test_what_is_no_number_is_refused(world: World, name: str, text: str) -> None:
    variables: dict[str, Any] = {f"BOOTSEER_{name}": text}
    result = world("config", **variables)
    assert result.code == 2, result
    assert len(result.err.splitlines()) == 1
    assert f"BOOTSEER_{name}" in result.err


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "1e400", "x"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("gc", "--keep-days"),
        ("gc", "--keep-start-days"),
        ("watch", "--every"),
        ("watch", "--times"),
        ("snapshot", "run", "--wait"),
        ("checkpoint", "mount", "--deadline"),
        ("checkpoint", "mount", "--timeout"),
        ("status", "--wait"),
    ],
    ids=" ".join,
)
def test_options_take_finite_numbers_alone(
    world: World, arguments: tuple[str, ...], text: str
) -> None:
    """`gc --keep-days nan` once kept nothing."""
    result = world(*arguments, text)
    assert result.code == 2, result
    assert arguments[-1] in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "line", ["linger = nan", "linger = inf", "rank = inf", 'job = ["a"]', "[job]"]
)
def test_a_file_with_other_values_is_refused(world: World, tmp_path: Path, line: str) -> None:
    file = tmp_path / "bootseer.toml"
    file.write_text(f"{line}\n")
    result = world("config", BOOTSEER_CONFIG=str(file))
    assert result.code == 2, result
    assert len(result.err.splitlines()) == 1
