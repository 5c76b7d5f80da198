"""partition: the stages of a plan train over processes as the whole model does in one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pipelined
import pytest
import torch
from children import started
from pipelined import ROWS, Residual, Task, Tied, inputs
from torch import Tensor, nn

import amanda
from amanda.tools.partition import PartitionError, PartitionResult, PartitionTool, Plan

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no processes")
SCHEDULES = ("gpipe", "1f1b")


def cut(
    model: nn.Module, *x: Tensor, loss: Callable[[Tensor], Tensor] = Tensor.sum, **options: Any
) -> PartitionResult:
    tool: PartitionTool[PartitionResult] = PartitionTool(**options)
    with amanda.apply(tool):
        loss(model(*x)).backward()  # type: ignore[no-untyped-call]
    return tool.result


def of_task(task: Task, name: str, **options: Any) -> PartitionResult:
    x, y = task.batches[0]
    return cut(task.model, *inputs(name, x[:ROWS]), loss=lambda made: task.loss(made, y[:ROWS]), **options)


def trained(name: str, stages: int, folder: Path, limit: float) -> dict[str, Any]:
    """Return what all ranks and one process gave, each in at most `limit` seconds."""
    of_task(pipelined.task(name), name, stages=stages).save(folder / "partition.json")
    command = [sys.executable, pipelined.__file__, name, ",".join(SCHEDULES)]
    with ExitStack() as ended:
        ranks = [ended.enter_context(started([*command, str(rank), str(folder)])) for rank in range(stages)]
        for rank in ranks:
            assert rank.wait(timeout=limit) == 0
    made: dict[str, Any] = torch.load(folder / "result.pt")
    return made


def assert_same(made: dict[str, Any]) -> None:
    """Assert that both schedules give the bits of one process, and that stages have the model's state."""
    expected = made["alone"]
    for schedule in SCHEDULES:
        found = made[schedule]
        assert found["losses"] == expected["losses"]
        assert found["state"].keys() == expected["state"].keys()
        assert all(torch.equal(found["state"][name], one) for name, one in expected["state"].items())
        assert sorted(name for names in found["names"] for name in names) == sorted(expected["state"])


def test_stages_train_to_the_bits_of_one_process(tmp_path: Path) -> None:
    made = trained("residual", 2, tmp_path, limit=120)
    assert_same(made)
    assert made["differing"].startswith("the plans or the models of the ranks [1] and of rank 0")


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", ["bert", "resnet18"])
def test_models_train_to_the_bits_of_one_process(
    name: str, stages: int, tmp_path: Path, transformers: Any
) -> None:
    assert_same(trained(name, stages, tmp_path, limit=300))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("tied", 2),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("recurrent", 2), ("tied", 3), ("gpt2", 2), ("gpt2", 4))
        ),
    ],
)
def test_gradients_of_tied_parameters_add_up_over_stages(
    name: str, stages: int, tmp_path: Path, transformers: Any
) -> None:
    made = trained(name, stages, tmp_path, limit=300)
    expected = made["alone"]
    for schedule in SCHEDULES:
        # The two uses of the tied weight add up per use, not per micro-batch, so sums have another order.
        # Adam steps parameters whose gradient is rounding alone, such as the bias of keys, by more of it.
        assert made[schedule]["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        for path, value in expected["state"].items():
            assert torch.allclose(made[schedule]["state"][path], value, rtol=1e-5, atol=1e-4), path


class Branches(nn.Module):
    """Branches of unequal width, so that another order of the ops is cut more evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 60), nn.ReLU(inplace=True), nn.Linear(60, 40))
        self.right = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 40))
        self.top = nn.Linear(80, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = self.left(x), self.right(x)
        return {"left": left.mT, "made": self.top(torch.cat([left, right], 1))}


def small() -> Iterator[Any]:
    torch.manual_seed(0)
    tokens = torch.randint(0, 30, (2, 5))
    for stages in (2, 3, 4):
        yield pytest.param(Residual(), (torch.rand(2, 3, 8, 8),), {"stages": stages}, id=f"residual-{stages}")
        yield pytest.param(Tied(), (tokens, torch.rand(2, 5)), {"stages": stages}, id=f"tied-{stages}")
    for stages in (2, 3):
        options = {"stages": stages, "tolerance": 0.0}
        yield pytest.param(Branches(), (torch.rand(2, 16),), options, id=f"branches-{stages}")
    least: dict[str, Any] = {"method": "min_cut", "tolerance": 0.6}
    yield pytest.param(Branches(), (torch.rand(2, 16),), least, id="branches-min-cut")


@pytest.mark.parametrize(("model", "x", "options"), list(small()))
def test_stages_one_after_another_are_the_model(
    model: nn.Module, x: tuple[Tensor, ...], options: Any
) -> None:
    result = cut(model, *x, loss=_summed, **options)
    pipeline = result.pipeline(model.eval(), x)
    expected, found = model(*x), pipeline.pipe(*x)
    leaves = torch.utils._pytree.tree_leaves
    assert all(map(torch.equal, leaves(found), leaves(expected)))
    for stage in range(result.request.stages):
        graph: Any = pipeline.pipe.get_stage_module(stage).graph
        sent = graph.find_nodes(op="output")[0].all_input_nodes
        assert all(one.meta["val"].is_contiguous() for one in sent) or stage == result.request.stages - 1
        node = [one for one in pipeline.pipe.split_gm.graph.nodes if one.op == "call_module"][stage]
        read = {getattr(one, "args", (one,))[0] if one.op == "call_function" else one for one in node.args}
        assert all(one.op == "placeholder" or one.name.endswith(f"pp_{stage - 1}") for one in read)


def _summed(made: Any) -> Tensor:
    loss: Tensor = (made["made"] if isinstance(made, dict) else made).sum()
    return loss


def test_stages_hold_the_parameters_of_the_model_itself() -> None:
    model, x = Residual(), torch.rand(2, 3, 8, 8)
    pipeline = cut(model, x).pipeline(model, (x,))
    held = {id(one) for stage in range(2) for one in pipeline.pipe.get_stage_module(stage).parameters()}
    assert held == {id(one) for one in model.parameters()}


def test_plan_is_read_from_the_file_of_a_result(tmp_path: Path) -> None:
    result = cut(Residual(), torch.rand(2, 3, 8, 8), schedule="gpipe")
    assert Plan.load(result.save(tmp_path / "partition.json")) == result.plan
    (tmp_path / "other.json").write_text('{"schema": "amanda.flops"}')
    with pytest.raises(
        PartitionError, match=r"other.json is no file that partition .*it holds 'amanda.flops'"
    ):
        Plan.load(tmp_path / "other.json")


def test_plan_of_nothing_is_an_error() -> None:
    result = PartitionTool().result
    with pytest.raises(PartitionError, match="nothing was executed, so there is no plan"):
        _ = result.plan


def chain(n: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(n)))


@pytest.mark.parametrize("other", [chain(6), chain(2)])
def test_plan_of_another_model_is_an_error(other: nn.Module) -> None:
    x = torch.rand(2, 16)
    result = cut(chain(4), x)
    with pytest.raises(PartitionError, match="trace the same model, in the same mode"):
        result.pipeline(other, (x,))


def test_stage_of_the_loss_alone_is_an_error() -> None:
    model, x = chain(2), torch.rand(2, 16)
    result = cut(model, x, stages=3)
    with pytest.raises(PartitionError, match=r"no op of the stages \[2\] .* a stage of the loss alone"):
        result.pipeline(model, (x,))


def test_inputs_are_a_tuple() -> None:
    x = torch.rand(2, 16)
    with pytest.raises(PartitionError, match=r"mb_args is tensor.*; give a tuple of values"):
        cut(chain(4), x).pipeline(chain(4), x)  # type: ignore[arg-type]


class Number(nn.Module):
    """A number that the data decide goes from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)

    def forward(self, x: Tensor) -> Tensor:
        number = x.sum().item()
        output: Tensor = self.layers(x) * number
        return output


def test_value_that_crosses_and_is_no_tensor_is_an_error() -> None:
    model, x = Number(), torch.rand(2, 16)
    result = cut(model, x)
    with pytest.raises(PartitionError, match=r"stage 0 makes item.* which .* reads; tensors alone cross"):
        result.pipeline(model, (x,))


class Counting(nn.Module):
    """Each layer counts in one buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain(4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            self.count += 1.0
            x = layer(x) + self.count
        return x


def test_buffer_that_several_stages_write_is_an_error() -> None:
    model, x = Counting(), torch.rand(2, 16)
    result = cut(model, x)
    with pytest.raises(PartitionError, match=r"stage \d writes to count, which .* a write reaches no other"):
        result.pipeline(model, (x,))


def test_group_of_another_size_is_an_error(tmp_path: Path) -> None:
    model, x = chain(4), torch.rand(2, 16)
    pipeline = cut(model, x).pipeline(model, (x,))
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(PartitionError, match="the plan has 2 stages, and the group has 1 processes"):
            pipeline.stage()
    finally:
        torch.distributed.destroy_process_group()
