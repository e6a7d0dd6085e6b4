"""Settings: precedence, parsing and errors."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError
from bootseer.settings.config import default_settings, load_config, resolve, variable_of
from bootseer.settings.values import AUTOMATIC_AGE_S, parse_max_age, parse_size


def test_flags_beat_variables_beat_file_beat_defaults(tmp_path: Path) -> None:
    file = tmp_path / "bootseer.toml"
    file.write_text('store = "file:///from-file"\njob = "file-job"\nworkload = "file-work"\n')
    environ = {
        "HOME": str(tmp_path),
        "BOOTSEER_CONFIG": str(file),
        "BOOTSEER_STORE": "file:///from-variable",
        "BOOTSEER_JOB": "variable-job",
    }
    config = load_config({"job": "flag-job", "attempt": None}, environ)
    settings = config.settings
    assert (settings.job, config.sources["job"]) == ("flag-job", "flag")
    assert settings.store_url == "file:///from-variable"
    assert config.sources["store_url"] == "variable BOOTSEER_STORE"
    assert (settings.workload, config.sources["workload"]) == ("file-work", str(file))
    assert (settings.attempt, config.sources["attempt"]) == (0, "default")


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512", 512), ("64MiB", 64 << 20), ("1.5 GB", 1_500_000_000), ("2k", 2000)],
)
def test_sizes_with_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e3"])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [("job", "a/b"), ("workload", "../x"), ("rank", "-1"), ("deadline_s", "never"), ("node", "")],
)
def test_bad_values_name_the_setting_and_its_source(name: str, value: str) -> None:
    flags = {name: value or " "}
    with pytest.raises(InvalidInputError, match=rf"{name} \(flag\)"):
        resolve(flags, {}, {}, "", default_settings({"HOME": "/home/u"}))


@pytest.mark.parametrize("text", ["= broken", 'unknown = "x"', "job = true", "[job]\na = 1"])
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bootseer.toml"
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=str(file)):
        load_config({}, {"HOME": str(tmp_path), "BOOTSEER_CONFIG": str(file)})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("", 0, 0)),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "SLURM_PROCID": "3"}, ("7", 2, 3)),
        (
            {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"},
            ("7_0", 0, 0),
        ),
        ({"SLURM_JOB_ID": "8", "SLURM_HET_JOB_ID": "7"}, ("7", 0, 0)),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, ("", 1, 0)),
        ({"TORCHELASTIC_RUN_ID": "run/of me", "RANK": "5"}, ("run-of-me", 0, 5)),
        ({"JOB_COMPLETION_INDEX": "4", "BOOTSEER_SUBMISSION": "0b-1"}, ("0b-1", 0, 4)),
        ({"SLURM_JOB_ID": "7", "BOOTSEER_ATTEMPT": "0", "SLURM_RESTART_COUNT": "3"}, ("7", 0, 0)),
    ],
)
def test_the_scheduler_says_which_start_it_is(
    environ: dict[str, str], expected: tuple[str, int, int]
) -> None:
    settings = load_config(
        {}, {"HOME": "/home/u", "BOOTSEER_CONFIG": "/dev/null", **environ}
    ).settings
    assert (settings.submission, settings.attempt, settings.rank) == expected


def test_a_scheduler_s_name_that_cannot_be_a_file_s_is_made_one() -> None:
    environ = {"HOME": "/home/u", "BOOTSEER_CONFIG": "/dev/null", "SLURM_JOB_NAME": "../my job"}
    assert load_config({}, environ).settings.job == "my-job"


def test_variables_have_short_names() -> None:
    assert variable_of("store_url") == "BOOTSEER_STORE"
    assert variable_of("deadline_s") == "BOOTSEER_DEADLINE"
    assert variable_of("cache_limit_bytes") == "BOOTSEER_CACHE_LIMIT"
    assert variable_of("fill_bytes_per_s") == "BOOTSEER_FILL"


def test_metrics_are_off_unless_they_have_a_folder() -> None:
    environ = {"HOME": "/home/u", "BOOTSEER_CONFIG": "/dev/null"}
    assert load_config({}, environ).settings.metrics_dir is None
    environ["BOOTSEER_METRICS_DIR"] = "/var/lib/metrics"
    assert load_config({}, environ).settings.metrics_dir == Path("/var/lib/metrics")


def test_a_runtime_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    """`su` and `sudo -E` keep the variable of the user who was logged in."""
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    assert default_settings(environ)["run_dir"] == str(tmp_path / "bootseer")
    without = default_settings({"HOME": str(tmp_path)})["run_dir"]
    gone = {**environ, "XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert default_settings(gone)["run_dir"] == without
    # This folder is root's, or of another user than root.
    others = Path("/")
    if os.geteuid() == 0:
        others = tmp_path
        os.chown(tmp_path, 4321, 4321)
    assert default_settings({**environ, "XDG_RUNTIME_DIR": str(others)})["run_dir"] == without


def test_a_user_without_a_folder_has_one_of_their_own_for_a_while() -> None:
    """In a pod the user may be a number, with / as HOME."""
    if os.geteuid() == 0:
        code = (
            "import os, sys\n"
            "from bootseer.settings.config import default_settings\n"
            "os.setuid(4321)\n"
            "print(default_settings({'HOME': sys.argv[1]})['timeline_dir'])"
        )
        for home in ("/", "/nonexistent/home"):
            words = [sys.executable, "-c", code, home]
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
            assert said == "/var/tmp/bootseer-4321/.local/state/bootseer/timeline"
    else:
        found = default_settings({"HOME": "/"})["timeline_dir"]
        assert found.startswith(f"/var/tmp/bootseer-{os.geteuid()}/")


def test_a_misspelt_variable_is_said_once_and_without_its_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    misspelt = {"BOOTSEER_CACHE_DIRR": "secret", "BOOTSEER_QQQQ": "secret"}
    known = {"BOOTSEER_NODE": "n", "BOOTSEER_READY_SOCKETS": "x", "BOOTSEERED": "not ours"}
    for _ in range(2):
        load_config({}, {"HOME": str(tmp_path), **misspelt, **known})
    assert sorted(caplog.messages) == [
        "warning: the variable BOOTSEER_CACHE_DIRR is unknown; is BOOTSEER_CACHE_DIR meant?",
        "warning: the variable BOOTSEER_QQQQ is unknown; `bootseer config` lists those there are",
    ]


def test_a_maximum_age_of_zero_is_refused(tmp_path: Path) -> None:
    """Zero would run the set-up on every node at every start; it once meant no limit."""
    for text in ("0", "0s", "0d", "0.0h"):
        with pytest.raises(InvalidInputError, match="would let every node run the set-up"):
            parse_max_age(text)
    with pytest.raises(InvalidInputError, match="BOOTSEER_SNAPSHOT_MAX_AGE"):
        load_config({}, {"HOME": str(tmp_path), "BOOTSEER_SNAPSHOT_MAX_AGE": "0"})
    assert parse_max_age("off") == 0
    assert parse_max_age("auto") == AUTOMATIC_AGE_S
    assert parse_max_age("7d") == 7 * 86_400
