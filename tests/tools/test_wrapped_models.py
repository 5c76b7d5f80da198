"""State of tools that was made for a wrapped model holds for the bare one, and the reverse."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import amanda
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(self.first(x))
        return result


@pytest.fixture(autouse=True)
def one_rank(example: Any) -> Iterator[None]:
    example("models").let_torchvision_load()  # which peft imports
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    distributed.fsdp.fully_shard(model.get_submodule("body"))
    return distributed.fsdp.fully_shard(model)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.body = checkpoint_wrapper(model.get_submodule("body"))  # type: ignore[no-untyped-call]
    return model


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


def accelerated(model: nn.Module) -> Any:
    import accelerate

    return accelerate.Accelerator(cpu=True).prepare(in_ddp(model))


def adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["first"], r=2))  # type: ignore[return-value]


WRAPPERS = (
    in_ddp, sharded, compiled, checkpointed, averaged, accelerated, adapted, nn.DataParallel,
    lambda model: in_ddp(compiled(model)), lambda model: compiled(in_ddp(model)),
)  # fmt: skip


def masks(tool: PruneTool) -> dict[str, Tensor]:
    return {name: value for name, value in tool.state_dict().items() if name.endswith("/mask")}


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_masks_are_those_of_the_bare_model(wrap: Callable[[nn.Module], Any]) -> None:
    bare = Network()
    wrapped = wrap(copy.deepcopy(bare))
    learned = PruneTool()
    with amanda.apply(learned):
        expected = wrapped(X)
    assert sorted(masks(learned)) == ["body.1.weight/mask", "first.weight/mask"]
    again = PruneTool(sparsity=0.25)
    again.load_state_dict(learned.state_dict())
    with amanda.apply(again):
        torch.testing.assert_close(bare(X), expected)
    assert not again.result.waiting
    for name, mask in masks(again).items():
        assert torch.equal(mask, masks(learned)[name])


@pytest.mark.parametrize(
    "wrap", [one for one in WRAPPERS if one is not adapted], ids=lambda wrap: wrap.__name__
)
def test_static_scales_of_the_bare_model_hold(wrap: Callable[[nn.Module], Any]) -> None:
    bare = Network()
    calibrated = QuantizeTool()
    with amanda.apply(calibrated), calibrated.calibrating():
        bare(X)
    wrapped = wrap(copy.deepcopy(bare))
    again = QuantizeTool()
    again.load_state_dict(calibrated.state_dict())
    with amanda.apply(calibrated):
        expected = bare(X)
    with amanda.apply(again):
        torch.testing.assert_close(wrapped(X), expected)
    assert not again.result.waiting


def test_adapters_are_left_unless_they_are_asked_for() -> None:
    model = adapted(Network())
    tool, asked = PruneTool(), PruneTool(module="first.lora_A")
    with amanda.apply(tool):
        model(X)
    assert "linear of first.lora_A.default" in str(tool.result)
    with amanda.apply(asked):
        model(X)
    assert sorted(masks(asked)) == ["first.lora_A.default.weight/mask"]
