"""An image's mount from its plan to its end: `serve_image`, in the process that `serve` is.

The process itself holds the mount and restarts its worker (`fuse.kernel`'s supervisor); workers
are `server.ImageServer`s.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from bootseer.errors import BootseerError, UnavailableError, from_oserror
from bootseer.fuse.kernel.mounting.options import KERNEL_DEADLINE_MAX_S, MountOptions
from bootseer.fuse.kernel.mounting.pulse import silence_for
from bootseer.fuse.kernel.mounting.supervisor import RestartPolicy, supervise
from bootseer.prefetch.cache.kept_indexes import read_kept_tree
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.mounts.covers import uncover_all
from bootseer.prefetch.mounts.mount_state import (
    lock_new,
    remove_mount_dir,
    remove_scratch,
    sweep,
    write_state,
)
from bootseer.prefetch.mounts.serve_plan import SUBTYPE, ServePlan
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.tree_fs import TreeFileSystem
from bootseer.prefetch.serve.worker import ImageServer
from bootseer.served.background import Report

_SWITCH_S = 0.0005
"""A thread that computes, as for a bundle's start, keeps the interpreter this long from one that
answers the kernel, which asks for few things at a time: in 5 ms each, Python's default, an overlay
over the tree took 80 ms to mount."""

_KERNEL_DEADLINES = 10
_KERNEL_DEADLINE_MIN_S = 600
"""What no read takes that we live to answer, however many others wait for a silent store: of the
store's deadlines, and at least."""

_RESTART_COUNT = 12
"""In ten seconds; pauses grow to a second, so one that can never start ends readers' waits then."""


def serve_image(plan: ServePlan, report: Report, await_index: Callable[[], object]) -> None:
    """Mount and serve until unmounted. The index is in the node's cache when `await_index` returns.

    Raises: BootseerError.
    """
    try:
        lock = lock_new(plan.state_dir)
    except OSError as error:
        raise from_oserror(error, f"lock {plan.state_dir}") from error
    try:
        sweep(plan.settings)
        plan = replace(plan, state=replace(plan.state, pid=os.getpid()))
        state = plan.state
        write_state(plan.state_dir, state)
        await_index()
        tree = read_kept_tree(
            plan.settings.cache_dir,
            state.index_digest,
            checks=plan.checks_index,
            run_dir=plan.settings.run_dir,
        )
        log = AccessLog()

        def worker() -> TreeFileSystem:
            sys.setswitchinterval(_SWITCH_S)
            try:
                return ImageServer(plan, tree, log).operations
            except (BootseerError, OSError) as error:
                report.send_error(error)
                raise
            finally:
                # Ours is a copy: the supervisor reports when a worker serves.
                report.close()

        options = MountOptions(
            name=state.reference.replace(",", "_"),
            subtype=SUBTYPE,
            read_only=True,
            allow_other=plan.allow_other,
            max_readahead_bytes=plan.readahead_bytes,
            invalidate_on_change=False,
            kernel_deadline_s=_kernel_deadline_s(plan),
            worker_silence_s=silence_for(plan.settings.deadline_s),
        )

        def ready() -> None:
            if not report.send_ready():
                raise UnavailableError(f"nobody waits for the mount on {state.directory} any more")

        supervise(
            worker,
            Path(state.directory),
            options,
            on_ready=ready,
            restart=RestartPolicy(_RESTART_COUNT),
        )
    finally:
        # The folder last: it is what says that the mount is not quite gone.
        uncover_all(plan.state.id)
        if plan.state.scratch:
            remove_scratch(Path(plan.state.scratch))
        remove_mount_dir(plan.state_dir)
        os.close(lock)
    # Nobody waits for this: a slow disk takes its time for what a start brought.
    NodeCache(plan.settings.cache_dir).make_durable(tree.blobs, plan.claimant)


def _kernel_deadline_s(plan: ServePlan) -> int:
    wanted_s = int(_KERNEL_DEADLINES * plan.settings.deadline_s)
    return min(max(wanted_s, _KERNEL_DEADLINE_MIN_S), KERNEL_DEADLINE_MAX_S)
