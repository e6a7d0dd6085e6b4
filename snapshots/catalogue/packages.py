"""Which packages an environment holds, told by the names of its files alone. Pure (no I/O).

Installers of Python packages leave `NAME-VERSION.dist-info` (older ones `.egg-info`) in the
environment, conda leaves `conda-meta/NAME-VERSION-BUILD.json`. No content is needed.
"""

import re
import stat
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from bootseer.blob.tree import Tree

_EGG_PYTHON = re.compile(r"-py\d+(\.\d+)?$")
_SEPARATORS = re.compile(r"[-_.]+")


class Package(Struct, frozen=True, order=True):
    """A package, whatever its version. Names are as PEP 503 normalises them."""

    kind: str
    """"python" or "conda"."""
    name: str


class PackageChange(Struct, frozen=True):
    """A package that is not the same in both."""

    package: Package
    before: str | None
    """Its version, or versions where there are several environments; None: it is not there."""
    after: str | None


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


def packages_in(trees: "Iterable[Tree]") -> dict[Package, str]:
    """The versions of all packages in some trees; several of one package are joined by ", "."""
    found: dict[Package, set[str]] = {}
    for tree in trees:
        for path, number in tree.walk():
            if path.endswith((b"-info", b".json")):
                package = package_of(path, stat.S_ISDIR(tree.mode(number)))
                if package is not None:
                    found.setdefault(package[0], set()).add(package[1])
    return {package: ", ".join(sorted(versions)) for package, versions in found.items()}


def compare_packages(
    before: Mapping[Package, str], after: Mapping[Package, str]
) -> tuple[PackageChange, ...]:
    """What differs, sorted."""
    return tuple(
        PackageChange(package, before.get(package), after.get(package))
        for package in sorted({*before, *after})
        if before.get(package) != after.get(package)
    )
