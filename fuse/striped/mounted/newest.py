"""Which of the names in a folder is the newest complete checkpoint, by the usual frameworks' rules.

Pure (no I/O): names in, verdicts out. Megatron and DeepSpeed name theirs in a tracker file, which
they write last; torch.distributed.checkpoint writes `.metadata` last, the trainer of Hugging Face
`trainer_state.json`. Of a step that shows none of these, its names are compared with those of the
step before.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

TRACKERS = ("latest", "latest_checkpointed_iteration.txt")
"""What `tracked_name` reads, the strongest first."""

_NUMBER = re.compile(r"\d{1,18}")
# iter_0001000, global_step1000, checkpoint-500, step_20, epoch=1-step=200.ckpt, model_5.pt
_STEP = re.compile(r"(.*?)(\d{1,18})(\.[A-Za-z]\w*)?")
# mp_rank_00, zero_pp_rank_0_mp_rank_00_optim_states.pt, layer_01-model_00-model_states.pt,
# __0_0.distcp, rng_state_0.pth, random_states_0.pkl, pytorch_model_fsdp_0, model-00001-of-00004.bin
_PART = re.compile(
    r"rank[_.-]?\d|shard|-of-\d|\.distcp$|_states|rng_state|fsdp_\d|^__\d+_\d+|^distcp", re.I
)
_SHARD = re.compile(r"(.*)-(\d{3,6})-of-(\d{3,6})(\..*)")
_TEMPORARY = re.compile(r"^tmp[._-]|\.tmp$|\.tmp[._-]|-tmp-|\.partial$|-unfinished$|\.incomplete$")
_HF_STEP = re.compile(r"checkpoint-\d+")
_HF_FILE = re.compile(
    r"config\.json|generation_config\.json|(adapter_)?model.*\.safetensors|pytorch_model.*\.bin|"
    r"optimizer\.(pt|bin)|scheduler\.pt|training_args\.bin|rng_state.*\.pth"
)
_BESIDE = re.compile(
    r"logs?|runs|wandb|tensorboard|mlruns|events\.out\..*|"
    r".*\.(log|jsonl?|yaml|yml|txt|csv|md|py|sh)"
)
_MARKERS = frozenset(
    (".metadata", "metadata.json", "trainer_state.json", "config.json", "model_index.json")
)


def tracked_name(trackers: dict[str, str], names: Sequence[str]) -> str | None:
    """Which of `names` the tracker files mean; None where they mean none.

    `trackers`: content by name. `latest` holds a name (DeepSpeed, and what people write by hand);
    `latest_checkpointed_iteration.txt` holds a number (Megatron), as in `iter_0001000`, or
    "release".
    """
    for text in (trackers.get(name) for name in TRACKERS):
        wanted = (text or "").strip().rstrip("/").rpartition("/")[2]
        if not wanted:
            continue
        if wanted in names:
            return wanted
        if _NUMBER.fullmatch(wanted):
            for name in names:
                found = _NUMBER.findall(name)
                if found and int(found[-1]) == int(wanted):
                    return name
    return None


def is_temporary(name: str) -> bool:
    """Whether the name says that it is not finished."""
    return _TEMPORARY.search(name) is not None


def is_beside(name: str) -> bool:
    """Whether the name is of something that lies beside checkpoints: logs, settings."""
    return _BESIDE.fullmatch(name) is not None


def is_checkpoint(names: Iterable[str]) -> bool:
    """Whether a folder with these names is one checkpoint, rather than a folder of several."""
    return any(
        name in _MARKERS or name.endswith(".index.json") or _PART.search(name) for name in names
    )


def steps(names: Iterable[str]) -> list[list[str]]:
    """The names that end in a number, in series (`epoch_1` and `step_1` are two); of each the
    highest number first. What is not finished by its name is left out."""
    series: dict[str, list[tuple[int, str]]] = defaultdict(list)
    names = set(names)
    for name in names:
        match = _STEP.fullmatch(name)
        # NeMo puts a file `NAME-unfinished` beside a checkpoint until it is whole.
        is_unfinished = is_temporary(name) or f"{name}-unfinished" in names
        if match is None or is_unfinished or _PART.search(name) or is_beside(name):
            continue
        family = _NUMBER.sub("#", match[1]) + "#" + (match[3] or "")
        series[family].append((int(match[2]), name))
    return [
        [name for _, name in sorted(found, reverse=True)] for _, found in sorted(series.items())
    ]


def is_complete(name: str, inside: Collection[str]) -> bool | None:
    """Whether the folder `name` with these names in it is a whole step; None: they do not tell."""
    if not inside or not _has_all_shards(inside):
        return False
    if any(entry.endswith(".metadata") for entry in inside) or "trainer_state.json" in inside:
        return True
    if any(entry.endswith(".distcp") for entry in inside):
        return False
    if _HF_STEP.fullmatch(name) and any(_HF_FILE.fullmatch(entry) for entry in inside):
        return False
    return False if any(map(is_temporary, inside)) else None


def is_like(inside: Collection[str], before: Collection[str]) -> bool:
    """Whether a step whose names do not tell has all that the step before it has."""
    return len(inside) >= len(before)


def is_description(name: str) -> bool:
    """Whether a file says what the others are: every rank reads it, and first."""
    return name.endswith((".json", ".metadata", ".txt", "common.pt", ".yaml"))


def _has_all_shards(inside: Collection[str]) -> bool:
    """`model-00001-of-00004.safetensors` promises three more."""
    found: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in inside:
        if match := _SHARD.fullmatch(name):
            found[match[1], match[3], match[4]].add(int(match[2]))
    return all(len(numbers) >= int(total) for (_, total, _), numbers in found.items())
