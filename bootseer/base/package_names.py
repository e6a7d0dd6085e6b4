"""Names of installed packages, recognized by the file names that installers leave.

Installers of Python packages leave `NAME-VERSION.dist-info` (older ones `.egg-info`), conda leaves
`conda-meta/NAME-VERSION-BUILD.json`. Pure.
"""

import re

from msgspec import Struct

_EGG_PYTHON = r"-py\d+(\.\d+)?$"
_SEPARATORS = r"[-_.]+"


class Package(Struct, frozen=True, order=True):
    """A package, without its version. The name is normalized as PEP 503 says."""

    kind: str
    """"python" or "conda"."""
    name: str


def package_of(path: bytes, is_directory: bool) -> tuple[Package, str] | None:
    """Return the package and version that a path in an environment stands for, or None."""
    folder, _, last = path.rpartition(b"/")
    text = last.decode("utf-8", "backslashreplace")
    if folder.rpartition(b"/")[2] == b"conda-meta" and text.endswith(".json"):
        name, version, _ = [*text.removesuffix(".json").rsplit("-", 2), "", ""][:3]
        return (Package("conda", name.lower()), version) if name and version else None
    if text.endswith(".dist-info") and is_directory:
        stem = text.removesuffix(".dist-info")
    elif text.endswith(".egg-info"):
        stem = re.sub(_EGG_PYTHON, "", text.removesuffix(".egg-info"))
    else:
        return None
    name, _, version = stem.rpartition("-")
    # Without a version: an editable install, or an egg-info beside its sources.
    return (Package("python", normal_name(name)), version) if name and version else None


def normal_name(name: str) -> str:
    """Return a package name normalized as PEP 503 says: "foo-bar" for "Foo.Bar"."""
    return re.sub(_SEPARATORS, "-", name).lower()
