"""Wheels: small real ones made by hand, and published ones fetched from PyPI."""

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_DEADLINE_S = 240.0


def fetched_wheel(requirement: str, folder: Path, error: type[Exception]) -> Path:
    """Fetch the wheel of `NAME==VERSION --hash=sha256:...` into an empty folder by pip.

    Raises: `error` if the wheel cannot be fetched.
    """
    listed = folder / "requirements.txt"
    listed.write_text(f"{requirement}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(folder)]
    name = requirement.partition(" ")[0]
    try:
        subprocess.run(
            [*pip, *options, "--requirement", str(listed)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise error(f"fetching {name} took over {_DEADLINE_S:g} s") from None
    except subprocess.CalledProcessError as failure:
        lines = (failure.stderr or failure.stdout or "no words").strip().splitlines()
        raise error(f"cannot fetch {name} from PyPI: {lines[-1]}") from None
    return next(folder.glob("*.whl"))


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str],
    *,
    requires: Sequence[str] = (),
    scripts: Mapping[str, str] | None = None,
) -> Path:
    """Write `folder/NAME-VERSION-py3-none-any.whl`, and return its path.

    `scripts` maps the names of console scripts to "module:function".
    """
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
