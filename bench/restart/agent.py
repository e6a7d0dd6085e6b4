"""torchrun that notes its own begin and the start of each worker."""

import time

began_s = time.time()

from typing import Any  # noqa: E402

from bench.restart.events import note  # noqa: E402


def main() -> None:
    """Run `torchrun` with the arguments of this process."""
    note("agent", at_s=began_s)
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handler = subprocess_handler.SubprocessHandler
    original = handler._popen

    def popen(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
        note("started", rank=int(env["RANK"]), restart=int(env["TORCHELASTIC_RESTART_COUNT"]))
        return original(self, args, env)

    handler._popen = popen
    # Import and call it, as the program `torchrun` does.
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
