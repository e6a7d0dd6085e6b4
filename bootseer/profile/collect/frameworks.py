"""Notes the stages of training frameworks on the timeline, by wrapping a few of their functions.

Runs in the training process, with nothing but the standard library. A function is wrapped when its
module has been loaded; each wrapper calls the original whatever goes wrong in its own part, and
does nothing else once the process is ready. Main thread only: others call the originals at once.
"""

import atexit
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bootseer.timeline.otlp import BARRIER, IMPORTS_EVENT, PARENT, ROLE
from bootseer.timeline.recorder import (
    LAUNCHED_VARIABLE,
    PROCESS_VARIABLE,
    Span,
    Timeline,
    current,
    ready,
)

if TYPE_CHECKING:
    from bootseer.profile.collect.imports import Collector

_TICKS = os.sysconf("SC_CLK_TCK")

# Collectives that block until all members of the group take part.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather_object"),
    *("monitored_barrier", "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list"),
)
# Of a node's processes one says what it imported; the others import the same.
_MODULES_MAX = 150


class Notes:
    """What this process has noted so far."""

    def __init__(self, collector: "Collector") -> None:
        self._collector = collector
        self._is_over = False
        self._open: list[Span] = []
        self._met: set[str] = set()
        self._counts: dict[str, int] = {}
        self._compiling: list[Span] = []
        self._timeline = _join()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.finish)
        self._since = time.perf_counter_ns() - time.time_ns()
        began = _began_ns() or collector.began_ns
        # With all that it did before anything was worth noting.
        until = collector.quiet_until_ns or time.time_ns()
        self._timeline.note("python start", began, max(0, until - began))

    def _forked(self) -> None:
        """A child by fork is another process, which begins with nothing open."""
        self._timeline = _join()
        self._open.clear()
        self._compiling.clear()

    # -- imports

    def begin_import(self, package: str) -> Span | None:
        return self._begin(f"import {package}")

    def end_import(self, span: Span) -> None:
        self._end(span)

    def note_import(self, package: str, begin_ns: int, took_ns: int) -> None:
        """An import that turned out to be slow."""
        self._place().note(f"import {package}", begin_ns - self._since, took_ns)

    def _place(self) -> Timeline:
        """The timeline, below the stage that is open."""
        return self._timeline.below(self._open[-1]) if self._open else self._timeline

    # -- stages

    def _begin(self, name: str, attributes: dict[str, Any] | None = None) -> Span | None:
        if self._is_over or threading.current_thread() is not threading.main_thread():
            return None
        span = self._place().span(name, attributes)
        self._open.append(span)
        return span

    def _end(self, span: Span | None, error: BaseException | None = None) -> None:
        if span is None:
            return
        while self._open and self._open.pop() is not span:
            pass
        span.end(error=error)

    def wrap(
        self,
        owner: Any,
        attribute: str,
        name: str,
        barrier: "Callable[..., str | None] | None" = None,
        *,
        first_only: bool = False,
    ) -> None:
        """Make a stage of each call; of the first one only where `barrier` or `first_only` says so.

        `barrier` gets the call's arguments and returns what all who meet there have in common, or
        None where this call is no meeting of its own.
        """
        original = getattr(owner, attribute)
        setattr(owner, attribute, self._noting(original, name, barrier, first_only=first_only))

    def _noting(
        self,
        original: Callable[..., Any],
        name: str,
        barrier: "Callable[..., str | None] | None" = None,
        *,
        first_only: bool = False,
    ) -> Callable[..., Any]:
        """The function whose calls are stages; see `wrap`."""
        has_run = False

        @functools.wraps(original)
        def wrapper(*args: Any, **named: Any) -> Any:
            nonlocal has_run
            if self._is_over or (first_only and has_run):
                return original(*args, **named)
            has_run = True
            span = None
            try:
                key = barrier(*args, **named) if barrier is not None else ""
                if key is not None:
                    span = self._begin(name, {BARRIER: key} if key else None)
            except Exception:
                span = None
            try:
                result = original(*args, **named)
            except BaseException as error:
                self._end(span, error)
                raise
            self._end(span)
            return result

        return wrapper

    # -- frameworks

    def loaded(self, name: str, module: Any) -> None:
        """A module was imported; never raises."""
        hook = _HOOKS.get(name)
        if hook is None or self._is_over:
            return
        # What is imported by the way is the module, not its package.
        module = sys.modules.get(name, module)
        try:
            hook(self, module)
        except Exception:
            return

    def _count(self, name: str) -> int:
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name]

    def _first_of_group(self, *args: Any, **named: Any) -> str | None:
        """The key of the first collective of a process group."""
        from torch.distributed import distributed_c10d

        if named.get("async_op"):
            return None  # it does not wait here
        group = named.get("group")
        if group is None:
            kind = distributed_c10d.ProcessGroup
            group = next((one for one in args if isinstance(one, kind)), None)
        group = group or distributed_c10d._get_default_group()
        name = str(group.group_name)
        if f"group {name}" in self._met:
            return None
        self._met.add(f"group {name}")
        return f"first collective of group {name}"

    def _distributed(self, module: Any) -> None:
        def meeting(*_: Any, **__: Any) -> str:
            return f"init_process_group {self._count('init_process_group')}"

        self.wrap(module, "init_process_group", "init_process_group", meeting)
        self.wrap(module, "new_group", "new_group")
        for name in _COLLECTIVES:
            if hasattr(module, name):
                self.wrap(module, name, "first collective", self._first_of_group)

    def _data_parallel(self, module: Any) -> None:
        # Meets below Python, where no wrapper sees it, after what it imports.
        def meeting(*_: Any, process_group: Any = None, **__: Any) -> str:
            group = process_group.group_name if process_group is not None else "0"
            count = self._count(f"DistributedDataParallel {group}")
            return f"DistributedDataParallel {count} of group {group}"

        name = "DistributedDataParallel"
        self.wrap(module.DistributedDataParallel, "__init__", name, meeting)

    def _cuda(self, module: Any) -> None:
        self.wrap(module, "_lazy_init", "CUDA initialisation", first_only=True)

    def _serialization(self, module: Any) -> None:
        self.wrap(module, "load", "torch.load")

    def _dcp(self, module: Any) -> None:
        self.wrap(module, "load", "load distributed checkpoint")

    def _safetensors(self, module: Any) -> None:
        self.wrap(module, "load_file", "load safetensors")

    def _transformers(self, module: Any) -> None:
        kind = module.PreTrainedModel
        noting = self._noting(kind.from_pretrained.__func__, "from_pretrained")
        kind.from_pretrained = classmethod(noting)

    def _loader(self, module: Any) -> None:
        self.wrap(module._BaseDataLoaderIter, "__next__", "first batch", first_only=True)

    def _compiler(self, module: Any) -> None:
        def begin(_: Any) -> None:
            if span := self._begin("compile"):
                self._compiling.append(span)

        def end(_: Any) -> None:
            if self._compiling:
                span = self._compiling.pop()
                counters = sys.modules.get("torch._dynamo.utils")
                for name, count in _cache_counts(counters).items():
                    span.set(name, count)
                self._end(span)

        module.callback_handler.register_start_callback(begin)
        module.callback_handler.register_end_callback(end)

    def _optimizer(self, module: Any) -> None:
        def stepped(*_: Any) -> None:
            if not self._is_over:
                # The program has its own view of when it is ready where it imports bootseer.
                if "bootseer" not in sys.modules:
                    self.ready()
                handle.remove()

        handle = module.register_optimizer_step_post_hook(stepped)

    # -- the end

    def ready(self) -> None:
        """The first step is done: nothing is noted from here on."""
        ready()

    def finish(self) -> None:
        """Write the imports, and let go of what was wrapped."""
        if self._is_over:
            return
        self._is_over = True
        self._collector.end()
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        slowest = sorted(self._collector.modules, key=lambda one: -one[3])[:_MODULES_MAX]
        modules = sorted(slowest, key=lambda one: one[2])
        rows = [
            [name, depth, (begin - self._since) // 1000, took // 1000]
            for name, depth, begin, took in modules
        ]
        self._timeline.event(IMPORTS_EVENT, json.dumps(rows, separators=(",", ":")))


def _join() -> Timeline:
    """The timeline, for a process that is a new one; child processes find their parent by it."""
    parent = os.environ.get(PROCESS_VARIABLE, "")
    os.environ[PROCESS_VARIABLE] = os.urandom(6).hex()
    timeline = current()
    if timeline is None:
        raise LookupError("there is no timeline")
    return timeline.with_resource({PARENT: parent, ROLE: _role()})


_HOOKS: dict[str, Callable[[Notes, Any], None]] = {
    "torch.distributed.distributed_c10d": Notes._distributed,
    "torch.nn.parallel.distributed": Notes._data_parallel,
    "torch.cuda": Notes._cuda,
    "torch.serialization": Notes._serialization,
    "torch.distributed.checkpoint.state_dict_loader": Notes._dcp,
    "safetensors.torch": Notes._safetensors,
    "transformers.modeling_utils": Notes._transformers,
    "torch.utils.data.dataloader": Notes._loader,
    "torch._dynamo.callback": Notes._compiler,
    "torch.optim.optimizer": Notes._optimizer,
}


def _cache_counts(module: Any) -> dict[str, int]:
    counters = getattr(module, "counters", {})
    found = counters.get("inductor", {})
    return {
        f"bootseer.{name}": int(found[name])
        for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")
        if name in found
    }


def _role() -> str:
    """The name of the program, as its users know it."""
    words = sys.orig_argv[1:]
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            return words[place + 1].rpartition(".")[2]
        if word == "-c":
            code = words[place + 1] if place + 1 < len(words) else ""
            return "multiprocessing" if "multiprocessing" in code else "python -c"
        if not word.startswith("-"):
            return os.path.basename(word)
    return "python"


def _began_ns() -> int | None:
    """When this process began to be what it is, ns since 1970.

    The launcher that became this process says when; of others the kernel says when they were
    started. Source: proc(5), starttime.
    """
    pid, _, launched = os.environ.get(LAUNCHED_VARIABLE, "").partition(":")
    if pid == str(os.getpid()):
        return int(launched)
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    except (OSError, ValueError, IndexError):
        return None
    return time.time_ns() - since_boot_ns + ticks * 1_000_000_000 // _TICKS
