"""Models that are copied, pickled and saved while a tool looks, and arguments of ops that are no tensors."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.coverage import CoverageTool
from amanda.tools.diff import diff
from amanda.tools.dump import DumpTool
from amanda.tools.dynamic_prune import ActivationPruneTool, AttentionPruneTool, DynamicChannelPruneTool
from amanda.tools.effective_path import EffectivePathTool
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.nan import NanTool
from amanda.tools.partition import PartitionTool
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.remat import RematTool
from amanda.tools.rewrite import RewriteTool
from amanda.tools.search import SearchTool
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

TOOLS: dict[str, Callable[[Path], amanda.Tool]] = {
    "nan": lambda folder: NanTool(stop=True, inf=True),
    "dump of summaries": lambda folder: DumpTool(folder, inputs="summary", outputs="summary"),
    "dump": lambda folder: DumpTool(folder, inputs="full", outputs="full"),
    "stats": lambda folder: StatsTool(),
    "profile": lambda folder: ProfileTool(),
    "trace": lambda folder: TraceTool(),
    "flops": lambda folder: FlopsTool(),
    "partition": lambda folder: PartitionTool(),
    "coverage": lambda folder: CoverageTool(),
    "effective_path": lambda folder: EffectivePathTool(),
    "remat": lambda folder: RematTool(),
    "rewrite": lambda folder: RewriteTool([]),
    "search": lambda folder: SearchTool(["conv2d=keep|conv5", "linear=keep|bits4"]),
    "prune": lambda folder: PruneTool(sparsity=0.5),
    "quantize": lambda folder: QuantizeTool("dynamic"),
    "inject": lambda folder: InjectTool("zero"),
    "channels": lambda folder: DynamicChannelPruneTool(),
    "activations": lambda folder: ActivationPruneTool(),
    "attention": lambda folder: AttentionPruneTool(),
}
CHANGE_NOTHING = list(TOOLS)[:12]


def trained() -> nn.Module:
    """A model with buffers after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))
    model(torch.rand(3, 2, 4, 4)).sum().backward()
    return model


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return average.module


def best(model: nn.Module) -> nn.Module:
    kept = saved(copy.deepcopy(model.state_dict()))
    other = trained()
    other.load_state_dict(kept)
    return other


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "average": averaged,
    "checkpoint": best,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", TOOLS)
def test_a_copy_that_is_made_in_a_scope_is_equal_and_runs(name: str, way: str, tmp_path: Path) -> None:
    model, image = trained(), torch.rand(3, 2, 4, 4)
    with amanda.apply(TOOLS[name](tmp_path)):
        copied = COPIES[way](model)
        if name in CHANGE_NOTHING:
            wanted = model.state_dict().items()
            assert all(torch.equal(one, copied.state_dict()[key]) for key, one in wanted)
        copied(image).sum().backward()


def odd_arguments(x: Tensor) -> list[Tensor]:
    """Calls with storages, generators, None, types and nested lists."""
    storage, generator = x.untyped_storage(), torch.Generator().manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # storages with a type are deprecated
        typed = x.storage().clone()
        shared = torch.empty(0).set_(typed, 0, (2, 2))
    storage.copy_(storage.clone())
    made = torch.empty(0).set_(storage)
    filled = torch.rand(3, generator=generator).normal_(generator=generator)
    nested = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.as_tensor([torch.tensor(1.0), 2.0])
    picked = x[None, ..., torch.tensor([0]), :1], torch.index_put(x, (torch.tensor([0]),), torch.ones(()))
    several = torch._foreach_add([x, x], [x, x]), torch.meshgrid([x[0], x[0]], indexing="ij")
    return [shared, made, filled, *nested, *picked, *several[0], *several[1], x.to(torch.float64, copy=True)]


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_that_are_no_tensors_are_left_alone(name: str, tmp_path: Path) -> None:
    wanted = odd_arguments(torch.arange(12.0).view(3, 4))
    with amanda.apply(TOOLS[name](tmp_path)):
        found = odd_arguments(torch.arange(12.0).view(3, 4))
    if name in CHANGE_NOTHING:
        assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_runs_that_copy_a_model_are_compared() -> None:
    model, image = trained(), torch.rand(3, 2, 4, 4)
    result = diff(lambda: copy.deepcopy(model)(image), lambda: copy.deepcopy(model)(image))
    assert result.comparisons
    assert result.first_difference is None


@pytest.mark.parametrize("name", ["nan", "dump of summaries", "dump", "stats"])
@pytest.mark.parametrize("size", [1, 70_000])
def test_memory_that_nobody_wrote_to_makes_no_warning(name: str, size: int, tmp_path: Path) -> None:
    signalling = torch.full((size,), 0x7FA00000, dtype=torch.int32).view(torch.float32)
    tool: Any = NanTool(inf=True) if name == "nan" else TOOLS[name](tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with amanda.apply(tool):
            signalling.reshape(-1).clone()
        str(tool.result)
