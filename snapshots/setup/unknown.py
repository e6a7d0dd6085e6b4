"""What may decide the result of a set-up and is not in its key: to be said. Pure (no I/O)."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from bootseer.snapshots.setup.inputs import Inputs

_TRUE = {"1", "true", "yes", "y", "t", "on"}
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)|([A-Za-z_]\w*))")
# That say where and for whom something runs.
_USUAL_VARIABLES = {
    *("HOME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "SHELL", "HOSTNAME", "TMPDIR", "LANG"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "BOOTSEER_IMAGE", "PS1"),
}
_SHOWN_MAX = 5


def is_open(inputs: Inputs, environ: Mapping[str, str]) -> bool:
    """Whether the same set-up may give something else another day: it looks for something in an
    index that has no exact version, or runs what is not understood."""
    return bool(inputs.opaque or _looked_up(inputs, environ))


def unknown(
    inputs: Inputs, environ: Mapping[str, str], command: Sequence[str], declared: Collection[str]
) -> Iterator[str]:
    """All that is not in the key, as far as one can tell, in a few words each. `declared`: the
    variables that are."""
    if names := _looked_up(inputs, environ):
        yield f"which versions an index has of {_some(names)}"
    if inputs.opaque:
        yield f"what {_some(inputs.opaque)} may read or download"
    if inputs.rough:
        yield f"all of {_some(inputs.rough)} (names, sizes and ends count)"
    text = " ".join(command)
    named = {match[1] or match[2] for match in _VARIABLE.finditer(text)}
    free = {name for name in named if name in environ and not re.search(rf"\b{name}=", text)}
    if free := free.difference(declared, _USUAL_VARIABLES):
        yield f"the values of {_some(sorted(free))} (--env makes them count)"


def unknown_before(targets: Sequence[str]) -> Iterator[str]:
    """The same of targets that hold something before the set-up."""
    if targets:
        yield f"the contents of what {_some(targets)} held before (names, types and sizes count)"


def _looked_up(inputs: Inputs, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What has no exact version, unless variables keep pip and uv from an index, or from what is
    new there."""
    values = (environ.get(name, "") for name in ("PIP_NO_INDEX", "UV_NO_INDEX", "UV_OFFLINE"))
    is_fixed = any(value.lower() in _TRUE for value in values) or environ.get("UV_EXCLUDE_NEWER")
    return () if is_fixed else inputs.open_requirements


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_MAX
    return ", ".join(names[:_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
