"""Ways of restoring the environment on a node, as commands."""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.containers.node import EmptyNode
from bench.env.floor import compile_floor, write_plan
from bench.env.recipe import (
    ENVIRONMENT,
    IMPORTS,
    PLACE,
    PYTHON,
    SNAPSHOT,
    UV_CACHE,
    uv_install,
)
from bench.env.site import EnvironmentSite, bootseer
from bootseer.blob.pack.frame_writer import usable_cpus

WORKLOAD = "import"
IMPORT = [str(ENVIRONMENT / "bin/python"), "-c", IMPORTS]
DEADLINE_S = 600.0


def _nothing(site: EnvironmentSite) -> None:
    pass


def _nothing_on(site: EnvironmentSite, node: EmptyNode) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RestoreMethod:
    """Way of restoring the environment."""

    name: str
    description: str
    restore: Callable[[EnvironmentSite, EmptyNode], list[str]]
    """Timed command before the import."""
    prepare: Callable[[EnvironmentSite], None] = _nothing
    """Preparation that is made once and not timed."""
    start: Callable[[EnvironmentSite, EmptyNode], None] = _nothing_on
    """Earlier work of a node; not timed."""
    tree: Callable[[EnvironmentSite], Path | None] = lambda site: None
    """Environment that the node has from the beginning, if any."""


def _shell(script: str) -> list[str]:
    return ["sh", "-ec", script]


def _pip(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    pip = f"{ENVIRONMENT}/bin/python -m pip --quiet --isolated --disable-pip-version-check"
    links = f"--no-index --find-links {site.near / 'wheels'} -r {site.kept.requirements}"
    install = f"PIP_CONFIG_FILE=/dev/null {pip} install --no-cache-dir {links}"
    return _shell(f"{PYTHON} -m venv {ENVIRONMENT} && {install}")


def _uv(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    return _shell(uv_install(site.near / "wheels", site.kept.requirements))


def _uv_over_line(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    return _shell(uv_install(site.wheels_url, site.kept.requirements))


def _fill_uv_cache(site: EnvironmentSite) -> None:
    def fill() -> None:
        with site.node("uv-fill") as node:
            node.run(_uv(site, node), timeout_s=DEADLINE_S)
            _copy_tree(node.folder / UV_CACHE.name, site.scratch / UV_CACHE.name)

    site.once("uv cache", fill)


def _have_uv_cache(site: EnvironmentSite, node: EmptyNode) -> None:
    _copy_tree(site.scratch / UV_CACHE.name, node.folder / UV_CACHE.name)


def _uv_warm(link_mode: str) -> Callable[[EnvironmentSite, EmptyNode], list[str]]:
    return lambda site, node: _shell(f"{_uv(site, node)[-1]} --link-mode {link_mode}")


def _tar_zst(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    archive = site.near / site.kept.tar.name
    return _shell(f"zstd -qdc {archive} | tar -xf - -C {PLACE}")


def _venv_pack(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    archive = site.near / site.kept.packed.name
    return _shell(f"mkdir {ENVIRONMENT} && tar -xzf {archive} -C {ENVIRONMENT}")


def _copy(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    return ["cp", "-a", str(site.kept.tree), str(ENVIRONMENT)]


def _have_copy(site: EnvironmentSite, node: EmptyNode) -> None:
    _copy_tree(site.kept.tree, node.folder / "tree")


def _copy_links(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    return ["cp", "-al", str(PLACE / "tree"), str(ENVIRONMENT)]


def _copy_tree(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-a", str(source), str(target)], timeout=DEADLINE_S, check=True)


def _prepare_floor(site: EnvironmentSite) -> None:
    compile_floor(site.packages, site.near / "floor")
    write_plan(site.tree, site.near / "plan")


def _floor(site: EnvironmentSite, node: EmptyNode) -> list[str]:
    inputs = [str(site.near / "plan"), str(site.blob)]
    return [str(site.near / "floor"), *inputs, str(ENVIRONMENT), str(usable_cpus())]


def _restore(store: str, mode: str) -> list[str]:
    return bootseer(store, "--workload", WORKLOAD, "snapshot", "restore", SNAPSHOT, "--mode", mode)


def _restore_near(mode: str) -> Callable[[EnvironmentSite, EmptyNode], list[str]]:
    return lambda site, node: _restore(str(site.near_store), mode)


def _restore_over_line(mode: str) -> Callable[[EnvironmentSite, EmptyNode], list[str]]:
    return lambda site, node: _restore(site.store_url, mode)


def _have_tree(mode: str) -> Callable[[EnvironmentSite, EmptyNode], None]:
    """Return the function for a node on which an earlier job has restored the snapshot."""

    def start(site: EnvironmentSite, node: EmptyNode) -> None:
        node.run(_restore(str(site.near_store), mode), timeout_s=DEADLINE_S)
        if mode == "link":
            node.run(bootseer("", "unmount", str(ENVIRONMENT)), timeout_s=DEADLINE_S)
        else:
            node.run(["rm", "-rf", str(ENVIRONMENT)], timeout_s=DEADLINE_S)

    return start


def _record(site: EnvironmentSite) -> None:
    """Record a mount of the snapshot by an earlier job on another node."""

    def record() -> None:
        unmount = bootseer(site.store_url, "unmount", str(ENVIRONMENT))
        wait = bootseer(site.store_url, "status", "--wait", "180")
        with site.node("record") as node:
            for command in (_restore(site.store_url, "mount"), IMPORT, unmount, wait):
                node.run(command, timeout_s=DEADLINE_S)

    site.once("record", record)


PIP = RestoreMethod("pip", "venv and pip install; the wheels lie on the node", _pip)
UV = RestoreMethod("uv", "uv venv and uv pip install, empty cache; the wheels lie on the node", _uv)
UV_LINE = RestoreMethod("uv line", "the same; the wheels come over the line", _uv_over_line)
UV_LINKS = RestoreMethod(
    "uv hard links", "uv, everything in its cache, hard links",
    _uv_warm("hardlink"), _fill_uv_cache, _have_uv_cache,
)  # fmt: skip
UV_COPIES = RestoreMethod(
    "uv copies", "uv, everything in its cache, copies",
    _uv_warm("copy"), _fill_uv_cache, _have_uv_cache,
)  # fmt: skip
TAR_ZST = RestoreMethod("zstd tar", "`zstd -d | tar x` of an archive on the node", _tar_zst)
VENV_PACK = RestoreMethod("venv-pack", "`tar xz` of a venv-pack archive on the node", _venv_pack)
COPY = RestoreMethod("cp -a", "`cp -a` of the tree on the node's disk", _copy)
COPY_LINKS = RestoreMethod(
    "cp -al", "`cp -al` of the tree on the node's disk", _copy_links, start=_have_copy
)
FLOOR = RestoreMethod(
    "C floor", "the snapshot's blob on the node, by a C program", _floor, _prepare_floor
)
EXTRACT_NEAR = RestoreMethod(
    "extract near", "`--mode extract`, the store is a folder on the node", _restore_near("extract")
)
LINK = RestoreMethod(
    "link", "`--mode link`, used on this node before: an overlay, or reflinks",
    _restore_near("link"), start=_have_tree("link"),
)  # fmt: skip
EXTRACT = RestoreMethod(
    "extract", "`--mode extract`, the store behind the line", _restore_over_line("extract")
)
MOUNT = RestoreMethod(
    "mount", "`--mode mount`, the store behind the line; an earlier start was recorded",
    _restore_over_line("mount"), _record,
)  # fmt: skip
LOCAL = RestoreMethod(
    "local", "the tree lies on the node's disk already", lambda site, node: ["true"],
    tree=lambda site: site.kept.tree,
)  # fmt: skip

ALL = (
    PIP, UV, UV_LINE, UV_LINKS, UV_COPIES, TAR_ZST, VENV_PACK, COPY, COPY_LINKS, FLOOR,
    EXTRACT_NEAR, LINK, EXTRACT, MOUNT, LOCAL,
)  # fmt: skip


def first_start(site: EnvironmentSite) -> tuple[list[list[str]], Path]:
    """Return commands for nodes that start at once with an empty store, and a file.

    Each run of the set-up adds a line to the file.
    """
    number = sum(1 for _ in site.scratch.glob("ran-*"))
    ran = site.scratch / f"ran-{number}"
    ran.touch()
    script = site.scratch / f"set-up-{number}.sh"
    install = uv_install(site.near / "wheels", site.kept.requirements)
    script.write_text(f"set -e\necho ran >> {ran}\n{install}\n")
    options = ["--setup", f"sh {script}", "--target", str(ENVIRONMENT)]
    store = f"{site.store_url}-first-{number}"
    return [bootseer(store, "run", *options, "--", *IMPORT)], ran
