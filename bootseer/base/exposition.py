"""Writer of Prometheus' text exposition format, for node-exporter's textfile collector. Pure.

Metric names are a promise to dashboards (docs/operations.md). Help texts are constants: the
collector merges the files of several writers and requires equal texts.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

Labels = Sequence[tuple[str, str]]


class Sample(Struct, frozen=True):
    """Value of a metric family with its labels."""

    value: int | float
    labels: Labels = ()
    suffix: str = ""


class Family(Struct, frozen=True):
    """Metric family: all samples of one metric name."""

    name: str
    kind: str
    text: str
    samples: Sequence[Sample]


def single(name: str, kind: str, text: str, value: int | float) -> Family:
    """Return a metric family with a single sample without labels."""
    return Family(name, kind, text, (Sample(value),))


def render(families: Iterable[Family], own: Labels) -> str:
    """Return the text of a file; every sample gets the labels `own` besides its own labels.

    Families without samples are left out.
    """
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {family.text}")
            lines.append(f"# TYPE {family.name} {family.kind}")
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escape(value)}"' for key, value in (*own, *sample.labels))
            lines.append(f"{family.name}{sample.suffix}{{{labels}}} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    # Names may hold bytes that are not UTF-8.
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: int | float) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))
