"""Which functions of training frameworks are stages of a start, and where processes meet in them.

Each function here gets the notes of this process and a module that has just been loaded, and wraps
what is worth noting in it. What a release of a framework does not have is left out: `Notes.loaded`
takes no notice of errors.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootseer.timeline.otlp import BARRIER, BARRIER_COUNT, Value

if TYPE_CHECKING:
    from bootseer.profile.collect.notes import Notes
    from bootseer.timeline.recorder import Span

# Collectives that block until all members of the group take part.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather_object"),
    *("monitored_barrier", "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list"),
)


def _torchrun(notes: "Notes", module: Any) -> None:
    """torchrun's agents meet from the moment at which they look for the host of their store, for
    which the others wait, until all of them know their ranks."""
    registry, agent = module.rdzv_registry, module.LocalElasticAgent
    look, meet = registry.get_rendezvous_handler, agent._rendezvous
    meetings: list[Span | None] = []

    def end(error: BaseException | None = None, agent: Any = None) -> None:
        # Later ones are those of workers that are started again, which is no part of a start.
        with contextlib.suppress(Exception):
            if any(meetings):
                notes.end(meetings[0], error, _round(agent))
            meetings[:] = [None]

    def get_rendezvous_handler(parameters: Any) -> Any:
        with contextlib.suppress(Exception):
            if not meetings:
                key = f"rendezvous {parameters.run_id}"
                said = {BARRIER: key, BARRIER_COUNT: int(parameters.min_nodes)}
                meetings.append(notes.begin("rendezvous", said))
        try:
            return look(parameters)
        except BaseException as error:
            end(error)
            raise

    def rendezvous(self: Any, *args: Any, **named: Any) -> Any:
        try:
            result = meet(self, *args, **named)
        except BaseException as error:
            end(error)
            raise
        end(agent=self)
        return result

    registry.get_rendezvous_handler = get_rendezvous_handler
    agent._rendezvous = rendezvous


def _round(agent: Any) -> "dict[str, Value]":
    """An agent that comes to a job which has been running meets those of its own round only."""
    try:
        handler = agent._worker_group.spec.rdzv_handler
        number = int(handler._state_holder.state.round)
        return {BARRIER: f"rendezvous {handler.get_run_id()} round {number}"} if number else {}
    except Exception:
        return {}  # only torchrun's own rendezvous has rounds


def _distributed(notes: "Notes", module: Any) -> None:
    met: set[str] = set()

    def meeting(*_: Any, **__: Any) -> str:
        return f"init_process_group {notes.count('init_process_group')}"

    def first_of_group(*args: Any, **named: Any) -> str | None:
        if named.get("async_op"):
            return None  # it does not wait here
        group = named.get("group")
        if group is None:
            kind = module.ProcessGroup
            group = next((one for one in args if isinstance(one, kind)), None)
        name = str((group or module._get_default_group()).group_name)
        if name in met:
            return None
        met.add(name)
        return f"first collective of group {name}"

    notes.wrap(module, "init_process_group", "init_process_group", meeting)
    notes.wrap(module, "new_group", "new_group")
    for name in _COLLECTIVES:
        if hasattr(module, name):
            notes.wrap(module, name, "first collective", first_of_group)


def _data_parallel(notes: "Notes", module: Any) -> None:
    # Meets below Python, where no wrapper sees it, after what it imports.
    waiting: list[str] = []

    def meeting(*_: Any, process_group: Any = None, **__: Any) -> str:
        group = process_group.group_name if process_group is not None else "0"
        waiting[:] = [f"first backward of group {group}"]
        count = notes.count(f"DistributedDataParallel {group}")
        return f"DistributedDataParallel {count} of group {group}"

    def reducing(*_: Any, **__: Any) -> str | None:
        # Gradients are reduced below Python, too: the ranks wait for each other in here.
        return waiting.pop() if waiting else None

    name = "DistributedDataParallel"
    notes.wrap(module.DistributedDataParallel, "__init__", name, meeting)
    notes.wrap(sys.modules["torch.autograd"], "backward", "first backward", reducing)


def _cuda(notes: "Notes", module: Any) -> None:
    notes.wrap(module, "_lazy_init", "CUDA initialisation", first_only=True)


def _serialization(notes: "Notes", module: Any) -> None:
    notes.wrap(module, "load", "torch.load")


def _dcp(notes: "Notes", module: Any) -> None:
    notes.wrap(module, "load", "load distributed checkpoint")


def _safetensors(notes: "Notes", module: Any) -> None:
    notes.wrap(module, "load_file", "load safetensors")


def _transformers(notes: "Notes", module: Any) -> None:
    kind = module.PreTrainedModel
    noting = notes.noting(kind.from_pretrained.__func__, "from_pretrained")
    kind.from_pretrained = classmethod(noting)


def _loader(notes: "Notes", module: Any) -> None:
    notes.wrap(module._BaseDataLoaderIter, "__next__", "first batch", first_only=True)


def _compiler(notes: "Notes", module: Any) -> None:
    compiling: list[Span] = []

    def begin(_: Any) -> None:
        if span := notes.begin("compile"):
            compiling.append(span)

    def end(_: Any) -> None:
        if compiling:
            counts = _cache_counts(sys.modules.get("torch._dynamo.utils"))
            notes.end(compiling.pop(), attributes=counts)

    module.callback_handler.register_start_callback(begin)
    module.callback_handler.register_end_callback(end)


def _cache_counts(module: Any) -> "dict[str, Value]":
    counters = getattr(module, "counters", {})
    found = counters.get("inductor", {})
    return {
        f"bootseer.{name}": int(found[name])
        for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")
        if name in found
    }


def _optimizer(notes: "Notes", module: Any) -> None:
    def stepped(*_: Any) -> None:
        if not notes.is_over:
            # The program has its own view of when it is ready where it imports bootseer.
            if "bootseer" not in sys.modules:
                notes.ready()
            handle.remove()

    handle = module.register_optimizer_step_post_hook(stepped)


HOOKS: "dict[str, Callable[[Notes, Any], None]]" = {
    "torch.distributed.launcher.api": _torchrun,
    "torch.distributed.distributed_c10d": _distributed,
    "torch.nn.parallel.distributed": _data_parallel,
    "torch.cuda": _cuda,
    "torch.serialization": _serialization,
    "torch.distributed.checkpoint.state_dict_loader": _dcp,
    "safetensors.torch": _safetensors,
    "transformers.modeling_utils": _transformers,
    "torch.utils.data.dataloader": _loader,
    "torch._dynamo.callback": _compiler,
    "torch.optim.optimizer": _optimizer,
}
"""What is done when a module has been loaded."""
