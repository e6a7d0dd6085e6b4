"""Installer of Bootseer's lines in containerd's configuration on a node.

The lines are a block at the end of containerd's own file. An imported file of their own is no
option: containerd 1.6 and 1.7 replace a plugin's whole table by the imported one, and the node's
settings would be lost.

At every moment the file is the complete old one or the complete new one. containerd is restarted
only if its running configuration differs, and only after containerd itself has parsed the new file.
A parsed `containerd config dump` is called a *dump* here. `lines_for` and `check_change` are pure.
"""

import contextlib
import copy
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from bootseer.errors import (
    BootseerError,
    DeadlineError,
    InvalidInputError,
    UnavailableError,
    UnsupportedError,
)
from bootseer.kubernetes.containerd_process import (
    NAME,
    TEMPORARY_PREFIX,
    ContainerdDaemon,
    Table,
    parse,
)
from bootseer.linux.locks import lock_within

_BEGIN = "# bootseer: begin; `bootseer kubernetes containerd remove` takes these lines away"
_END = "# bootseer: end"
# The block includes the newline before it, so that its removal restores the file byte for byte.
_BLOCK = re.compile(rf"\n{re.escape(_BEGIN)}\n.*?{re.escape(_END)}\n", re.DOTALL)
_TRANSFER = "io.containerd.transfer.v1.local"
# Plugin names by configuration version: containerd 1.x dumps version 2, containerd 2.x version 3.
_RUNTIME = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
_IMAGES = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.images"}


def without_block(text: str) -> str:
    """Return a configuration without Bootseer's block, byte for byte as before."""
    return _BLOCK.sub("", text)


def new_file(version: int) -> str:
    """Return the beginning of the file if containerd had none."""
    return f"# Made by bootseer, and removed with it.\nversion = {version}\n"


def with_block(text: str, lines: str) -> str:
    """Return a configuration with `lines` as Bootseer's block, which replaces an older block."""
    return f"{without_block(text)}\n{_BEGIN}\n{lines}{_END}\n"


def lines_for(dump: Table, text: str, address: str, platform: str) -> str:
    """Return Bootseer's lines for a configuration file.

    The runtime is a copy of the node's default runtime, with its control groups and GPU hooks.

    Args:
        dump: Dump of the file without Bootseer's lines.
        text: Text of the same file.
        address: Socket of the snapshotter.
        platform: Platform of the node, such as "linux/amd64".

    Raises: UnsupportedError, InvalidInputError.
    """
    version = _config_version(dump)
    explicit_config = parse(text, "containerd's configuration")
    if any(_ours(dump)):
        raise InvalidInputError(
            "containerd's configuration has a runtime or a proxy plugin called bootseer that was "
            "added by hand: remove it, or set containerd.install=false"
        )
    runtimes = _at(dump, "plugins", _RUNTIME[version], "containerd").get("runtimes", {})
    default = _at(dump, "plugins", _RUNTIME[version], "containerd").get("default_runtime_name")
    if default not in runtimes:
        raise UnsupportedError(f"containerd's default runtime {default!r} is not configured")
    tables: list[tuple[tuple[str, ...], Table]] = [
        (("proxy_plugins", NAME), {"type": "snapshot", "address": address})
    ]
    # A file without a version has version 1, which calls the CRI plugin by its short name.
    is_first = version == 2 and explicit_config.get("version", 1) == 1
    path = ("plugins", "cri" if is_first else _RUNTIME[version], "containerd", "runtimes")
    # A table of runtimes replaces containerd's defaults, so the defaults are repeated.
    explicit = _at(explicit_config, *path)
    tables += [((*path, name), one) for name, one in runtimes.items() if name not in explicit]
    tables.append(((*path, NAME), {**runtimes[default], "snapshotter": NAME}))
    text = "".join(_toml(place, table) for place, table in tables)
    if version == 3:
        place = ("plugins", _IMAGES[3], "runtime_platforms", NAME)
        text += _toml(place, {"platform": platform, "snapshotter": NAME})
        images = _at(dump, "plugins", _IMAGES[3])
        ours = [NAME]
        if not _at(explicit_config, "plugins", _TRANSFER).get("unpack_config"):
            # The list replaces containerd's default, which has the default snapshotter.
            ours.append(images.get("snapshotter", "overlayfs"))
        for snapshotter in ours:
            # tomli_w would write an inline list, which cannot extend entries of the file itself.
            text += f'[[plugins."{_TRANSFER}".unpack_config]]\n'
            text += tomli_w.dumps({"platform": platform, "snapshotter": snapshotter})
    return text


def runtime_in(dump: Table) -> Table:
    """Return the table of Bootseer's runtime in a dump; empty if there is none."""
    version = _config_version(dump)
    return _at(dump, "plugins", _RUNTIME[version], "containerd", "runtimes", NAME)


def check_change(before: Table, after: Table, address: str) -> None:
    """Check that a change has the intended effect and no other.

    Raises: UnsupportedError.
    """
    plugin, runtime = _ours(after)
    if runtime.get("snapshotter") != NAME:
        raise UnsupportedError(
            "containerd ignores the runtime's snapshotter in its configuration file: this needs "
            "containerd 1.7 or newer, and before 2.0 no imported file may have a table of CRI"
        )
    if plugin.get("address") != address:
        raise UnsupportedError("containerd ignores the proxy plugin in its configuration file")
    was, will_be = _without_zeros(_without_ours(before)), _without_zeros(_without_ours(after))
    for place in sorted(was.keys() | will_be):
        if was.get(place) != will_be.get(place):
            raise UnsupportedError(
                f"Bootseer's lines would also change another setting of containerd ({place}): add "
                "them by hand as docs/containerd.md says, and set containerd.install=false"
            )


def _ours(dump: Table) -> tuple[Table, Table]:
    return _at(dump, "proxy_plugins", NAME), runtime_in(dump)


def _without_ours(dump: Table) -> Table:
    version = _config_version(dump)
    rest = copy.deepcopy(dump)
    # The list of files that were read names the trial file.
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
    """Drop members with zero values: one dump shows unset members as zeros, another omits them."""
    inner = (
        (name, _without_zeros(one) if isinstance(one, dict) else one) for name, one in table.items()
    )
    return {name: one for name, one in inner if one}


def _config_version(dump: Table) -> int:
    version = dump.get("version")
    if version not in _RUNTIME:
        raise UnsupportedError(
            f"containerd's configuration has version {version}; Bootseer knows 2 and 3"
        )
    return int(version)


def _at(table: Table, *path: str) -> Table:
    """Return the nested table at a path; empty if there is none."""
    for name in path:
        below = table.get(name)
        if not isinstance(below, dict):
            return {}
        table = below
    return table


def _toml(path: tuple[str, ...], table: Mapping[str, Any]) -> str:
    """Return a table at a path as TOML, without members that have zero values."""
    nested: Table = _without_zeros(dict(table))
    for name in reversed(path):
        nested = {name: nested}
    return tomli_w.dumps(nested)


RESTART_S = 60.0
_LOCK_S = 120.0
_K3S_TEMPLATE = '{{ template "base" . }}\n'


@dataclass(frozen=True, slots=True)
class InstallChange:
    """Result of `install` or `remove`."""

    file: Path
    is_file_changed: bool
    is_restarted: bool


def install(daemon: ContainerdDaemon, address: str, platform: str) -> InstallChange:
    """Add the snapshotter at `address` and its runtime to containerd, and load them.

    Raises:
        UnsupportedError: containerd cannot be restarted from here. The new file stays, so that a
            restart by hand loads it.
        BootseerError: Any other failure. containerd's configuration is as it was.
    """
    with _locked(daemon) as files:
        plain = without_block(files.loaded_text())
        before = daemon.dump(plain)
        if files.is_new():
            plain = new_file(before["version"])
        lines = lines_for(before, plain, address, platform)
        after = daemon.dump(with_block(plain, lines))
        check_change(before, after, address)
        old = files.read()
        new = with_block(files.head(plain), lines)
        if old != new:
            files.keep_backup(without_block(old or ""))
            files.write(new)
        wanted = runtime_in(after)
        try:
            is_restarted = _load(daemon, address, wanted)
        except (UnavailableError, DeadlineError):
            if old != new:
                files.write(old)
                with contextlib.suppress(BootseerError):
                    daemon.restart()
            raise
        return InstallChange(files.path, old != new, is_restarted)


def remove(daemon: ContainerdDaemon, address: str) -> InstallChange:
    """Remove Bootseer's lines, byte for byte, and make containerd unload them."""
    with _locked(daemon) as files:
        old = files.read()
        plain = without_block(old or "")
        # Fail before any change if containerd could not load the rest.
        rest = daemon.dump(without_block(files.loaded_text()))
        if is_changed := old is not None and plain != old:
            files.write(None if files.is_only_ours(plain) else plain)
            files.drop_backup(plain)
        # A runtime that was added by hand stays loaded.
        is_restarted = not runtime_in(rest) and _load(daemon, address, {})
        return InstallChange(files.path, is_changed, is_restarted)


def _load(daemon: ContainerdDaemon, address: str, runtime: Table) -> bool:
    """Restart containerd unless it runs with `runtime` (empty: without Bootseer's).

    Return whether it was restarted.
    """
    if daemon.has_loaded(address, runtime) == bool(runtime):
        return False
    daemon.restart()
    deadline_s = time.monotonic() + RESTART_S
    while True:
        with contextlib.suppress(UnavailableError):
            if daemon.has_loaded(address, runtime) == bool(runtime):
                return True
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"containerd did not come back within {RESTART_S:.0f} s with its new "
                "configuration; the old one is back: see containerd's log on this node"
            )
        time.sleep(0.2)


class _ConfigFiles:
    """Configuration file to edit: containerd's own, or the template from which k3s makes it."""

    def __init__(self, daemon: ContainerdDaemon) -> None:
        self._main = daemon.on_node(daemon.config)
        self._is_k3s = "rancher" in daemon.config.parts
        shown = daemon.config
        if self._is_k3s:
            version = parse(self.loaded_text(), str(shown)).get("version")
            shown = shown.with_name(f"config{'-v3' if version == 3 else ''}.toml.tmpl")
        self.path = shown
        self._file = daemon.on_node(shown)
        _remove_temporary_files({self._main.parent, self._file.parent})

    def loaded_text(self) -> str:
        """Return containerd's file, or a minimal configuration if it has none."""
        try:
            return self._main.read_text()
        except FileNotFoundError:
            return new_file(2)

    def is_new(self) -> bool:
        """Return whether containerd had no file before Bootseer."""
        return without_block(self.loaded_text()) in map(new_file, (2, 3))

    def is_only_ours(self, plain: str) -> bool:
        """Return whether Bootseer made the file, given its text without Bootseer's lines."""
        return plain in ((_K3S_TEMPLATE,) if self._is_k3s else map(new_file, (2, 3)))

    def head(self, plain: str) -> str:
        """Return the text before Bootseer's lines in the file to write."""
        return without_block(self.read() or _K3S_TEMPLATE) if self._is_k3s else plain

    def read(self) -> str | None:
        """Return the file's text, or None if there is no file."""
        try:
            return self._file.read_text()
        except FileNotFoundError:
            return None

    def write(self, text: str | None) -> None:
        """Replace the file atomically and durably; None removes it. Symbolic links are kept."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            self._file.unlink(missing_ok=True)
        else:
            temporary = self._file.with_name(f"{TEMPORARY_PREFIX}{os.urandom(8).hex()}")
            try:
                with temporary.open("w") as file:
                    with contextlib.suppress(FileNotFoundError):
                        os.fchmod(file.fileno(), self._file.stat().st_mode & 0o7777)
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._file)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        folder = os.open(self._file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def keep_backup(self, text: str) -> None:
        """Save the original text beside the file, for people."""
        if text and not self._is_k3s:
            self._backup().write_text(text)

    def drop_backup(self, text: str) -> None:
        """Remove the saved original if it equals `text`."""
        with contextlib.suppress(FileNotFoundError):
            if self._backup().read_text() == text:
                self._backup().unlink()

    def _backup(self) -> Path:
        return self._file.with_name(f"{self._file.name}.before-bootseer")


def _remove_temporary_files(folders: Iterable[Path]) -> None:
    """Remove temporary files of killed installers. The caller holds the lock."""
    for folder in folders:
        for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _locked(daemon: ContainerdDaemon) -> Iterator[_ConfigFiles]:
    """Hold the node's installer lock."""
    folder = daemon.on_node(daemon.config).parent
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        lock_within(fd, _LOCK_S)
        yield _ConfigFiles(daemon)
    finally:
        os.close(fd)
