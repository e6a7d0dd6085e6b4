"""Facts about this machine that decide whether compiled code can be used: CPU, GPUs, compilers.

Reads /proc and /sys, and runs compilers to get their version; changes nothing. A fact that cannot
be found out gets a value of its own, which equals no other. Stateless.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bootseer.linux.processes import kill_child, reap, wait_readable
from bootseer.linux.root_paths import find_program, resolve_in_root
from bootseer.snapshots.key_parts import Part

if TYPE_CHECKING:
    from bootseer.snapshots.python import Runner
from bootseer.linux.root_paths import WorkingDirectory

_log = logging.getLogger(__name__)

NONE = "none"
_COMPILER_S = 5.0
_OUTPUT_BYTES_MAX = 1 << 16
# CPU flags that stand for instructions. Others stand for mitigations in the kernel and microcode,
# which differ between nodes that can run the same code.
_INSTRUCTIONS = (
    r"(ssse|sse|avx|amx|fma|bmi|f16c|v?aes|sha|v?pclmul|gfni|popcnt|abm|movbe|adx|rdrand|rdseed"
    r"|cmpxchg|cx16|lahf|xsave|movdir|serialize|sve|sme|asimd|neon|crc32|atomics|fp|i8mm|bf16)\w*"
)
_VERSION = re.compile(r"\d+(\.\d+)+")


def cpu_parts(proc: Path = Path("/proc")) -> list[Part]:
    """Return the CPU's architecture and the names of its instruction sets."""
    flags = ""
    try:
        with (proc / "cpuinfo").open(encoding="utf-8", errors="replace") as lines:
            found = (line for line in lines if re.match(r"(flags|Features)\s*:", line))
            flags = next(found, "").partition(":")[2]
    except OSError as error:
        _log.debug("the processor's instructions are not known: %s", error)
    known = sorted({word for word in flags.split() if re.fullmatch(_INSTRUCTIONS, word)})
    return [
        Part("machine", os.uname().machine),
        Part("cpu instructions", " ".join(known) or NONE),
    ]


def gpu_parts(root: Path = Path("/")) -> list[Part]:
    """Return the models of the GPUs, each once, and the version of their driver."""
    models = {f"nvidia {one}" for one in _nvidia_models(root)}
    models |= {f"amd {one}" for one in _amd_targets(root)}
    return [
        Part("driver", _driver(root) or NONE),
        Part("gpu", ", ".join(sorted(models)) or NONE),
    ]


def vendors(parts: list[Part]) -> set[str]:
    """Return the makers of the GPUs in `gpu_parts`. Pure."""
    text = next((part.value for part in parts if part.name == "gpu"), NONE)
    return {word.split()[0] for word in text.split(", ") if word != NONE}


def _nvidia_models(root: Path) -> set[str]:
    found = set()
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        match = re.search(r"^Model:\s*(.+)$", _text(path), re.MULTILINE)
        if match:
            found.add(match[1].strip())
    return found


def _amd_targets(root: Path) -> set[str]:
    found = set()
    for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/properties"):
        match = re.search(r"^gfx_target_version (\d+)$", _text(path), re.MULTILINE)
        if match and match[1] != "0":
            found.add(f"gfx {match[1]}")
    return found


def _driver(root: Path) -> str:
    nvidia = re.search(r"Module\D*([\d.]+)", _text(root / "proc/driver/nvidia/version"))
    amd = _text(root / "sys/module/amdgpu/version").strip()
    found = [f"nvidia {nvidia[1]}"] if nvidia else []
    return ", ".join([*found, *([f"amdgpu {amd}"] if amd else [])])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:_OUTPUT_BYTES_MAX]
    except OSError:
        return ""


def compiler_parts(
    place: WorkingDirectory, environ: Mapping[str, str], runner: "Runner | None"
) -> list[Part]:
    """Return the versions of the compilers that frameworks call: CXX or g++, CC or gcc, CUDA's."""
    search_path = environ.get("PATH") or os.defpath
    parts = []
    for variable, names in (("CXX", ("g++", "clang++")), ("CC", ("gcc", "clang"))):
        named = environ.get(variable, "").split()[:1]
        words = named or names
        programs = (find_program(place.root, w, search_path, place.directory) for w in words)
        program = next(filter(None, programs), None)
        version = _compiler_version(program, environ, runner) if program else NONE
        parts.append(Part(f"compiler {variable}", version))
    return [*parts, Part("cuda toolkit", _cuda_toolkit(place, environ, search_path))]


def _compiler_version(program: str, environ: Mapping[str, str], runner: "Runner | None") -> str:
    words = [program, "--version"]
    try:
        output = (
            _output(words, environ) if runner is None else _output_inside(words, environ, runner)
        )
    except (OSError, ValueError) as error:
        _log.debug("cannot ask %s for its version: %s", program, error)
        output = b""
    line = output.decode("utf-8", "replace").partition("\n")[0]
    if not line:
        return f"unknown {program}"
    # The first word is the path by which the program was called: leave it out.
    return f"{program.rpartition('/')[2]} {line.partition(' ')[2]}".strip()


def _output(words: Sequence[str], environ: Mapping[str, str]) -> bytes:
    """Return the output of a program of this host, 64 KiB at most. Raises: OSError.

    Without `subprocess`, whose import takes longer than a compiler does.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            null = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
            pid = os.posix_spawn(
                words[0],
                list(words),
                {**environ, "LC_ALL": "C"},
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs, 1), null],
            )
        finally:
            os.close(theirs)
        output = b""
        try:
            while wait_readable([ours], _COMPILER_S) and (piece := os.read(ours, 4096)):
                output += piece[: _OUTPUT_BYTES_MAX - len(output)]
        finally:
            # A program that has closed its output but goes on running is killed.
            if reap(pid, _COMPILER_S) is None:
                kill_child(pid)
    finally:
        os.close(ours)
    return output


def _output_inside(words: Sequence[str], environ: Mapping[str, str], runner: "Runner") -> bytes:
    import subprocess

    try:
        done = runner(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environ, "LC_ALL": "C"},
            timeout=_COMPILER_S,
        )
    except subprocess.SubprocessError as error:
        raise ValueError(str(error)) from None
    return (done.stdout or b"")[:_OUTPUT_BYTES_MAX]


def _cuda_toolkit(place: WorkingDirectory, environ: Mapping[str, str], search_path: str) -> str:
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = f"{home}/bin/nvcc"
    if not place.host(nvcc).is_file():
        nvcc = find_program(place.root, "nvcc", search_path, place.directory) or ""
    if not nvcc:
        return NONE
    folder = resolve_in_root(place.root, nvcc).parent.parent
    match = _VERSION.search(_text(folder / "version.json")) or _VERSION.search(folder.name)
    return match[0] if match else f"unknown {nvcc}"
