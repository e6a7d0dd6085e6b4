"""Image and wheels of the demo, made from files of this machine, so that it needs no network.

The image is an OCI layout of root file systems with the interpreter, its standard library and
packages, a shell, and the shared libraries that they need. The wheels are made from installed
packages, for a real `pip install`.
"""

import base64
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

from bootseer.errors import BootseerError, UnsupportedError, from_oserror

_COMMANDS = ("sh", "cat", "ls", "env")
_EMPTY = ("proc", "sys", "dev", "tmp", "etc", "root", "run", "opt", "var/tmp", "usr/bin")
# Large, and not needed by any program of the demo.
_UNWANTED = shutil.ignore_patterns(
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "config-*", "idlelib"
)
_LDD_BATCH = 200
_TIMEOUT_S = 60


def _standard_library() -> Path:
    return Path(sysconfig.get_paths(vars={"installed_base": sys.base_prefix})["stdlib"])


def site_packages_in_image() -> Path:
    """Return the folder in which the image's interpreter, the base one, looks for packages."""
    program = "import site; print(site.getsitepackages()[0])"
    interpreter = Path(sys.executable).resolve()
    result = subprocess.run(
        [interpreter, "-I", "-c", program],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    path = result.stdout.strip()
    if result.returncode != 0 or not path.startswith("/"):
        raise UnsupportedError(f"{interpreter} does not say where its packages are")
    return Path(path)


def installed_packages() -> list[Path]:
    """Return the folders from which this interpreter imports installed packages."""
    paths = sysconfig.get_paths()
    folders = dict.fromkeys(Path(paths[name]).resolve() for name in ("purelib", "platlib"))
    return [folder for folder in folders if folder.is_dir()]


def _is_elf(path: Path) -> bool:
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def shared_libraries(binaries: Iterable[Path]) -> Iterator[Path]:
    """Yield the files of this host that the dynamic linker would load for `binaries`."""
    pending = list(binaries)
    environ = {**os.environ, "LC_ALL": "C"}
    for begin in range(0, len(pending), _LDD_BATCH):
        batch = [str(path) for path in pending[begin : begin + _LDD_BATCH]]
        # ldd fails for a static binary among them; what it printed of the others still counts.
        result = subprocess.run(
            ["ldd", *batch],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environ,
            check=False,
        )
        for line in result.stdout.splitlines():
            for word in line.split():
                if word.startswith("/") and not word.endswith(":"):
                    yield Path(word)


def _copy(source: Path, root: Path) -> None:
    target = root / source.relative_to("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source.resolve(), target)


def build_base(root: Path, packages: Sequence[Path] = ()) -> None:
    """Copy the interpreter, its standard library and a few commands to `root`.

    All libraries that they, and the modules in the folders `packages`, need are copied as well.
    Raises: UnsupportedError if a tool is missing; NoSpaceError, and other errors of the disk.
    """
    if shutil.which("ldd") is None:
        raise UnsupportedError("the demo's image needs `ldd`, which is part of every C library")
    try:
        for name in _EMPTY:
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "tmp").chmod(0o1777)
        library = _standard_library()
        target = root / library.relative_to("/")
        shutil.copytree(library, target, symlinks=True, ignore=_UNWANTED, dirs_exist_ok=True)
        interpreter = Path(sys.executable).resolve()
        binaries = [interpreter, *target.glob("lib-dynload/*.so")]
        _copy(interpreter, root)
        for name in _COMMANDS:
            command = shutil.which(name)
            if command is not None:
                _copy(Path(command), root)
                binaries.append(Path(command))
        modules = [path for folder in packages for path in folder.rglob("*.so*")]
        inside = tuple(str(folder) for folder in packages)
        for path in shared_libraries([*binaries, *filter(_is_elf, modules)]):
            # Packages carry libraries of their own; those come with the packages.
            if not str(path).startswith(inside) and path.exists():
                _copy(path, root)
        for link in ("usr/bin/python3", "bin/sh"):
            path = root / link
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.symlink_to(interpreter if "python" in link else Path("/usr/bin/sh"))
        (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    except OSError as error:
        raise from_oserror(error, f"build the demo's root file system in {root}") from error


def build_packages(root: Path) -> None:
    """Copy every installed package to the folder of `root` where the image's interpreter looks.

    Raises: NoSpaceError, and other errors of the disk.
    """
    target = root / site_packages_in_image().relative_to("/")
    try:
        for folder in installed_packages():
            shutil.copytree(
                folder,
                target,
                symlinks=True,
                dirs_exist_ok=True,
                # An editable install of Bootseer names a checkout that the image does not have.
                ignore=shutil.ignore_patterns("__pycache__", "__editable__*", "bootseer*"),
            )
        ours = Path(__file__).resolve().parent.parent
        shutil.copytree(
            ours, target / "bootseer", ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    except OSError as error:
        raise from_oserror(error, f"copy the installed packages to {target}") from error


# ---- OCI layout ---------------------------------------------------------------------------------

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
# Names of machines in uname(2), and in OCI images (those of Go).
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOCK_BYTES = 1 << 20
_TAR_TIMEOUT_S = 300


def _add_bytes(layout: Path, data: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _add_layer(layout: Path, root: Path) -> tuple[dict[str, Any], str]:
    """Write a layer; return its descriptor and its diff id."""
    temporary = layout / "layer.tmp"
    plain, packed, size = hashlib.sha256(), hashlib.sha256(), 0
    command = ["tar", "--numeric-owner", "--owner=0", "--group=0", "--sort=name", "-C"]
    tar = subprocess.Popen([*command, str(root), "-cf", "-", "."], stdout=subprocess.PIPE)
    assert tar.stdout is not None
    compressor = zstandard.ZstdCompressor(level=3, threads=2).compressobj()
    with tar.stdout, temporary.open("wb") as file:
        while True:
            block = tar.stdout.read(_BLOCK_BYTES)
            plain.update(block)
            data = compressor.compress(block) if block else compressor.flush()
            packed.update(data)
            size += file.write(data)
            if not block:
                break
    if tar.wait(_TAR_TIMEOUT_S) != 0:
        raise BootseerError(f"tar failed on {root}; is the disk full?")
    temporary.rename(layout / "blobs/sha256" / packed.hexdigest())
    descriptor = {"mediaType": _LAYER, "digest": f"sha256:{packed.hexdigest()}", "size": size}
    return descriptor, f"sha256:{plain.hexdigest()}"


def write_layout(layout: Path, layers: list[Path], environment: Mapping[str, str]) -> int:
    """Write an OCI layout with one layer per root in `layers`; return the bytes of its layers.

    Raises: NoSpaceError, and other errors of the disk.
    """
    try:
        (layout / "blobs/sha256").mkdir(parents=True)
        written = [_add_layer(layout, root) for root in layers]
        config = {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": [f"{key}={value}" for key, value in environment.items()]},
            "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id in written]},
        }
        descriptor = _add_bytes(layout, json.dumps(config).encode(), _CONFIG)
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": descriptor,
            "layers": [layer for layer, _ in written],
        }
        reference = _add_bytes(layout, json.dumps(manifest).encode(), _MANIFEST)
        reference["annotations"] = {"org.opencontainers.image.ref.name": "demo:latest"}
        index = {"schemaVersion": 2, "manifests": [reference]}
        (layout / "index.json").write_text(json.dumps(index))
        (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    except OSError as error:
        raise from_oserror(error, f"write the demo's image to {layout}") from error
    return sum(layer["size"] for layer, _ in written)


# ---- wheels --------------------------------------------------------------------------------------

# Packages that are large, or that the demo does not need in its environment.
_LEFT_OUT = {"pyarrow", "numpy", "pip", "setuptools", "wheel", "bootseer", "mypy", "hypothesis"}
_MIN_FILES = 5


def _tag(distribution: importlib.metadata.Distribution) -> str | None:
    """Return the compressed tag set of PEP 425: "py2.py3-none-any" for two lines of tags."""
    text = distribution.read_text("WHEEL") or ""
    tags = [line[5:].strip().split("-") for line in text.splitlines() if line.startswith("Tag: ")]
    if not tags or any(len(tag) != 3 for tag in tags):
        return None
    return "-".join(".".join(dict.fromkeys(column)) for column in zip(*tags, strict=True))


def _write(distribution: importlib.metadata.Distribution, folder: Path) -> str | None:
    tag = _tag(distribution)
    files = [file for file in distribution.files or () if ".." not in file.parts]
    files = [file for file in files if file.suffix != ".pyc" and file.name != "RECORD"]
    if tag is None or len(files) < _MIN_FILES:
        return None
    base = distribution.metadata["Name"].replace("-", "_")
    name = f"{base}-{distribution.version}-{tag}.whl"
    record: list[str] = []
    information = ""
    with zipfile.ZipFile(folder / name, "w", zipfile.ZIP_STORED) as archive:
        for file in files:
            data = file.read_binary()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            archive.writestr(str(file), data)
            record.append(f"{file},sha256={digest},{len(data)}")
            if file.parts[0].endswith(".dist-info"):
                information = file.parts[0]
        record.append(f"{information}/RECORD,,")
        archive.writestr(f"{information}/RECORD", "\n".join(record) + "\n")
    return f"{distribution.metadata['Name']}=={distribution.version}"


def make_wheels(folder: Path) -> list[str]:
    """Write a wheel for each installed package of moderate size; return their requirements.

    Raises: NoSpaceError, and other errors of the disk.
    """
    requirements: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for distribution in importlib.metadata.distributions():
            name = (distribution.metadata["Name"] or "").lower()
            if name and name not in _LEFT_OUT and name not in requirements:
                requirement = _write(distribution, folder)
                if requirement is not None:
                    requirements[name] = requirement
    except OSError as error:
        raise from_oserror(error, f"make wheels in {folder}") from error
    return sorted(requirements.values())


# Commands that a set-up line in the container may use.
