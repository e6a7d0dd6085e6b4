"""Functions of training frameworks that are stages of a start, and barriers where processes meet.

Each function here gets the stages of this process and a module that has just been loaded, and wraps
functions in the module. A function that a framework's release does not have is left out, since
`ProcessStages.on_loaded` ignores errors.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bootseer.timeline.otlp import BARRIER, BARRIER_COUNT, Value
from bootseer.timeline.recorder import ready

if TYPE_CHECKING:
    from bootseer.profile.collect.stages import ProcessStages
    from bootseer.timeline.recorder import Span

# Collectives that block until all members of the group take part.
_COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather_object"),
    *("monitored_barrier", "reduce_scatter", "reduce_scatter_tensor", "scatter_object_list"),
)


def _torchrun(stages: "ProcessStages", module: Any) -> None:
    """Record the rendezvous of torchrun's agents.

    It begins when an agent looks for the host of the rendezvous store, where agents wait for each
    other, and ends when all agents know their ranks.
    """
    registry, agent = module.rdzv_registry, module.LocalElasticAgent
    original_handler, original_rendezvous = registry.get_rendezvous_handler, agent._rendezvous
    spans: list[Span | None] = []

    def end(error: BaseException | None = None, agent: Any = None) -> None:
        # A later rendezvous is for restarted workers, and not part of the start.
        with contextlib.suppress(Exception):
            if any(spans):
                stages.end(spans[0], error, _round_attributes(agent))
            spans[:] = [None]

    def get_rendezvous_handler(parameters: Any) -> Any:
        with contextlib.suppress(Exception):
            if not spans:
                key = f"rendezvous {parameters.run_id}"
                attributes = {BARRIER: key, BARRIER_COUNT: int(parameters.min_nodes)}
                spans.append(stages.begin("rendezvous", attributes))
        try:
            return original_handler(parameters)
        except BaseException as error:
            end(error)
            raise

    def rendezvous(self: Any, *args: Any, **named: Any) -> Any:
        try:
            result = original_rendezvous(self, *args, **named)
        except BaseException as error:
            end(error)
            raise
        end(agent=self)
        return result

    registry.get_rendezvous_handler = get_rendezvous_handler
    agent._rendezvous = rendezvous


def _round_attributes(agent: Any) -> "dict[str, Value]":
    """Return the barrier's name with its round, unless it is the first round.

    An agent that joins a running job meets only the agents of its own round.
    """
    try:
        handler = agent._worker_group.spec.rdzv_handler
        number = int(handler._state_holder.state.round)
        return {BARRIER: f"rendezvous {handler.get_run_id()} round {number}"} if number else {}
    except Exception:
        return {}  # only torchrun's own rendezvous handler has rounds


def _distributed(stages: "ProcessStages", module: Any) -> None:
    seen_groups: set[str] = set()

    def barrier_name(*_: Any, **__: Any) -> str:
        return f"init_process_group {stages.count('init_process_group')}"

    def first_of_group(*args: Any, **named: Any) -> str | None:
        if named.get("async_op"):
            return None  # an asynchronous collective does not wait here
        group = named.get("group")
        if group is None:
            kind = module.ProcessGroup
            group = next((one for one in args if isinstance(one, kind)), None)
        name = str((group or module._get_default_group()).group_name)
        if name in seen_groups:
            return None
        seen_groups.add(name)
        return f"first collective of group {name}"

    stages.wrap(module, "init_process_group", "init_process_group", barrier_name)
    stages.wrap(module, "new_group", "new_group")
    for name in _COLLECTIVES:
        if hasattr(module, name):
            stages.wrap(module, name, "first collective", first_of_group)


def _data_parallel(stages: "ProcessStages", module: Any) -> None:
    # The constructor synchronises in C++, where no wrapper sees it: wrap the constructor.
    waiting: list[str] = []

    def barrier_name(*_: Any, process_group: Any = None, **__: Any) -> str:
        group = process_group.group_name if process_group is not None else "0"
        waiting[:] = [f"first backward of group {group}"]
        count = stages.count(f"DistributedDataParallel {group}")
        return f"DistributedDataParallel {count} of group {group}"

    def first_backward(*_: Any, **__: Any) -> str | None:
        # Gradients are reduced in C++, too, and the ranks wait for each other during a backward.
        return waiting.pop() if waiting else None

    name = "DistributedDataParallel"
    stages.wrap(module.DistributedDataParallel, "__init__", name, barrier_name)
    stages.wrap(sys.modules["torch.autograd"], "backward", "first backward", first_backward)


def _cuda(stages: "ProcessStages", module: Any) -> None:
    stages.wrap(module, "_lazy_init", "CUDA initialisation", first_only=True)


def _serialization(stages: "ProcessStages", module: Any) -> None:
    stages.wrap(module, "load", "torch.load")


def _dcp(stages: "ProcessStages", module: Any) -> None:
    stages.wrap(module, "load", "load distributed checkpoint")


def _safetensors(stages: "ProcessStages", module: Any) -> None:
    stages.wrap(module, "load_file", "load safetensors")


def _transformers(stages: "ProcessStages", module: Any) -> None:
    kind = module.PreTrainedModel
    recorded = stages.recorded(kind.from_pretrained.__func__, "from_pretrained")
    kind.from_pretrained = classmethod(recorded)


def _loader(stages: "ProcessStages", module: Any) -> None:
    stages.wrap(module._BaseDataLoaderIter, "__next__", "first batch", first_only=True)


def _compiler(stages: "ProcessStages", module: Any) -> None:
    compiling: list[Span] = []

    def begin(_: Any) -> None:
        if span := stages.begin("compile"):
            compiling.append(span)

    def end(_: Any) -> None:
        if compiling:
            counts = _cache_counts(sys.modules.get("torch._dynamo.utils"))
            stages.end(compiling.pop(), attributes=counts)

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


def _optimizer(stages: "ProcessStages", module: Any) -> None:
    def stepped(*_: Any) -> None:
        if not stages.is_finished:
            # A program that imports bootseer calls `ready` itself.
            if "bootseer" not in sys.modules:
                ready()
            handle.remove()

    handle = module.register_optimizer_step_post_hook(stepped)


HOOKS: "dict[str, Callable[[ProcessStages, Any], None]]" = {
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
"""Function that wraps a module's functions, by the module's name; called when it has been loaded.
"""
