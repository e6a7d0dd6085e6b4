"""End of the output of `bootseer demo` as the README shows it, to compare a run with."""

import re

from testbed.paths import REPOSITORY


def without_figures(text: str) -> list[str]:
    """Return the lines with every number as "#", without its unit, and with single spaces."""
    text = re.sub(r"\d+(\.\d+)?( [kMGT]?B\b)?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def readme_output() -> list[str]:
    """Return the README's lines of standard output and error, without figures."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return without_figures(text.split("$ make demo    # its last lines\n")[1].split("```")[0])
