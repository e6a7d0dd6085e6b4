"""What is noted of loads, devices and compilers, in programs that know nothing of it."""

import importlib.util
import subprocess
import sys

import pytest

from bootseer.profile.model.tracks import Span, tracks_of
from testbed.needs import MissingError
from tests.bootseer.profile.collect.conftest import ProgramFolder

LOADS = """
import torch, torch.distributed.checkpoint as dcp
state = {"weight": torch.ones(64)}
dcp.save(state, checkpoint_id="checkpoint")
dcp.load({"weight": torch.zeros(64)}, checkpoint_id="checkpoint")
"""

SAFETENSORS = """
import torch
from safetensors.torch import load_file, save_file
save_file({"weight": torch.ones(64)}, "model.safetensors")
assert load_file("model.safetensors")["weight"].sum() == 64
"""

PRETRAINED = """
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 16}
config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1)
LlamaForCausalLM(config).save_pretrained("model")
loaded = LlamaForCausalLM.from_pretrained("model")
assert type(loaded) is LlamaForCausalLM and isinstance(loaded, PreTrainedModel)
"""

CUDA = """
import torch
for _ in range(2):
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        assert type(error).__name__ in str(type(error))
    else:
        raise SystemExit("there is a driver")
"""

COMPILED = """
import torch
double = torch.compile(lambda x: x * 2 + 1, backend="eager")
assert double(torch.ones(3)).sum() == 9
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


def _stages(folder: ProgramFolder, text: str, *needed: str) -> list[Span]:
    """What a program notes besides imports."""
    for name in ("torch", *needed):
        if importlib.util.find_spec(name) is None:
            raise MissingError(f"{name} is not installed")
    program = folder.write("program.py", text)
    folder.run(sys.executable, str(program), HF_HUB_OFFLINE="1")
    (track,) = [one for one in tracks_of(folder.stages(), 0) if one.role == "program.py"]
    return [
        span
        for span in track.spans
        if not span.name.startswith("import ") and span.name != "python start"
    ]


def test_a_distributed_checkpoint_that_is_loaded_is_noted(job: ProgramFolder) -> None:
    stages = _stages(job, LOADS)
    assert stages[0].name == "load distributed checkpoint"
    assert not any(stage.is_open for stage in stages)


def test_safetensors_that_are_loaded_are_noted(job: ProgramFolder) -> None:
    (stage,) = _stages(job, SAFETENSORS, "safetensors")
    assert (stage.name, stage.is_open) == ("load safetensors", False)


def test_a_pretrained_model_is_noted(job: ProgramFolder) -> None:
    stages = _stages(job, PRETRAINED, "transformers")
    assert stages[0].name == "from_pretrained"
    assert not stages[0].is_open


def test_an_initialisation_of_cuda_that_fails_is_noted_once_and_fails(job: ProgramFolder) -> None:
    stages = _stages(job, CUDA)
    assert [stage.name for stage in stages] == ["CUDA initialisation"]
    (noted,) = [one for one in job.stages() if one.name == "CUDA initialisation"]
    assert noted.failed
    assert "NVIDIA" in noted.message or "CUDA" in noted.message


@pytest.mark.needs(modules=["torch"])
def test_an_initialisation_of_cuda_is_noted(job: ProgramFolder) -> None:
    # Not in this process: torch would stay in it for all later tests.
    ask = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    if subprocess.run([sys.executable, "-c", ask], capture_output=True).returncode:
        raise MissingError("there is no GPU with a driver, and nothing that could stand for one")
    (stage,) = _stages(job, "import torch\ntorch.ones(1, device='cuda')\n")
    assert (stage.name, stage.is_open) == ("CUDA initialisation", False)


def test_a_compilation_is_noted(job: ProgramFolder) -> None:
    stages = _stages(job, COMPILED)
    assert [stage.name for stage in stages] == ["compile"]


def test_what_a_framework_does_not_have_is_left_out(job: ProgramFolder) -> None:
    assert _stages(job, BROKEN, "safetensors") == []
