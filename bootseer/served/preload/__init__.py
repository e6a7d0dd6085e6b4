"""Starts Python workers from a process that has imported what their last start imported.

`launching` begins that process, the preloader, which runs as the job's own interpreter (`server`,
`importing`, `checks`), for a program that `programs` knows; `shim` is what is started in the place
of the interpreter, by a launcher such as torchrun or as one; `worker` is the side of the forked
program; `record` writes what the next start imports. All but `launching` and `programs` use the
standard library alone: they run in the job's environment.
"""

VARIABLE = "BOOTSEER_PRELOAD"
"""The folder of the workers' preloader in this start: `plan`, `socket` and `python`."""
SERVER_VARIABLE = "BOOTSEER_PRELOADER"
"""The folder of a preloader, for itself alone: by it sitecustomize knows that it is one."""
PYTHON_VARIABLE = "BOOTSEER_PRELOAD_PYTHON"
"""The interpreter that a launcher would have started its workers by."""
LAUNCHER = ".launcher"
"""Behind the names of what is the launcher's, and not its workers'."""
EXECUTABLE_VARIABLE = "PYTHON_EXEC"
"""By this torchrun is told to start its workers by another program than its own interpreter."""
OF_PROCESS = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "TRACEPARENT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "_"),
)
"""Variables that say which worker a process is: they differ, and no import may have read them."""
OF_PROCESS_PREFIXES = ("TORCHELASTIC_", "BOOTSEER_")


def is_of_process(name: str) -> bool:
    """Whether a variable says which worker a process is."""
    return name in OF_PROCESS or name.startswith(OF_PROCESS_PREFIXES)
