"""Builds the wheel, installs it into a fresh environment and runs it outside the checkout.

`python -m tests.wheel` (see `make wheel-test`): too slow for pytest, and outside of the checkout.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from testbed.paths import REPOSITORY
from tests.support.demo_output import readme_output, without_figures

# Every package must have arrived through the three symlinks, under its own import name only.
_CHECK = """
import bootseer, bootseer.fuse.kernel, bootseer.prefetch, bootseer.snapshots, importlib.util, sys
assert "site-packages" in bootseer.__file__, bootseer.__file__
for name in ("fuse", "prefetch", "snapshots"):
    assert importlib.util.find_spec(name) is None, name
print("imports", bootseer.__version__)
"""


def _run(command: list[str], cwd: Path, timeout_s: int = 600) -> None:
    print("+", " ".join(Path(command[0]).name if i == 0 else a for i, a in enumerate(command)))
    subprocess.run(command, cwd=cwd, check=True, timeout=timeout_s)


def _check_demo(bootseer: str, cwd: Path) -> None:
    """Run the demo, and compare the end of its output with the README's."""
    done = subprocess.run(
        [bootseer, "demo", "--quick"],
        cwd=cwd, check=True, timeout=600, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stderr, done.stdout, sep="\n")
    # A stage that this machine cannot show has one line, and no row in the table.
    left_out = set(re.findall(r"leaving out the (\w+)", done.stderr))
    shown = [line for line in readme_output() if line.split()[0] not in left_out]
    for output, is_stderr in ((done.stderr, True), (done.stdout, False)):
        wanted = [line for line in shown if line.startswith("demo: ") is is_stderr]
        found = [line for line in without_figures(output) if line and "leaving out" not in line]
        assert found[-len(wanted) :] == wanted, f"{found} instead of {wanted}"


def main() -> None:
    """Run all steps. Raises: CalledProcessError or AssertionError if the wheel is incomplete."""
    with tempfile.TemporaryDirectory(prefix="bootseer-wheel-") as name:
        work = Path(name)
        build = [sys.executable, "-m", "build", "--installer", "uv", "--wheel", "--outdir"]
        _run([*build, str(work), str(REPOSITORY)], work)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            tops = {entry.split("/")[0] for entry in archive.namelist()}
            assert tops == {"bootseer", wheel.name.rsplit("-py3", 1)[0] + ".dist-info"}, tops
            assert "bootseer/py.typed" in archive.namelist()
        environment = work / "environment"
        _run([sys.executable, "-m", "uv", "venv", "--quiet", str(environment)], work)
        python = str(environment / "bin/python")
        constraints = str(REPOSITORY / "constraints.txt")
        install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", python]
        _run([*install, "--constraint", constraints, str(wheel)], work)
        _run([python, "-I", "-c", _CHECK], work)
        bootseer = str(environment / "bin/bootseer")
        _run([bootseer, "--version"], work)
        _run([bootseer, "--help"], work)
        _run([bootseer, "doctor"], work)
        _check_demo(bootseer, work)


if __name__ == "__main__":
    main()
