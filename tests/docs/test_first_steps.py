"""The first steps of the README run as printed, and the second start installs nothing.

The folders that they leave on the node are described.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from testbed.node import node_at
from testbed.paths import REPOSITORY
from testbed.wheels import make_wheel


def test_the_first_steps_run_as_printed(tmp_path: Path) -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## First steps\n")[2]
    found = re.search(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    assert found
    install, steps = found[1].split("# 2.", 1)
    assert "pip install ." in install
    # Not /tmp itself, which all tests share, and a package that needs no network. An installed
    # `bootseer` is the wheel test's part.
    steps = steps.replace("/tmp/", f"{tmp_path}/")
    make_wheel(tmp_path / "wheels", "numpy", "1", {"numpy.py": ""})
    bootseer = f'bootseer() {{ {shlex.quote(sys.executable)} -m bootseer "$@"; }}'
    with node_at(tmp_path / "node", (tmp_path / "bootseer-store").as_uri()) as node:
        done = subprocess.run(
            ["sh", "-ec", f"{bootseer}\n# {steps}"],
            env={
                **node.environment,
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(tmp_path / "wheels"),
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            },
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stderr.count("running the set-up") == 1, done.stderr
        assert "restored snapshot" in done.stderr
        assert "Critical path" in done.stdout
        page = (REPOSITORY / "docs/format/cache.md").read_text(encoding="utf-8")
        cached, run = page.partition("| in CACHE_DIR |")[2].split("| in RUN_DIR |")
        for table, folder in ((cached, "cache"), (run, "run")):
            names = [path.name for path in (tmp_path / "node" / folder).iterdir()]
            assert names
            assert [name for name in names if f"`{name}/" not in table] == []
