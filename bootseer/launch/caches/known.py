"""The caches that frameworks name by variables. Pure (no I/O).

Each entry says which packages have to be there for the cache to be of use, and what decides whether
a file in it can be used. cuDNN and NCCL are not here: cuDNN writes no cache of files, and what NCCL
finds out about a node's topology costs less to find than to fetch, and holds for that node alone.
"""

from msgspec import Struct

CPU, GPU, COMPILER = "cpu", "gpu", "compiler"
"""What may decide beside packages: the instruction set; the GPUs and their driver; compilers."""
EVERYTHING = frozenset({CPU, GPU, COMPILER})

_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
_TORCH = ("torch", *_TRITON)


class Known(Struct, frozen=True, kw_only=True):
    """One cache of one framework."""

    variable: str
    packages: tuple[str, ...] = ()
    """Of these one has to be installed (names as PEP 503 normalises them); (): none has to."""
    decided_by: tuple[str, ...] = ()
    """Packages whose versions decide whether a file can be used."""
    facts: frozenset[str] = EVERYTHING
    vendor: str = ""
    """The maker of the GPU that has to be there: "nvidia", "amd", or any."""
    is_set: bool = True
    """Whether the variable is set to a folder of ours where nobody has set it."""
    instead: tuple[str, ...] = ()
    """Variables that choose the folder as well: where one is set, ours is not."""
    ordinary: str = ""
    """The folder below HOME that is used without the variable, where it holds data that a job may
    be unable to make again: where that is filled, the variable is left alone."""


KNOWN = (
    Known(variable="TORCHINDUCTOR_CACHE_DIR", packages=("torch",), decided_by=_TORCH),
    Known(
        variable="TRITON_CACHE_DIR", packages=_TRITON, decided_by=_TORCH, instead=("TRITON_HOME",)
    ),
    Known(variable="TORCH_EXTENSIONS_DIR", packages=("torch",), decided_by=("torch", "deepspeed")),
    Known(variable="CUDA_CACHE_PATH", facts=frozenset({GPU}), vendor="nvidia"),
    Known(variable="MIOPEN_USER_DB_PATH", decided_by=_TORCH, vendor="amd"),
    Known(variable="MIOPEN_CUSTOM_CACHE_DIR", decided_by=_TORCH, vendor="amd"),
    Known(
        variable="NUMBA_CACHE_DIR",
        packages=("numba",),
        decided_by=("numba", "llvmlite", "numpy"),
        facts=frozenset({CPU, GPU}),
    ),
    # Setting it turns the cache on, which is the program's decision.
    Known(
        variable="JAX_COMPILATION_CACHE_DIR",
        packages=("jax",),
        decided_by=("jax", "jaxlib"),
        is_set=False,
    ),
    Known(
        variable="HF_DATASETS_CACHE",
        packages=("datasets",),
        decided_by=("datasets", "pyarrow"),
        facts=frozenset(),
        instead=("HF_HOME", "XDG_CACHE_HOME"),
        ordinary=".cache/huggingface/datasets",
    ),
)

MEGATRON_OPTION = "--data-cache-path"
"""Megatron-LM names the folder of its dataset indexes by an option of its command."""

ALL_PACKAGES = tuple(sorted({name for one in KNOWN for name in (*one.packages, *one.decided_by)}))
"""What decides for a folder that `--keep` names: nobody knows what lies in it."""

USER_CHANGERS = frozenset(
    (
        *("sudo", "su", "gosu", "su-exec", "setpriv", "runuser", "setuidgid", "chroot", "doas"),
        *("docker", "podman", "apptainer", "singularity", "enroot", "srun", "ssh", "unshare"),
    )
)
"""Programs behind which the job is another user's, or on another root or node, where a folder of
this user cannot be written to."""


def data_cache_path(command: tuple[str, ...]) -> str:
    """The folder that a command of Megatron-LM names for its indexes, or "". Pure."""
    for word, behind in zip(command, (*command[1:], ""), strict=True):
        if word == MEGATRON_OPTION:
            return behind
        if word.startswith(MEGATRON_OPTION + "="):
            return word.partition("=")[2]
    return ""
