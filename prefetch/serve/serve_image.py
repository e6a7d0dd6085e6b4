"""An image's mount from its plan to its end: `serve_image`, in the process that `serve` is.

The process itself holds the mount and restarts its worker (`fuse.kernel`'s supervisor); workers
are `worker.ImageServer`s.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from bootseer.fuse.kernel.options import KERNEL_DEADLINE_MAX_S, MountOptions
from bootseer.fuse.kernel.server import Attached
from bootseer.prefetch.cache.kept_indexes import read_kept_tree, remove_spare_indexes
from bootseer.prefetch.cache.node_cache import NodeCache
from bootseer.prefetch.index.node_catalogue import vouched_streams
from bootseer.prefetch.record.trace import AccessLog
from bootseer.prefetch.serve.serve_plan import SUBTYPE, ServePlan
from bootseer.prefetch.serve.tree_fs import TreeFileSystem
from bootseer.prefetch.serve.worker import ImageServer
from bootseer.served.life import living
from bootseer.served.processes import Report
from bootseer.served.supervision.heartbeat import silence_for
from bootseer.served.supervision.supervisor import supervise
from bootseer.served.supervision.worker import RestartPolicy

_SWITCH_S = 0.0005
"""A thread that computes, as for a bundle's start, keeps the interpreter this long from one that
answers the kernel, which asks for few things at a time: in 5 ms each, Python's default, an overlay
over the tree took 80 ms to mount."""

_KERNEL_DEADLINES = 10
_KERNEL_DEADLINE_MIN_S = 600
"""What no read takes that we live to answer, however many others wait for a silent store: of the
store's deadlines, and at least."""

_RESTART_COUNT = 12
"""Restarts of a worker in ten seconds; pauses grow to a second, so one that can never start ends
readers' waits then."""


def serve_image(plan: ServePlan, report: Report, await_index: Callable[[], object]) -> None:
    """Mount and serve until unmounted. The index is in the node's cache when `await_index` returns.

    Raises: BootseerError.
    """
    with living(plan.state_dir, plan.state) as life:
        plan = replace(plan, state=life.state)
        state = plan.state
        remove_spare_indexes(plan.settings.run_dir)
        await_index()
        tree = read_kept_tree(
            plan.settings.cache_dir,
            state.index_digest,
            checks=plan.options.checks_index,
            run_dir=plan.settings.run_dir,
        )
        log = AccessLog()

        def worker(attached: Attached) -> TreeFileSystem:
            sys.setswitchinterval(_SWITCH_S)
            named = replace(plan, state=replace(state, device_minor=attached.device_minor))
            return ImageServer(named, tree, log).operations

        options = MountOptions(
            name=state.reference.replace(",", "_"),
            subtype=SUBTYPE,
            read_only=True,
            allow_other=plan.allow_other,
            max_readahead_bytes=plan.options.readahead_bytes,
            invalidate_on_change=False,
            kernel_deadline_s=_kernel_deadline_s(plan),
            worker_silence_s=silence_for(plan.settings.deadline_s),
        )

        supervise(
            worker,
            Path(state.directory),
            options,
            report=report,
            restart=RestartPolicy(_RESTART_COUNT),
        )
    # Nobody waits for this: a slow disk takes its time for what a start brought.
    vouched = vouched_streams(
        plan.settings, plan.state.index_digest, tree.blobs, is_local=plan.options.is_local
    )
    NodeCache(plan.settings.cache_dir).make_durable(tree.blobs, vouched=vouched)


def _kernel_deadline_s(plan: ServePlan) -> int:
    wanted_s = int(_KERNEL_DEADLINES * plan.settings.deadline_s)
    return min(max(wanted_s, _KERNEL_DEADLINE_MIN_S), KERNEL_DEADLINE_MAX_S)
