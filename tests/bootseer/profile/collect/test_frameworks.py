"""Stages of loads, devices and compilers, in unchanged programs."""

import sys

import pytest

from bootseer.report.graph import TrackSpan, tracks_of
from testbed.needs import MissingError
from tests.bootseer.profile.collect.conftest import ProgramFolder

pytestmark = pytest.mark.needs(modules=["torch", "safetensors", "transformers"])

# One program does all of it: to import torch takes longer than the rest.
PROGRAM = """
import torch, torch.distributed.checkpoint as dcp
state = {"weight": torch.ones(64)}
dcp.save(state, checkpoint_id="checkpoint")
dcp.load({"weight": torch.zeros(64)}, checkpoint_id="checkpoint")

from safetensors.torch import load_file, save_file
save_file({"weight": torch.ones(64)}, "model.safetensors")
assert load_file("model.safetensors")["weight"].sum() == 64

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)
LlamaForCausalLM(config).save_pretrained("model")
loaded = LlamaForCausalLM.from_pretrained("model")
assert type(loaded) is LlamaForCausalLM and isinstance(loaded, PreTrainedModel)

double = torch.compile(lambda x: x * 2 + 1, backend="eager")
assert double(torch.ones(3)).sum() == 9

import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(2):
    parallel(torch.ones(2)).sum().backward()
# It holds the group, whose threads would still run when the interpreter ends: an abort, at times.
del parallel
dist.destroy_process_group()

for _ in range(2):
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        assert type(error).__name__ in str(type(error))
    else:
        open("has-gpu", "w").close()
"""

BROKEN = """
import subprocess
import sys
from types import ModuleType
import torch.utils.data.dataloader as loader
loader._BaseDataLoaderIter.__next__ = None
import torch
# Modules that a release has under other names.
import safetensors
sys.modules["safetensors.torch"] = ModuleType("safetensors.torch")
print(torch.ones(2).sum().item())
"""


def _run(folder: ProgramFolder, text: str) -> list[TrackSpan]:
    """Run a program; return its stages without imports."""
    program = folder.write("program.py", text)
    folder.run(sys.executable, str(program), HF_HUB_OFFLINE="1")
    (track,) = [one for one in tracks_of(folder.stages(), 0) if one.role == "program.py"]
    return [
        span
        for span in track.spans
        if not span.name.startswith("import ") and span.name != "python start"
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ProgramFolder:
    return ProgramFolder(tmp_path_factory.mktemp("frameworks"))


@pytest.fixture(scope="module")
def spans(folder: ProgramFolder) -> list[TrackSpan]:
    """Return the stages of PROGRAM."""
    return _run(folder, PROGRAM)


def test_loads_and_a_compilation_are_noted_in_their_order(spans: list[TrackSpan]) -> None:
    assert not any(span.is_open for span in spans)
    expected = ["load distributed checkpoint", "load safetensors", "from_pretrained", "compile"]
    found = list(dict.fromkeys(span.name for span in spans))
    # Each may have others in it.
    assert [name for name in found if name in expected] == expected
    assert [span.name for span in spans].count("compile") == 1


def test_the_first_backward_pass_is_a_barrier(spans: list[TrackSpan]) -> None:
    found = [(one.name, one.barrier) for one in spans if one.barrier]
    assert ("first backward", "first backward of group 0") in found
    assert [name for name, _ in found].count("first backward") == 1


def test_an_initialisation_of_cuda_that_fails_is_noted_once_and_fails(
    spans: list[TrackSpan], folder: ProgramFolder
) -> None:
    assert [span.name for span in spans].count("CUDA initialisation") == 1
    if (folder.folder / "has-gpu").exists():
        raise MissingError("there is a GPU with a driver")
    (noted,) = [one for one in folder.stages() if one.name == "CUDA initialisation"]
    assert noted.failed
    assert "NVIDIA" in noted.message or "CUDA" in noted.message


def test_an_initialisation_of_cuda_is_noted(spans: list[TrackSpan], folder: ProgramFolder) -> None:
    if not (folder.folder / "has-gpu").exists():
        raise MissingError("there is no GPU with a driver, and nothing that could stand for one")
    (span,) = [one for one in spans if one.name == "CUDA initialisation"]
    assert not span.is_open


def test_what_a_framework_does_not_have_is_left_out(job: ProgramFolder) -> None:
    assert _run(job, BROKEN) == []
