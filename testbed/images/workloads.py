"""Commands that the containers run, and the scripts that the image has for them."""

import shlex
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """Command in the image, and its expected output."""

    name: str
    command: tuple[str, ...]
    output: str
    """Expected output."""

    @property
    def shell_words(self) -> str:
        """Command quoted for a line of shell."""
        return shlex.join(self.command)


TORCH = Workload("import-torch", ("python3", "-c", 'import torch; print("ok")'), "ok")
PANDAS = Workload("read-data", ("python3", "/app/read_data.py"), "500500")
SHELL = Workload("shell", ("/bin/sh", "-c", "ls / > /dev/null; echo ok"), "ok")

DATA_ROW_COUNT = 200_000

READ_DATA_SCRIPT = """import pandas
import torch

# Revision {revision}.
table = pandas.read_csv("/app/data.csv")
column = torch.from_numpy(table["number"].to_numpy()[:1000].copy())
print(int(column.sum()))
"""


def data_file() -> str:
    """Return a CSV table, always the same, that compresses about as measured numbers do."""
    lines = ["number,square,noise"]
    state = 1
    for number in range(1, DATA_ROW_COUNT + 1):
        state = state * 6364136223846793005 + 1442695040888963407 & 2**64 - 1
        lines.append(f"{number},{number * number},{state / 2**64:.12f}")
    return "\n".join(lines) + "\n"
