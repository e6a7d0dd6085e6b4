"""Table of the caches that frameworks name by environment variables. Pure (no I/O).

An entry says which packages must be installed for the cache to be of use, and which facts decide
whether a cached file can be used. cuDNN and NCCL have no entry: cuDNN writes no cache files, and
NCCL's findings about a node's topology hold for that node alone and cost less to find than to
fetch.
"""

from msgspec import Struct

CPU, GPU, COMPILER = "cpu", "gpu", "compiler"
"""Facts beside package versions: instruction set; GPUs and their driver; compilers."""
EVERYTHING = frozenset({CPU, GPU, COMPILER})

_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
_TORCH = ("torch", *_TRITON)


class KnownCache(Struct, frozen=True, kw_only=True):
    """A cache of a framework."""

    variable: str
    packages: tuple[str, ...] = ()
    """Packages (PEP 503 names), at least one of which must be installed; empty: no condition."""
    decided_by: tuple[str, ...] = ()
    """Packages whose versions decide whether a cached file can be used."""
    facts: frozenset[str] = EVERYTHING
    vendor: str = ""
    """Maker of a GPU that must be present ("nvidia" or "amd"); empty: no GPU needed."""
    is_set: bool = True
    """Whether Bootseer sets the variable, to a folder of its own, if it is not set."""
    instead: tuple[str, ...] = ()
    """Other variables for the folder; Bootseer sets its own only if none of these is set."""
    ordinary: str = ""
    """Default folder below HOME with data that a job may be unable to make again.

    If the folder has contents, Bootseer leaves the variable alone.
    """


KNOWN = (
    KnownCache(variable="TORCHINDUCTOR_CACHE_DIR", packages=("torch",), decided_by=_TORCH),
    KnownCache(
        variable="TRITON_CACHE_DIR", packages=_TRITON, decided_by=_TORCH, instead=("TRITON_HOME",)
    ),
    KnownCache(
        variable="TORCH_EXTENSIONS_DIR", packages=("torch",), decided_by=("torch", "deepspeed")
    ),
    KnownCache(variable="CUDA_CACHE_PATH", facts=frozenset({GPU}), vendor="nvidia"),
    KnownCache(variable="MIOPEN_USER_DB_PATH", decided_by=_TORCH, vendor="amd"),
    KnownCache(variable="MIOPEN_CUSTOM_CACHE_DIR", decided_by=_TORCH, vendor="amd"),
    KnownCache(
        variable="NUMBA_CACHE_DIR",
        packages=("numba",),
        decided_by=("numba", "llvmlite", "numpy"),
        facts=frozenset({CPU, GPU}),
    ),
    # Setting this variable would turn the cache on, which is the program's decision.
    KnownCache(
        variable="JAX_COMPILATION_CACHE_DIR",
        packages=("jax",),
        decided_by=("jax", "jaxlib"),
        is_set=False,
    ),
    KnownCache(
        variable="HF_DATASETS_CACHE",
        packages=("datasets",),
        decided_by=("datasets", "pyarrow"),
        facts=frozenset(),
        instead=("HF_HOME", "XDG_CACHE_HOME"),
        ordinary=".cache/huggingface/datasets",
    ),
)

MEGATRON_OPTION = "--data-cache-path"
"""Option by which a command of Megatron-LM names the folder of its dataset indexes."""

CACHED_PACKAGES = frozenset(name for one in KNOWN for name in one.packages)
"""Packages of which one at least must be installed for a cache in the table that needs no GPU."""

ALL_PACKAGES = tuple(sorted({name for one in KNOWN for name in (*one.packages, *one.decided_by)}))
"""Packages that decide for a folder named by `--keep`, whose contents are not known."""

USER_CHANGERS = frozenset(
    (
        *("sudo", "su", "gosu", "su-exec", "setpriv", "runuser", "setuidgid", "chroot", "doas"),
        *("docker", "podman", "apptainer", "singularity", "enroot", "srun", "ssh", "unshare"),
    )
)
"""Programs that run their command as another user, in another root or on another node.

Such a command may be unable to write to folders of this user.
"""


def data_cache_path(command: tuple[str, ...]) -> str:
    """Return the folder that a command of Megatron-LM names for its indexes, or "". Pure."""
    for word, behind in zip(command, (*command[1:], ""), strict=True):
        if word == MEGATRON_OPTION:
            return behind
        if word.startswith(MEGATRON_OPTION + "="):
            return word.partition("=")[2]
    return ""
