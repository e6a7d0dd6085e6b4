"""Search for the caches of one start: the location, name and key of each.

This module alone decides which folders are kept, which variables are set, and which parts make a
key. The key decides whether a file can be used: a cache made by another compiler, driver, processor
or package version has another key, and files of two keys are never mixed. Reads the machine's state
and changes nothing.
"""

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from msgspec import Struct, field

from bootseer.base.redact import strip_logins
from bootseer.launch.caches.known import (
    ALL_PACKAGES,
    CPU,
    EVERYTHING,
    GPU,
    KNOWN,
    USER_CHANGERS,
    KnownCache,
    data_cache_path,
)
from bootseer.launch.caches.packages import python_of
from bootseer.launch.caches.records import own_folder
from bootseer.linux.processes import kill_child, reap, wait_readable
from bootseer.linux.root_paths import WorkingDirectory, find_program, resolve_in_root
from bootseer.settings.config import Settings
from bootseer.snapshots.key_parts import Part, fingerprint
from bootseer.snapshots.manifest import CACHE
from bootseer.snapshots.scan import target_path

if TYPE_CHECKING:
    from bootseer.snapshots.python import Answers, Runner

_INSIDE = "/run/bootseer/caches"
"""Path in a container of the folders that Bootseer names.

Not their path on the host, which a user other than root may be unable to reach. Being the same on
every node, the path may occur in a cache's files.
"""
_SHARED_KINDS = frozenset(
    b"nfs nfs4 lustre ceph cifs smb3 beegfs gpfs glusterfs 9p virtiofs afs wekafs panfs".split()
)


class KeepRequest(Struct, frozen=True):
    """Directories and kinds of caches that a start was asked to keep."""

    directories: tuple[str, ...] = ()
    automatic: bool = True
    """Whether to keep the caches that frameworks name by variables, too."""


class CacheJob(Struct, frozen=True):
    """A command whose caches are looked for, and the environment that it runs in."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    root: Path = field(default_factory=lambda: Path("/"))
    directory: str = ""
    """Working directory, inside the root; empty: this process's."""
    base: str = ""
    """Identity of the image; empty: the value of BOOTSEER_IMAGE."""
    runner: "Runner | None" = None
    """Runs a program in the job's root; None: run it as a child of this process."""
    binds: tuple[tuple[str, Path], ...] = ()
    """Bound folders of a container: pairs of the path inside and the folder of this host."""
    answers: "Answers" = field(default_factory=dict)
    """Answers of launchers of interpreters in this start."""

    @property
    def is_image(self) -> bool:
        """Whether the job runs in a root of its own."""
        return self.root != Path("/")

    @property
    def place(self) -> WorkingDirectory:
        """Working directory, for finding the job's paths on this host."""
        return WorkingDirectory(self.root, self.directory or str(Path.cwd()))


class Cache(Struct, frozen=True, kw_only=True):
    """A folder to keep between starts, with its key."""

    name: str
    """Name of the variable for the folder, or the folder's path."""
    path: str
    """Path at which the job sees the folder."""
    folder: Path
    """The folder on this host."""
    is_ours: bool
    """Whether only Bootseer chose the folder, so that all its files were made under this key."""
    sets: bool
    """Whether the variable is to be set to the path."""
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        """Fingerprint of the parts."""
        return fingerprint(self.parts)

    @property
    def target(self) -> bytes:
        """Path as the target of a snapshot."""
        return target_path(self.path, "/")


def find_caches(settings: Settings, request: KeepRequest, job: CacheJob) -> list[Cache]:
    """Return the caches of a start, one for each folder, ordered by name.

    Raises: InvalidInputError for a named folder that cannot be kept.
    """
    finder = _Finder(settings, job)
    found = [finder.from_option(text) for text in request.directories]
    changes_user = {os.path.basename(word) for word in job.command[:3]} & USER_CHANGERS
    if request.automatic and not changes_user:
        found += finder.automatic()
    by_path = {cache.path: cache for cache in reversed(found)}
    return sorted(by_path.values(), key=lambda cache: cache.name)


class _Finder:
    def __init__(self, settings: Settings, job: CacheJob) -> None:
        self._settings = settings
        self._job = job
        self._place = job.place
        self._gpu = gpu_parts()
        self._facts: dict[str, list[Part]] = {GPU: self._gpu}
        self._python = python_of(self._place, job.command, job.environ, job.answers, job.runner)
        self._versions = self._python.versions() if self._python is not None else {}

    def from_option(self, text: str) -> Cache:
        """Return the cache for a folder that `--keep` names."""
        path = os.fsdecode(target_path(text, self._place.directory))
        return self._at(path, path, ALL_PACKAGES, EVERYTHING)

    def automatic(self) -> list[Cache]:
        """Return the caches that frameworks name by variables, and the one of Megatron-LM."""
        found = []
        for known in KNOWN:
            if (cache := self._from_table(known)) is not None:
                found.append(cache)
        if path := data_cache_path(self._job.command):
            path = os.fsdecode(target_path(path, self._place.directory))
            if not self._is_shared(path):
                found.append(self._at(path, path, ("megatron-core", "numpy"), frozenset()))
        return found

    def _from_table(self, known: KnownCache) -> Cache | None:
        environ = self._job.environ
        named = environ.get(known.variable, "")
        if not self._is_of_use(known):
            return None
        if named:
            path = os.fsdecode(target_path(named, self._place.directory))
            if self._is_shared(path):
                return None
            return self._at(known.variable, path, known.decided_by, known.facts)
        if not known.is_set or any(environ.get(name) for name in known.instead):
            return None
        if known.ordinary and self._is_filled(known.ordinary):
            return None
        return self._in_own_folder(known)

    def _is_of_use(self, known: KnownCache) -> bool:
        if known.vendor and known.vendor not in vendors(self._gpu):
            return False
        return not known.packages or any(name in self._versions for name in known.packages)

    def _is_filled(self, below_home: str) -> bool:
        home = self._job.environ.get("HOME", "")
        try:
            return bool(home) and any(self._place.host(f"{home}/{below_home}").iterdir())
        except OSError:
            return False

    def _is_shared(self, path: str) -> bool:
        """Return whether the folder is on a file system that other nodes see, too."""
        from bootseer.linux import mount_table  # here, since few jobs name a folder

        folder = self._host(path)
        while not folder.is_dir() and folder != folder.parent:
            folder = folder.parent
        device = folder.stat().st_dev
        kinds = {one.kind for one in mount_table.mount_points() if one.device == device}
        return bool(kinds & _SHARED_KINDS) or any(kind.startswith(b"fuse") for kind in kinds)

    def _host(self, path: str) -> Path:
        for target, source in self._job.binds:
            if PurePosixPath(path).is_relative_to(target):
                return source / PurePosixPath(path).relative_to(target)
        return self._place.host(path)

    def _is_bound(self, path: str) -> bool:
        return any(PurePosixPath(path).is_relative_to(target) for target, _ in self._job.binds)

    def _parts(self, name: str, packages: Sequence[str], facts: frozenset[str]) -> list[Part]:
        base = self._job.base or self._job.environ.get("BOOTSEER_IMAGE", "")
        version = self._python.version if self._python else "none"
        return [
            Part(CACHE, name),
            Part("workload", self._settings.workload),
            Part("image", strip_logins(base)),
            Part("interpreter", version),
            *(
                Part(f"package {one}", self._versions[one])
                for one in sorted(set(packages))
                if one in self._versions
            ),
            *(part for fact in sorted(facts) for part in self._fact(fact)),
        ]

    def _fact(self, fact: str) -> list[Part]:
        if fact not in self._facts:
            self._facts[fact] = (
                cpu_parts()
                if fact == CPU
                else compiler_parts(self._place, self._job.environ, self._job.runner)
            )
        return self._facts[fact]

    def _in_own_folder(self, known: KnownCache) -> Cache:
        parts = self._parts(known.variable, known.decided_by, known.facts)
        short = known.variable.lower().replace("_", "-")
        folder = own_folder(self._settings.cache_dir, fingerprint(parts), short)
        path = f"{_INSIDE}/{short}" if self._job.is_image else str(folder)
        return Cache(
            name=known.variable,
            path=path,
            folder=folder,
            is_ours=True,
            sets=True,
            parts=(*parts, Part("folder", path)),
        )

    def _at(self, name: str, path: str, packages: Sequence[str], facts: frozenset[str]) -> Cache:
        """Return the cache at a path that the job, or its user, has named."""
        parts = [*self._parts(name, packages, facts), Part("folder", path)]
        folder = self._host(path)
        # The root of an image is removed after its job, so the folder is Bootseer's, bound there.
        is_ours = self._job.is_image and not self._is_bound(path)
        if is_ours:
            short = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
            folder = own_folder(self._settings.cache_dir, fingerprint(parts), short)
        return Cache(
            name=name,
            path=path,
            folder=folder,
            is_ours=is_ours,
            sets=False,
            parts=tuple(parts),
        )


# ---- facts about the machine ---------------------------------------------------------------------

# They decide whether compiled code can be used: CPU, GPUs, compilers. A fact that cannot be found
# out gets a value of its own, which equals no other.


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
