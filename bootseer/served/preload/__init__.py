"""Preloading: Python workers are forked from a process that has done their imports already.

`launching` begins that process, the preloader, for a program that `programs` recognises. The
preloader runs as the job's own interpreter (`server`, `importing`, `checks`). `shim` is
the program that a launcher such as torchrun starts in place of the interpreter, or that is started
in place of the launcher; `worker` runs in the forked processes; `preloaded` gives them
the modules; `record` writes the list of modules for the next start. All but `launching` and
`programs` import only the standard library, since they run in the job's environment.
"""

VARIABLE = "BOOTSEER_PRELOAD"
"""Variable with the folder of the workers' preloader in this start: `plan`, `socket` and `python`.
"""
SERVER_VARIABLE = "BOOTSEER_PRELOADER"
"""Variable of a preloader with its own folder, by which sitecustomize knows that it is one."""
PYTHON_VARIABLE = "BOOTSEER_PRELOAD_PYTHON"
"""Variable with the interpreter that the launcher would have started its workers by."""
LAUNCHER = ".launcher"
"""Suffix of the names of the launcher's record, folder and log."""
WORKER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "TRACEPARENT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "_"),
)
"""Variables that tell workers apart: they differ, so no import may have read them."""
WORKER_PREFIXES = ("TORCHELASTIC_", "BOOTSEER_")


def is_worker_variable(name: str) -> bool:
    """Return whether a variable tells workers apart."""
    return name in WORKER_VARIABLES or name.startswith(WORKER_PREFIXES)
