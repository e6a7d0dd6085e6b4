"""Makes small real wheels by hand: a wheel is a zip with three files of metadata."""

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
) -> Path:
    """`folder/name-version-py3-none-any.whl`; `scripts`: console script -> "module:function"."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    contents = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    if scripts:
        lines = [f"{script} = {entry}" for script, entry in scripts.items()]
        contents[f"{info}/entry_points.txt"] = "[console_scripts]\n" + "\n".join(lines) + "\n"
    record = []
    for path, text in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{path},sha256={digest.decode()},{len(text.encode())}")
    record.append(f"{info}/RECORD,,")
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path), text)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "\n".join(record) + "\n")
    return wheel
