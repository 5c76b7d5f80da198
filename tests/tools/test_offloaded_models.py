"""Weights whose values are brought for each call, or lie in shards: accelerate's offloading, FSDP2."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import children
import pytest
import torch
from torch import Tensor, nn

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.weights import parameter_store

X = torch.linspace(-1, 1, 12).reshape(3, 4)
CPU = torch.device("cpu")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), inner, nn.Linear(8, 2))


def from_host(model: nn.Module, _: Path) -> None:
    import accelerate

    accelerate.cpu_offload(model, execution_device=CPU)


def from_disk(model: nn.Module, folder: Path) -> None:
    import accelerate

    accelerate.disk_offload(model, str(folder), execution_device=CPU)


def dispatched(model: nn.Module, folder: Path) -> None:
    import accelerate

    devices = {"0": "cpu", "1": "cpu", "2": "disk", "3": "cpu"}
    accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=str(folder))


OFFLOADS = (from_host, from_disk, dispatched)
Offload = Callable[[nn.Module, Path], None]


class Analyses(amanda.Tool):
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.add_inst_for_op(lambda context: self.ids.append(context.get_op_id()))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_each_op_is_analysed_once(offload: Offload, tmp_path: Path) -> None:
    model, tool = network(), Analyses()
    offload(model, tmp_path)
    with amanda.apply(tool), torch.no_grad():
        model(X)
        known = len(tool.ids)
        for _ in range(4):
            model(X)
    assert len(tool.ids) == known


@pytest.mark.parametrize("offload", OFFLOADS)
def test_weights_are_pruned_as_in_memory_and_finalized(offload: Offload, tmp_path: Path) -> None:
    model, twin = network(), network()
    offload(model, tmp_path)
    tool, of_twin = PruneTool(), PruneTool()
    with amanda.apply(of_twin):
        expected = twin(X)
    with amanda.apply(tool):
        for _ in range(5):
            assert torch.equal(model(X), expected)
    assert [row[2] for row in tool.result.rows()] == ["0", "2.0", "3"]
    assert tool.state_dict().keys() == of_twin.state_dict().keys()
    tool.finalize(model)
    assert torch.equal(model(X), expected)
    read = {held.identity: held.read() for held in parameter_store("torch").parameters(model)}
    assert len(read) == len(list(twin.parameters()))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_averages_of_training_with_quantisation_go_on(offload: Offload, tmp_path: Path) -> None:
    model, twin = network(), network()
    offload(model, tmp_path)
    results = []
    for one in (model, twin):
        tool = QuantizeTool("qat", averaging=0.5)
        with amanda.apply(tool):
            for step in range(4):
                one(X * (1 + step))
        results.append({name: value.clone() for name, value in tool.state_dict().items()})
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


SHARDED = """
import sys

import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import amanda
from amanda.tools.prune import PruneTool

rank, folder, half = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "half"
distributed.init_process_group("gloo", store=distributed.FileStore(folder, 2), rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if half else {}
for layer in (model[0], model[2], model):
    fully_shard(layer, **options)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tool, x = PruneTool(), torch.linspace(-1, 1, 8).reshape(2, 4)
with amanda.apply(tool):
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = model(x)
assert sorted(name for name in tool.state_dict() if "mask" in name) == ["0.weight/mask", "2.weight/mask"]
tool.finalize(model)
assert torch.equal(model(x), expected)
for layer in (model[0], model[2]):
    assert (layer.weight.full_tensor() == 0).float().mean() == 0.5
distributed.destroy_process_group()
print("pruned")
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["full", "half"])
def test_weights_in_shards_are_finalized_on_every_rank(precision: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(SHARDED)
    arguments = [str(tmp_path / "store"), precision]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                children.started([sys.executable, script, str(rank), *arguments], stdout=PIPE, stderr=PIPE)
            )
            for rank in range(2)
        ]
        for one in ranks:
            output, errors = one.communicate(timeout=120)
            assert "pruned" in output, errors


def test_what_has_no_parameters_is_an_error_that_says_what_has() -> None:
    with pytest.raises(
        amanda.AmandaError, match="int has no parameters; give a module, or a list of parameters"
    ):
        list(parameter_store("torch").parameters(3))
    layer = nn.Linear(2, 2, device="meta")
    with pytest.raises(amanda.AmandaError, match="weight of Linear is on the meta device"):
        next(parameter_store("torch").parameters(layer)).read()


def test_a_list_of_parameters_is_read_and_written() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    (held,) = parameter_store("torch").parameters([weight])
    held.write(torch.zeros(2, 3))
    assert not held.read().any()
    held.change(lambda value: value + 1, ((3,), (1,), 3))
    assert weight.tolist() == [[0.0] * 3, [1.0] * 3]
    assert isinstance(held.read(), Tensor)
