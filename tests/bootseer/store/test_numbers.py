"""Invalid numbers in URLs, arguments and options are refused before any work."""

import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from bootseer.cli.command_tree import cli
from bootseer.errors import InvalidInputError
from bootseer.fuse.striped.stripe_settings import StripeSettings
from bootseer.store import open_backend

NO_TIMES = [math.nan, math.inf, -math.inf, -1.0, 0.0]


@pytest.mark.parametrize("text", ["nan", "inf", "1e400", "-inf", "-1", "0", "x", ""])
def test_a_deadline_in_a_url_that_never_comes(text: str) -> None:
    """The first call once ended in a ValueError or OverflowError."""
    for scheme in ("hdfs", "viewfs"):
        with pytest.raises(InvalidInputError, match=r"deadline_s|usable URL"):
            open_backend(f"{scheme}://127.0.0.1:1/x?deadline_s={text}")


@pytest.mark.parametrize("deadline_s", NO_TIMES)
def test_a_deadline_of_a_store_or_mount_that_never_comes(tmp_path: Path, deadline_s: float) -> None:
    for url in ("hdfs://127.0.0.1:1/x", tmp_path.as_uri(), "memory://x"):
        with pytest.raises(InvalidInputError, match="deadline"):
            open_backend(url, deadline_s=deadline_s)
    with pytest.raises(InvalidInputError, match="deadline"):
        StripeSettings(deadline_s=deadline_s)


@pytest.mark.parametrize("text", ["nan", "inf", "-1"])
@pytest.mark.parametrize(
    "command",
    [
        ["gc", "--keep-days"],
        ["gc", "--keep-start-days"],
        ["watch", "--times"],
        ["watch", "--every"],
    ],
)
def test_an_option_that_is_no_number(tmp_path: Path, command: list[str], text: str) -> None:
    environ = {"HOME": str(tmp_path), "BOOTSEER_STORE": str(tmp_path / "store")}
    done = CliRunner().invoke(cli, [*command, text], env=environ)
    assert done.exit_code == 2, done.output
    assert command[-1] in done.output
