"""The first NaN: planted ones are found at their op, module and line, forward and backward."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import amanda
from amanda.tools.nan import NanResult, NanTool, NotFiniteError, Summary
from amanda.tools.stats import StatsTool


class Planted(nn.Module):
    """Two layers with something between that makes NaN, or not."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = Middle(between)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


class Middle(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(x)


def look(program: Callable[[], Any], **options: Any) -> NanTool:
    tool = NanTool(**options)
    with amanda.apply(tool):
        program()
    return tool


def test_a_planted_nan_is_found_at_its_op_module_and_line() -> None:
    model, x = Planted(lambda x: torch.log(x.abs() - 100)), torch.rand(2, 4)
    first = look(lambda: model(x)).result.first
    assert first is not None
    assert (first.phase, first.type, first.module) == ("forward", "log", "middle")
    assert first.source.startswith(f"{__file__}:")
    (read,), (written,) = first.inputs.values(), first.outputs.values()
    assert (read.nan, read.inf, read.shape, read.dtype) == (0, 0, (2, 4), "float32")
    assert read.most is not None
    assert read.most < -90
    assert written.nan == 8


def test_ops_that_pass_it_on_are_counted_and_not_blamed() -> None:
    model, x = Planted(lambda x: torch.log(x.abs() - 100)), torch.rand(2, 4)
    result = look(lambda: model(x).sum()).result
    assert [finding.type for finding in result.findings] == ["log"]
    assert result.passed_on == 2


def test_a_nan_of_the_backward_pass_is_found_there() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    first = look(lambda: (x.sqrt() * 0).sum().backward()).result.first
    assert first is not None
    assert (first.phase, first.type) == ("backward", "sqrt_backward")


def test_a_nan_within_fused_attention_is_found() -> None:
    q = torch.full((1, 1, 3, 4), 3e38)
    first = look(lambda: F.scaled_dot_product_attention(q, q, q)).result.first
    assert first is not None
    assert first.type == "scaled_dot_product_attention"
    assert list(first.inputs) == [0, 1, 2]


def line_of(mark: str) -> str:
    """The file and line of this module that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}"))
    return f"{__file__}:{number}"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q * 1e30, k * 1e30, v)  # planted: attention


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        distance = (x - x).norm(dim=-1) + torch.sqrt((x - x) ** 2).sum(-1)  # planted: backward
        return distance


def test_the_line_of_a_planted_nan_is_told_in_the_forward_and_backward_pass_and_in_attention() -> None:
    def logarithm(x: Tensor) -> Tensor:
        y = x + 1
        return torch.log(y.abs() - 100)  # planted: forward

    torch.manual_seed(0)
    first = look(lambda: Planted(logarithm)(torch.rand(2, 4))).result.first
    assert first is not None
    assert (first.phase, first.type, first.source) == ("forward", "log", line_of("forward"))
    model = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 2))
    first = look(lambda: model(torch.rand(1, 4, 8)).sum().backward()).result.first
    assert first is not None
    assert (first.type, first.module) == ("scaled_dot_product_attention", "1")
    assert first.source == line_of("attention")
    model = nn.Sequential(nn.Linear(4, 4), Root())
    result = look(lambda: model(torch.rand(3, 4)).sum().backward()).result
    assert result.first is not None
    assert (result.first.phase, result.first.type) == ("backward", "pow_backward")
    assert "Some inputs were Inf: nan:inf (shell) or NanTool(inf=True) (Python) says where." in str(result)
    result = look(lambda: model(torch.rand(3, 4)).sum().backward(), inf=True).result
    assert [finding.type for finding in result.findings] == ["sqrt_backward", "pow_backward"]
    assert {(finding.phase, finding.module, finding.source) for finding in result.findings} == {
        ("backward", "1", line_of("backward"))
    }


def test_an_op_that_writes_into_its_input_is_told_with_what_it_was_given() -> None:
    x = torch.full((3,), -1.0)
    first = look(lambda: x.sqrt_()).result.first
    assert first is not None
    assert (first.inputs[0].nan, first.inputs[0].mean) == (0, -1.0)


WRITES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "out": (lambda x, held: torch.log(x, out=held), "log"),
    "list": (lambda x, held: torch._foreach_sqrt_([held.add_(x)]), "_foreach_sqrt"),
    "running": (
        lambda x, held: F.batch_norm(x * torch.ones(2, 3) / (x.min() > 0), held, held + 1, training=True),
        "batch_norm",
    ),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", WRITES)
def test_what_an_op_writes_counts_as_it_was_before(kind: str, mode: Callable[[], Any]) -> None:
    write, expected_type = WRITES[kind]
    with mode(), amanda.apply(tool := NanTool()):
        for x in (torch.ones(3), torch.ones(3), torch.tensor([-1.0, 1.0, 1.0])):
            write(x, torch.zeros(3))
    assert [finding.type for finding in tool.result.findings] == [expected_type]


def test_an_op_that_begins_to_write_later_is_told_as_well() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    tool = NanTool()
    with amanda.apply(tool):
        for training in (False, False, True):
            x = torch.full((2, 3), float("inf") if training else 1.0)
            F.batch_norm(x, mean, variance, training=training)
    assert [finding.type for finding in tool.result.findings] == ["batch_norm"]


def test_the_inputs_of_an_op_that_raises_are_let_go_of() -> None:
    x = torch.rand(3, 4, requires_grad=True) * 2
    alive = ref(x)
    with amanda.apply(NanTool()):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.mm(x, x)
        del x
        assert alive() is None


def test_an_inf_is_found_and_a_nan_comes_before_it() -> None:
    def program() -> None:
        masked = torch.zeros(4).masked_fill(torch.ones(4, dtype=torch.bool), float("-inf"))
        torch.log(torch.full((4,), -1.0) + 0 * masked.isinf())

    result = look(program, inf=True).result
    assert [finding.type for finding in result.findings] == ["masked_fill", "log"]
    assert result.first is not None
    assert result.first.type == "log"
    assert [finding.type for finding in look(program).result.findings] == ["log"]


def test_the_sign_of_an_inf_is_in_the_summary_and_in_files() -> None:
    x = torch.tensor([1.0, float("inf"), *[-float("inf")] * 5])
    result = look(lambda: x - x).result
    assert result.first is not None
    assert result.first.inputs[0].values_text == "1 Inf, 5 -Inf, 1 to 1"
    assert Summary((9,), "float32", 1, 3, negative_inf=2).counts_text == "1 NaN, 1 Inf and 2 -Inf of 9"
    content = result.to_dict()
    assert NanResult.from_dict(content).findings == result.findings
    del content["findings"][0]["inputs"][0]["negative_inf"]  # files of earlier versions lack it
    assert NanResult.from_dict(content).findings[0].inputs[0].values_text == "6 Inf, 1 to 1"


def test_an_unused_tool_says_so() -> None:
    assert "Nothing was recorded: no scope of this tool was entered" in repr(NanTool())


def test_stop_raises_at_the_op_and_names_it() -> None:
    model, x = Planted(lambda x: torch.log(x.abs() - 100)), torch.rand(2, 4)
    with pytest.raises(NotFiniteError, match=r"First NaN: log in middle \(forward\), .*, step 0") as raised:
        look(lambda: model(x), stop=True)
    assert raised.value.finding.type == "log"
    assert model(x).isnan().all()


def test_so_many_findings_are_kept_and_the_others_counted() -> None:
    def program() -> None:
        for _ in range(4):
            for op in (torch.log, torch.sqrt, torch.acos, torch.asin):
                op(torch.full((2,), -2.0))

    result = look(program, limit=3).result
    assert [(finding.type, finding.times) for finding in result.findings] == [
        ("log", 4), ("sqrt", 4), ("acos", 4)
    ]  # fmt: skip
    assert "1 more ops produced NaN;" in str(result)


def test_finite_programs_have_an_empty_result() -> None:
    result = look(lambda: (torch.rand(3, requires_grad=True) + 1).sum().backward()).result
    assert not result
    assert result.first is None
    assert "none produced NaN" in str(result)


def test_a_result_goes_to_files_and_data_frames(tmp_path) -> None:
    result = look(lambda: torch.log(torch.full((2,), -1.0))).result
    content = json.loads(result.save(tmp_path / "nan.json").read_text())
    assert content["findings"][0]["outputs"]["0"]["nan"] == 2
    assert list(result.to_pandas()["type"]) == ["log"]


def test_memory_that_nobody_wrote_yet_is_no_beginning() -> None:
    stale = torch.full((64,), float("nan"))
    tool = NanTool()
    with amanda.apply(tool):
        fresh = [
            torch.empty(64),
            torch.empty_like(stale),
            stale.new_empty(64),
            torch.empty_strided((8, 8), (8, 1)),
        ]
        for tensor in fresh:
            nn.init.uniform_(tensor)
        stale.resize_(128)
    assert not tool.result


def test_complex_and_half_numbers_and_lists_are_looked_at() -> None:
    nothing = torch.tensor([complex("nan"), 1j])
    assert look(lambda: nothing + 1).result.passed_on == 1
    half = torch.full((2,), 60000, dtype=torch.half)
    assert look(lambda: half * 2, inf=True).result.findings[0].outputs[0].inf == 2
    assert look(lambda: torch.cat([torch.tensor([float("nan")]), torch.ones(1)])).result.passed_on == 1


def test_looking_changes_nothing() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), torch.rand(2, 4)
    plain = model(x)
    plain.sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    outputs: list[Tensor] = []
    look(lambda: outputs.append(model(x)) or outputs[0].sum().backward())
    assert torch.equal(outputs[0], plain)
    assert all(
        torch.equal(grad, parameter.grad) for grad, parameter in zip(grads, model.parameters(), strict=True)
    )


def test_it_is_loaded_by_name() -> None:
    assert isinstance(amanda.load_tool("nan", stop=True), NanTool)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", ["sparse", "rows", "nested", "float8", "subclass"])
def test_a_tensor_that_is_not_plain_is_looked_into(kind: str) -> None:
    class Marked(torch.Tensor):
        pass

    conversions: dict[str, Callable[[Tensor], Tensor]] = {
        "sparse": lambda x: x.to_sparse(),
        "rows": lambda x: x.to_sparse_csr(),
        "nested": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
        "float8": lambda x: x.to(torch.float8_e4m3fn),
        "subclass": lambda x: x.as_subclass(Marked),
    }
    tool = NanTool()
    with amanda.apply(tool):
        conversions[kind](torch.ones(2, 2))
        torch.ones(2, 2).log().sub(1)
        conversions[kind](torch.full((2, 2), -1.0).log())
    assert [finding.type for finding in tool.result.findings] == ["log"]


class CausalAttention(nn.Module):
    """Causal attention as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(self.mask == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ v  # planted: softmax


def test_healthy_attention_with_a_mask_of_inf_is_left_alone() -> None:
    model, x = CausalAttention(), torch.rand(2, 4, 8)
    result = look(lambda: model(x).sum().backward(), stop=True).result
    assert not result
    assert "; none produced NaN." in str(result)


def test_the_nan_of_a_row_that_is_masked_whole_is_born_in_softmax() -> None:
    model, x = CausalAttention(), torch.rand(2, 4, 8)
    model.mask[0] = 0
    first = look(lambda: model(x)).result.first
    assert first is not None
    assert (first.type, first.source) == ("softmax", line_of("softmax"))
    (read,), (written,) = first.inputs.values(), first.outputs.values()
    assert (read.nan, written.nan) == (0, 2 * 4)
    added = look(lambda: torch.softmax(torch.rand(4) + torch.full((4,), float("-inf")), 0)).result
    assert [finding.type for finding in added.findings] == ["softmax"]


def test_nan_that_comes_in_is_told_before_all_others() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.rand(2, 4)
    x[0, :3] = float("nan")
    tool = look(lambda: torch.log(-model(x.view(2, 4)).nan_to_num().abs() - 1))
    assert [entry.what for entry in tool.result.entered] == ["input 0 of linear"]
    assert [entry.type for entry in tool.result.findings] == ["log"]
    assert tool.result.sentence.startswith(
        "First NaN: input 0 of linear has 3 NaN of 8, read in 0 (forward), "
    )
    assert tool.result.rows()[0][0] == "input 0 of linear"
    with torch.no_grad():
        model[1].weight[0, 0] = float("nan")
    assert [entry.what for entry in look(lambda: model(torch.rand(2, 4))).result.entered] == [
        "parameter 1.weight"
    ]
    with pytest.raises(NotFiniteError, match=r"First NaN: parameter 1\.weight has 1 NaN of 6, read in 1"):
        look(lambda: model(torch.rand(2, 4)), stop=True)


def test_nan_that_an_op_takes_away_is_nobodys_fault() -> None:
    x = torch.tensor([float("nan"), 1.0])
    assert not look(lambda: (x.nan_to_num(), torch.where(x.isnan(), 0.0, x), x.view(2, 1))).result


def test_what_came_in_goes_to_files_and_back() -> None:
    x = torch.tensor([float("nan"), 0.0])
    result = look(lambda: x + 1).result
    assert type(result).from_dict(result.to_dict()).entered == result.entered
    assert len(result.merged(result).entered) == 2


class Overflowing(nn.Module):
    """A layer whose gradients have the range of half precision, behind what makes NaN of an overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        half = (x * self.weight).half()
        return (half - half * 0.5).sum()


def test_the_steps_that_a_grad_scaler_skips_are_counted_and_not_blamed() -> None:
    model = Overflowing()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)  # beyond half precision
    losses = []

    def train() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())

    result = look(train, stop=True).result
    assert not result
    assert scaler.get_scale() < 2.0**17
    assert result.sentence.endswith(
        "gradients overflowed in 2 steps that a GradScaler skipped; no op of other steps produced NaN."
    )


def test_compiled_attention_is_looked_at_as_well() -> None:
    model, x = CausalAttention(), torch.rand(2, 4, 8)
    model.mask[0] = 0
    call, tool = torch.compile(model, backend="aot_eager"), NanTool()
    with amanda.apply(tool, compiled="instrument"):
        call(x)
    assert [(finding.type, finding.source) for finding in tool.result.findings] == [
        ("softmax", line_of("softmax"))
    ]
    broken, tool = nn.Linear(4, 2), NanTool()
    broken.weight.data.fill_(float("nan"))
    call = torch.compile(broken, backend="aot_eager")
    with amanda.apply(tool, compiled="instrument"):
        call(torch.rand(2, 4))
    assert tool.result.sentence.startswith("First NaN: parameter weight has 8 NaN of 8, read")


@pytest.mark.parametrize("form", ["fused", "foreach", None])
@pytest.mark.parametrize(
    ("optimizer", "options", "types"),
    [
        (torch.optim.Adam, {"eps": 0.0}, {"_fused_adam", "_foreach_addcdiv", "addcdiv"}),
        (torch.optim.AdamW, {"eps": 0.0}, {"_fused_adamw", "_foreach_addcdiv", "addcdiv"}),
        (torch.optim.Adagrad, {"eps": 0.0}, {"_fused_adagrad", "_foreach_addcdiv", "addcdiv"}),
        (torch.optim.SGD, {"lr": 0.1}, {"_fused_sgd", "_foreach_add", "add"}),
    ],
)
def test_the_op_of_an_optimizer_that_makes_nan_is_named(
    optimizer: Any, options: dict[str, Any], types: set[str], form: str | None
) -> None:
    begin = torch.inf if optimizer is torch.optim.SGD else 0.0  # inf - inf, or 0 / 0
    weight = nn.Parameter(torch.full((2,), begin))
    weight.grad = weight.detach().clone()
    forms = {"fused": False, "foreach": False} | ({form: True} if form else {})
    with amanda.apply(tool := NanTool()):
        optimizer([weight], **options, **forms).step()
    assert weight.isnan().all()
    assert tool.result.first is not None
    assert tool.result.first.type in types
    assert tool.result.first.phase == "optimizer"


def test_an_assignment_by_index_that_brings_nan_passes_it_on() -> None:
    with amanda.apply(tool := NanTool()):
        x = torch.zeros(2, 2)
        x[:, 0] = torch.zeros(2) / torch.zeros(2)
    assert [finding.type for finding in tool.result.findings] == ["div"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_op_whose_saved_result_is_nan_passes_it_on(checkpointed: bool) -> None:
    layer = nn.Linear(3, 3)

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(layer(x), torch.tensor([0, 1]))

    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    with amanda.apply(tool := NanTool()):
        for _ in range(3):
            x = torch.ones(2, 3, requires_grad=True)
            value = (
                torch.utils.checkpoint.checkpoint(loss, x, use_reentrant=False) if checkpointed else loss(x)
            )
            value.backward()
    assert not tool.result.findings


class Masked(nn.Module):
    """Attention whose scores are masked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)  # planted: masked row
        return weights @ self.value(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Masked(8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


def masked_training(steps: int, masked_step: int) -> None:
    """Train a stack of attention; one row is masked whole from a step on."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        mask = torch.zeros(2, 5, 5, dtype=torch.bool)
        mask[0, 3] = step >= masked_step
        optimizer.zero_grad()
        model(torch.randn(2, 5, 8), mask).square().mean().backward()
        optimizer.step()


def test_the_answer_comes_first_and_what_follows_is_folded() -> None:
    result = look(lambda: masked_training(5, masked_step=2)).result
    lines = str(result).splitlines()
    assert lines[0].startswith(
        f"First NaN: softmax in layers.0 (forward), {line_of('masked row')}, step 2: output has 5 NaN of 50; "
    )
    assert "input 0 was float32[2,5,5]: 5 -Inf" in " ".join(lines[:2])
    assert "18 parameters were NaN after it, from step 3: layers.0.query.weight, " in str(result)
    assert len(lines) < 8
    assert "<table" not in result._repr_html_()  # there is but one beginning
    assert len(result.rows()) == 1
    assert [entry.is_consequence for entry in result.entered] == [True] * 18
    assert type(result).from_dict(result.to_dict()).notes() == result.notes()
    assert str(result).splitlines()[0].partition(":")[0] in result._repr_html_()


def test_the_first_nan_is_logged_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    steps: list[int] = []

    def program() -> None:
        for step in range(4):
            torch.log(torch.full((2,), 1.0 - 2 * (step >= 1)))
            steps.append(len(caplog.records))

    look(program)
    assert steps == [0, 1, 1, 1]
    assert caplog.records[0].getMessage().startswith("First NaN: log (forward), ")
    assert ", step 1: output has 2 NaN of 2; input 0 was float32[2]: -1 to -1" in caplog.text


def test_two_parameters_that_held_nan_from_the_start_are_both_beginnings() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for layer in (model[0], model[2]):
        layer.weight.data.fill_(torch.nan)
    result = look(lambda: [model(torch.ones(2, 4)) for _ in range(3)]).result
    assert result.sentence.startswith("First NaN: parameter 0.weight has 16 NaN of 16, read in 0 (forward), ")
    assert [row[0] for row in result.rows()] == ["parameter 0.weight", "parameter 2.weight"]
    assert "parameter 2.weight" in str(result)


def test_a_program_without_nan_has_no_table() -> None:
    result = look(lambda: torch.rand(3) + 1).result
    assert str(result) == "Checked 2 executions of ops (not accumulation of gradients); none produced NaN."
    assert "<table" not in result._repr_html_()


def test_a_tool_that_stops_does_so_each_time() -> None:
    tool = NanTool(stop=True)
    errors = []
    for _ in range(3):
        with pytest.raises(NotFiniteError) as caught, amanda.apply(tool):
            torch.log(torch.full((2,), -1.0))
        errors.append(caught.value)
    copied = pickle.loads(pickle.dumps(errors[0]))
    assert (copied.finding, str(copied)) == (errors[0].finding, errors[0].finding.sentence)
    tool.clear()
    with pytest.raises(NotFiniteError) as caught, amanda.apply(tool):
        torch.log(torch.full((2,), -1.0))
    assert caught.value.finding.step == 0  # type: ignore[attr-defined]


def test_gradients_of_a_skipped_step_may_be_clipped() -> None:
    torch.manual_seed(0)
    model, scaler, x = nn.Linear(8, 1), torch.amp.GradScaler("cpu"), 30 * torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(x).float().square().mean() * 50
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

    with amanda.apply(tool := NanTool(stop=True)):
        train()
    assert not tool.result
    assert "steps that a GradScaler skipped" in str(tool.result)


def test_what_has_no_elements_is_one_sentence() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    with amanda.apply(tool := NanTool(), stats := StatsTool()):
        model.to("meta")(torch.ones(2, 4, device="meta"))
    (remark,) = [remark for remark in tool.result.remarks if "has a shape" in remark]
    assert "tensors are not read: it has a shape and no elements, on the device meta, such as" in remark
    assert "not every output was read" in tool.result.sentence
    assert str(stats.result).splitlines()[1] == "No tensor was read."


def test_repeats_in_a_scaled_backward_pass_are_one_finding() -> None:
    scaler, parameter = torch.amp.GradScaler("cpu"), nn.Parameter(torch.zeros(2))
    with amanda.apply(tool := NanTool(limit=2)):
        scaled = scaler.scale(((parameter * 0 + 1) * float("inf")).sum())
        for _ in range(4):
            scaled.backward(retain_graph=True)  # Inf times 0
        result = tool.result
    assert [(finding.type, finding.times) for finding in result.findings] == [("mul_backward", 4)]
    assert "more ops produced" not in str(result)


def test_the_first_nan_of_merged_results_is_that_of_the_sentence() -> None:
    def late() -> None:
        for _ in range(5):
            torch.ones(2).add(1)
        torch.zeros(2).log().mul(0)

    slow, fast = look(late).result, look(lambda: torch.full((2,), -1.0).log()).result
    merged = slow.merged(fast)
    assert slow.first is not None
    assert merged.first is not None
    assert (slow.first.type, merged.first.type) == ("mul", "log")
    assert merged.sentence == f"{merged.first.sentence}."
