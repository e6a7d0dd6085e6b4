"""What we add to containerd's configuration, and that it changes nothing else. Pure.

A configuration as containerd itself prints it (`containerd config dump`) is a *dump* here, parsed.
"""

import copy
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from bootseer.errors import InvalidInputError, UnsupportedError

NAME = "bootseer"
"""Of the proxy plugin, of the runtime class's handler, and of the snapshotter."""
Table = dict[str, Any]

_BEGIN = "# bootseer: begin; `bootseer kubernetes containerd remove` takes these lines away"
_END = "# bootseer: end"
# With the line's end before it, so that what was there comes back to the byte.
_BLOCK = re.compile(rf"\n{re.escape(_BEGIN)}\n.*?{re.escape(_END)}\n", re.DOTALL)
_TRANSFER = "io.containerd.transfer.v1.local"
# By the version of the dump: containerd 1.x has 2, containerd 2.x has 3.
_RUNTIME = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
_IMAGES = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.images"}


def without_block(text: str) -> str:
    """The configuration without our lines, as it was before, to the byte."""
    return _BLOCK.sub("", text)


def new_file(version: int) -> str:
    """What precedes our lines where containerd had no file."""
    return f"# Made by bootseer, and removed with it.\nversion = {version}\n"


def with_block(text: str, lines: str) -> str:
    """The configuration with our lines at its end, in place of those it may have."""
    return f"{without_block(text)}\n{_BEGIN}\n{lines}{_END}\n"


def parse(text: str, what: str) -> Table:
    """Raises: InvalidInputError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{what} is no TOML: {error}; mend it first") from error


def lines_for(dump: Table, text: str, address: str, platform: str) -> str:
    """Our lines for a containerd that now has this dump, made of a file with this text.

    The runtime class is a copy of the node's default runtime: its control groups, its GPU hooks.
    Raises: UnsupportedError, InvalidInputError.
    """
    version = _version_of(dump)
    said = parse(text, "containerd's configuration")
    if any(_ours(dump)):
        raise InvalidInputError(
            "containerd's configuration has a runtime or a proxy plugin called bootseer that was "
            "put there by hand: remove it, or set containerd.install=false"
        )
    runtimes = _at(dump, "plugins", _RUNTIME[version], "containerd").get("runtimes", {})
    default = _at(dump, "plugins", _RUNTIME[version], "containerd").get("default_runtime_name")
    if default not in runtimes:
        raise UnsupportedError(f"containerd's default runtime {default!r} is not configured")
    tables: list[tuple[tuple[str, ...], Table]] = [
        (("proxy_plugins", NAME), {"type": "snapshot", "address": address})
    ]
    # Without a version a file is of the first, which calls CRI by its short name.
    plugin = "cri" if version == 2 and said.get("version", 1) == 1 else _RUNTIME[version]
    path = ("plugins", plugin, "containerd", "runtimes")
    # A list of runtimes replaces containerd's own, so those it has by itself are said as well.
    explicit = _at(said, *path)
    tables += [((*path, name), one) for name, one in runtimes.items() if name not in explicit]
    tables.append(((*path, NAME), {**runtimes[default], "snapshotter": NAME}))
    text = "".join(_toml(place, table) for place, table in tables)
    if version == 3:
        place = ("plugins", _IMAGES[3], "runtime_platforms", NAME)
        text += _toml(place, {"platform": platform, "snapshotter": NAME})
        images = _at(dump, "plugins", _IMAGES[3])
        ours = [NAME]
        if not _at(said, "plugins", _TRANSFER).get("unpack_config"):
            # A list replaces containerd's own, which is of its default snapshotter.
            ours.append(images.get("snapshotter", "overlayfs"))
        for snapshotter in ours:
            # Written by hand: an inline list could not follow entries of the file itself.
            text += f'[[plugins."{_TRANSFER}".unpack_config]]\n'
            text += tomli_w.dumps({"platform": platform, "snapshotter": snapshotter})
    return text


def runtime_in(dump: Table) -> Table:
    """The table of our runtime class in a dump; empty where there is none."""
    version = _version_of(dump)
    return _at(dump, "plugins", _RUNTIME[version], "containerd", "runtimes", NAME)


def check_change(before: Table, after: Table, address: str) -> None:
    """Refuse a change that does not do what we want, or does anything else.

    Raises: UnsupportedError.
    """
    plugin, runtime = _ours(after)
    if runtime.get("snapshotter") != NAME:
        raise UnsupportedError(
            "containerd does not take a runtime class with a snapshotter of its own from its file: "
            "that takes 1.7 or newer, and before 2.0 no imported file with a table of CRI"
        )
    if plugin.get("address") != address:
        raise UnsupportedError(
            "containerd does not take the proxy plugin from its configuration file"
        )
    was, will_be = _without_zeros(_without_ours(before)), _without_zeros(_without_ours(after))
    for place in sorted(was.keys() | will_be):
        if was.get(place) != will_be.get(place):
            raise UnsupportedError(
                f"our lines would change other settings of containerd, too ({place}): add them by "
                "hand as docs/containerd.md says, and set containerd.install=false"
            )


def _ours(dump: Table) -> tuple[Table, Table]:
    return _at(dump, "proxy_plugins", NAME), runtime_in(dump)


def _without_ours(dump: Table) -> Table:
    version = _version_of(dump)
    rest = copy.deepcopy(dump)
    # The list of files that were read has the name of the one we try.
    rest.pop("imports", None)
    _at(rest, "proxy_plugins").pop(NAME, None)
    _at(rest, "plugins", _RUNTIME[version], "containerd", "runtimes").pop(NAME, None)
    images = _at(rest, "plugins", _IMAGES[version])
    _at(images, "runtime_platforms").pop(NAME, None)
    transfer = _at(rest, "plugins", _TRANSFER)
    listed = [one for one in transfer.pop("unpack_config", ()) if one["snapshotter"] != NAME]
    default = images.get("snapshotter")
    if [one["snapshotter"] for one in listed] not in ([], [default]):
        transfer["unpack_config"] = listed
    return rest


def _without_zeros(table: Table) -> Table:
    """What nobody has set is a zero in one dump, and left out of another."""
    inner = (
        (name, _without_zeros(one) if isinstance(one, dict) else one) for name, one in table.items()
    )
    return {name: one for name, one in inner if one}


def _version_of(dump: Table) -> int:
    version = dump.get("version")
    if version not in _RUNTIME:
        raise UnsupportedError(
            f"containerd's configuration has version {version}; 2 and 3 are known"
        )
    return int(version)


def _at(table: Table, *path: str) -> Table:
    """The table there; an empty one where there is none."""
    for name in path:
        below = table.get(name)
        if not isinstance(below, dict):
            return {}
        table = below
    return table


def _toml(path: tuple[str, ...], table: Mapping[str, Any]) -> str:
    """Return a table as TOML, without the names that have the zero value of their kind.

    Values are whatever TOML allows, lists of tables included: this is a copy of a node's own.
    """
    nested: Table = _without_zeros(dict(table))
    for name in reversed(path):
        nested = {name: nested}
    return tomli_w.dumps(nested)
