"""Files of torch.export with routines written into them, which PyTorch alone loads and runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import children
import pytest
import torch
from torch import nn

import amanda
from amanda.errors import ArtefactError, NotTraceableError
from amanda.tools.prune import PruneTool

ALONE = """
import sys
sys.modules["amanda"] = None
import torch
program, given, out = sys.argv[1:]
args, kwargs = torch.load(given)
with torch.no_grad():
    torch.save(torch.export.load(program).module()(*args, **kwargs), out)
"""


def alone(program: Path, args: tuple[Any, ...], kwargs: dict[str, Any], tmp_path: Path) -> Any:
    """What a program gives in a process that has no Amanda."""
    torch.save((args, kwargs), tmp_path / "given.pt")
    command = [
        sys.executable,
        "-c",
        ALONE,
        str(program),
        str(tmp_path / "given.pt"),
        str(tmp_path / "out.pt"),
    ]
    done = children.run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(tmp_path / "out.pt")


class Network(nn.Module):
    """Convolution, normalisation, and a product whose weight an embedding reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.words = nn.Embedding(5, 144)
        self.head = nn.Linear(144, 5, bias=False)
        self.head.weight = self.words.weight
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.relu(self.norm(self.conv(x))).flatten(1)
        return {"y": self.last(self.head(h)) * scale, "word": self.words(torch.tensor([1]))}


X = torch.linspace(-1, 1, 384).reshape(2, 3, 8, 8)
SCALE = torch.tensor([[1.0], [2.0]])


@pytest.fixture
def program(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    size = torch.export.Dim("size", min=2, max=64)
    sizes = {"x": {0: size}, "scale": {0: size}}
    exported = torch.export.export(Network().eval(), (X,), {"scale": SCALE}, dynamic_shapes=sizes)
    torch.export.save(exported, tmp_path / "model.pt2")
    return tmp_path / "model.pt2"


@pytest.mark.slow
def test_a_pruned_copy_gives_what_the_tool_gives_when_it_runs(program: Path, tmp_path: Path) -> None:
    done = amanda.instrument(program, PruneTool(), out=tmp_path / "pruned.pt2")
    torch.manual_seed(0)
    network = Network().eval()
    x, scale = torch.cat([X, X, X]), torch.cat([SCALE, SCALE, SCALE])
    with torch.no_grad():
        bare = network(x, scale=scale)
        with amanda.apply(PruneTool()):
            network(x, scale=scale)  # the embedding, which is called last, takes its weight from the product
            running = network(x, scale=scale)
    outputs = alone(tmp_path / "pruned.pt2", (x,), {"scale": scale}, tmp_path)
    assert torch.equal(outputs["y"], running["y"])
    assert torch.equal(outputs["word"], running["word"])
    assert not torch.equal(running["y"], bare["y"])
    assert {(item.scope, item.stored) for item in done.inlined} >= {("conv", True), ("last", True)}
    copy = torch.export.load(tmp_path / "pruned.pt2")
    names = [str(node.target) for node in copy.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "mul" in name] == ["aten.mul.Tensor"]
    assert (copy.state_dict["conv.weight"] == 0).float().mean() == 0.5
    assert list(copy.state_dict) == list(torch.export.load(program).state_dict)
    assert [str(item) for item in copy.range_constraints.values()] == ["VR[2, 64]"]
    about = {"amanda.json": ""}
    torch.export.load(tmp_path / "pruned.pt2", extra_files=about)
    assert json.loads(about["amanda.json"])[0]["tools"] == ["amanda.tools.prune._tool.PruneTool"]


class Doubling(amanda.Tool):
    """Doubles the weights of products, and adds to what relu is given."""

    def __init__(self, shift: Callable[[Any], Any]) -> None:
        self.shift = shift
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            context.insert_before_op(self.double, inputs=["weight"])
        elif context.get_op_type() == "relu":
            context.insert_before_op(self.shift)

    @amanda.traceable
    def double(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * torch.full((1,), 2.0)


def test_a_copy_is_instrumented_again_and_tied_weights_stay_tied(program: Path, tmp_path: Path) -> None:
    shift = amanda.traceable(lambda x: x + 1)
    amanda.instrument(program, Doubling(shift), out=tmp_path / "once.pt2")
    done = amanda.instrument(tmp_path / "once.pt2", Doubling(shift), out=tmp_path / "twice.pt2")
    torch.manual_seed(0)
    network = Network().eval()
    with torch.no_grad():
        h = torch.relu(network.norm(network.conv(X)) + 2).flatten(1)
        y = nn.functional.linear(h, 4 * network.head.weight)
        expected = nn.functional.linear(y, 4 * network.last.weight, network.last.bias) * SCALE
        outputs = torch.export.load(tmp_path / "twice.pt2").module()(X, scale=SCALE)
    torch.testing.assert_close(outputs["y"], expected)
    assert torch.equal(outputs["word"], network.words.weight[1:2])
    assert {item.scope for item in done.inlined} == {"", "head", "last"}


class Joined(nn.Module):
    """A product of what is joined."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, both: list[torch.Tensor]) -> torch.Tensor:
        joined: torch.Tensor = self.head(torch.cat(both))
        return joined


SIZE = torch.export.Dim("size", min=2, max=16)


@pytest.mark.parametrize("sizes", [[SIZE, 2 * SIZE], [torch.export.Dim.AUTO, torch.export.Dim.AUTO]])
def test_sizes_that_may_change_stay_so_in_lists_and_in_open_scopes(sizes: list[Any], tmp_path: Path) -> None:
    model, tensors = Joined().eval(), [torch.ones(3, 4), torch.ones(6, 4)]
    changing = {"both": [{0: size} for size in sizes]}
    torch.export.save(torch.export.export(model, (tensors,), dynamic_shapes=changing), tmp_path / "model.pt2")
    with torch.no_grad(), amanda.apply(PruneTool()):
        amanda.instrument(tmp_path / "model.pt2", PruneTool(), out=tmp_path / "out.pt2")
        more = [torch.ones(5, 4), torch.ones(10, 4)]
        running = model(more)
    assert torch.equal(torch.export.load(tmp_path / "out.pt2").module()(more), running)


def test_a_routine_that_cannot_be_traced_is_told(program: Path, tmp_path: Path) -> None:
    routine = amanda.traceable(lambda x: x + float(x.detach().numpy().mean()))
    with pytest.raises(NotTraceableError, match="it cannot be traced") as error:
        amanda.instrument(program, Doubling(routine), out=tmp_path / "out.pt2")
    assert [refusal[:3] for refusal in error.value.refusals] == [("relu", "", "Doubling")]
    assert not (tmp_path / "out.pt2").exists()


def test_files_that_are_no_programs_are_refused(program: Path, tmp_path: Path) -> None:
    content = program.read_bytes()
    for name, part in (("empty.pt2", b""), ("half.pt2", content[: len(content) // 2])):
        (tmp_path / name).write_bytes(part)
        with pytest.raises(ArtefactError, match=rf"{name} is not a readable torch.export file"):
            amanda.instrument(tmp_path / name, PruneTool(), out=tmp_path / "out.pt2")


class Shifting(amanda.Tool):
    """Adds a multiple of a tensor that it holds to what relu is given: a factor for each relu in order."""

    def __init__(self, *factors: float) -> None:
        self.held = torch.tensor([3.0])
        self.factors = list(factors)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op_type() == "relu":
            context.insert_before_op(self.shift, factor=self.factors.pop(0))

    @amanda.traceable
    def shift(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x + self.held * factor


class Twice(nn.Module):
    """Two ops of one type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.relu(x) - 8)


@pytest.mark.parametrize(("first", "second", "products"), [(2.0, 2.0, 0), (2.0, 3.0, 2)])
def test_a_held_tensor_that_two_ops_compute_from_is_overwritten_by_one_value_alone(
    first: float, second: float, products: int, tmp_path: Path
) -> None:
    torch.export.save(torch.export.export(Twice(), (X,)), tmp_path / "model.pt2")
    amanda.instrument(tmp_path / "model.pt2", Shifting(first, second), out=tmp_path / "copy.pt2")
    copy = torch.export.load(tmp_path / "copy.pt2")
    expected = torch.relu(torch.relu(X + 3 * first) - 8 + 3 * second)
    torch.testing.assert_close(copy.module()(X), expected)
    names = [str(node.target) for node in copy.graph.nodes if node.op == "call_function"]
    assert names.count("aten.mul.Tensor") == products


def test_a_program_is_instrumented_within_a_scope_that_intercepts_nothing(
    program: Path, tmp_path: Path
) -> None:
    class Outer(amanda.Tool):
        intercepts = False

    with amanda.apply(Outer()):
        amanda.instrument(program, PruneTool(sparsity=0.5), out=tmp_path / "out.pt2")
    assert (tmp_path / "out.pt2").exists()
