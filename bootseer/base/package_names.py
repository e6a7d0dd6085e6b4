"""Names of installed packages, told by the names of files alone.

Installers of Python packages leave `NAME-VERSION.dist-info` (older ones `.egg-info`), conda leaves
`conda-meta/NAME-VERSION-BUILD.json`. Pure.
"""

import re

from msgspec import Struct

_EGG_PYTHON = re.compile(r"-py\d+(\.\d+)?$")
_SEPARATORS = re.compile(r"[-_.]+")


class Package(Struct, frozen=True, order=True):
    """A package, whatever its version. Names are as PEP 503 normalises them."""

    kind: str
    """"python" or "conda"."""
    name: str


def package_of(path: bytes, is_directory: bool) -> tuple[Package, str] | None:
    """The package and version that a name in an environment stands for, if any."""
    folder, _, last = path.rpartition(b"/")
    text = last.decode("utf-8", "backslashreplace")
    if folder.rpartition(b"/")[2] == b"conda-meta" and text.endswith(".json"):
        name, version, _ = [*text.removesuffix(".json").rsplit("-", 2), "", ""][:3]
        return (Package("conda", name.lower()), version) if name and version else None
    if text.endswith(".dist-info") and is_directory:
        stem = text.removesuffix(".dist-info")
    elif text.endswith(".egg-info"):
        stem = _EGG_PYTHON.sub("", text.removesuffix(".egg-info"))
    else:
        return None
    name, _, version = stem.rpartition("-")
    # Without a version: an editable install, or an egg-info beside its sources.
    return (Package("python", normal_name(name)), version) if name and version else None


def normal_name(name: str) -> str:
    """As PEP 503 has it: "Foo.Bar" is "foo-bar"."""
    return _SEPARATORS.sub("-", name).lower()
