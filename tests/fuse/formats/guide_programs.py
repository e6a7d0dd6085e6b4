"""The Python programs of docs/checkpoints.md; run by `host`, which has imported torch."""

import os
import random
import re
from pathlib import Path
from typing import Any

from testbed.paths import REPOSITORY


def run_all(folder: str) -> int:
    """Run the programs one after the other below `folder`; return their number."""
    base = Path(folder)
    os.environ["BOOTSEER_RUN_DIR"] = str(base / "run")
    (base / "local").write_bytes(random.Random(0).randbytes(5 * 2**20))
    names: dict[str, Any] = {
        "local_file": base / "local",
        "local_copy": base / "copy",
        "print": lambda *values: None,
    }
    page = (REPOSITORY / "docs/checkpoints.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for program in programs:
        text = program.replace("hdfs://namenode", base.as_uri())
        exec(compile(text, "docs/checkpoints.md", "exec"), names)
    assert (base / "copy").read_bytes() == (base / "local").read_bytes()
    return len(programs)
