"""Wheels made from installed packages, so that a real `pip install` needs no network."""

import base64
import hashlib
import importlib.metadata
import zipfile
from pathlib import Path

from bootseer.errors import from_oserror

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
