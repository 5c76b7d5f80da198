"""Selections of ops, and windows of steps, with real models."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.errors import AmandaError
from amanda.tools.flops import FlopsTool
from amanda.tools.inject import InjectTool
from amanda.tools.nan import NanTool
from amanda.tools.patch import PatchTool
from amanda.tools.prune import PruneTool
from amanda.tools.quantize import QuantizeTool
from amanda.tools.search import Choice, SearchTool
from amanda.tools.select import Patterns, Phase, SelectionError, select
from amanda.tools.stats import StatsTool
from amanda.tools.steps import Steps, Window, WindowError


class Seen(amanda.Tool):
    """What is analysed and what is executed, by names of ops."""

    def __init__(self) -> None:
        self.analysed: list[str] = []
        self.executed: list[str] = []
        self.add_inst_for_op(self.forward)
        self.add_inst_for_op(self.backward, backward=True)

    def forward(self, context: amanda.OpContext) -> None:
        name = f"{context.get_scope()}:{context.get_op_type()}"
        context["name"] = name
        self.analysed.append(name)
        context.insert_before_op(self.note, inputs=[], name=name)

    def backward(self, context: amanda.OpContext) -> None:
        name = f"{context['name']}<{context.get_backward_op().__name__}"
        self.analysed.append(name)
        context.insert_before_backward_op(self.note, grad_outputs=[], name=name)

    def note(self, name: str) -> None:
        self.executed.append(name)


class Handing(amanda.Tool):
    """Its backward routine needs what the forward routine of the same execution handed on."""

    def __init__(self) -> None:
        self.handed: list[int] = []
        self.executions = 0
        self.add_inst_for_op(lambda context: context.insert_before_op(self.give, inputs=[]))
        self.add_inst_for_op(self.backward, backward=True)

    def backward(self, context: amanda.OpContext) -> None:
        if context.get_backward_op().__name__ == "AddmmBackward0":
            context.insert_before_backward_op(self.take, grad_outputs=[])

    def give(self, run: dict[str, Any]) -> None:
        self.executions += 1
        run["number"] = self.executions

    def take(self, run: dict[str, Any]) -> None:
        self.handed.append(run["number"])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


def x() -> torch.Tensor:
    return torch.rand(3, 4)


@pytest.mark.slow
def test_only_selected_types_are_analysed() -> None:
    seen = select(Seen(), type="linear")
    with amanda.apply(seen):
        mlp()(x())
    assert seen.analysed == ["0:linear", "1.1:linear"]


@pytest.mark.parametrize("word", ["lin?ar", "Lin*", "relu"])
def test_types_may_be_patterns(word: str) -> None:
    seen = select(Seen(), type=[word, "relu"])
    with amanda.apply(seen):
        mlp()(x())
    assert "1.0:relu" in seen.analysed
    assert len(seen.analysed) == (3 if word == "lin?ar" else 1)


def test_patterns_answer_the_same_names_alike() -> None:
    """Patterns without `*`, `?` and `[` are names; what was asked before is answered from memory."""
    patterns = Patterns("type", ["linear", "conv?d", "relu", "ge[l]u", "1"])
    for _ in range(2):
        assert patterns("linear", "addmm")
        assert patterns("conv2d")
        assert patterns("gelu")
        assert not patterns("Linear")
        assert not patterns("conv")
    assert list(patterns.unused) == ["relu", "1"]
    assert patterns.rejected == {"Linear", "conv"}


def test_the_frameworks_own_name_selects_too() -> None:
    a, own, word = torch.rand(2, 2), select(Seen(), type="t"), select(Seen(), type="transpose")
    with amanda.apply(own, word):
        a.t()
    assert own.analysed == word.analysed == [":t"]


@pytest.mark.parametrize("module", ["1", "1.*", ["nothing", "1"], "[1]", "1.[01]"])
def test_a_module_is_selected_with_what_lies_in_it(module: Any) -> None:
    seen = select(Seen(), module=module)
    with amanda.apply(seen):
        mlp()(x())
    assert seen.analysed == ["1.0:relu", "1.1:linear"]


@pytest.mark.parametrize("exclude", ["1.1", "*.1", ["1.1", "0.*"]])
def test_an_excluded_module_is_left_with_what_lies_in_it(exclude: Any) -> None:
    seen, whole = (
        select(Seen(), module="1", exclude=exclude),
        select(Seen(), type=["relu", "linear"], exclude="1"),
    )
    with amanda.apply(seen, whole):
        mlp()(x())
    assert seen.analysed == ["1.0:relu"]
    assert whole.analysed == ["0:linear"]


def test_backward_ops_go_with_their_forward_op() -> None:
    seen = select(Seen(), module="1.1")
    with amanda.apply(seen):
        mlp()(x()).sum().backward()
    assert {name.partition("<")[0] for name in seen.analysed} == {"1.1:linear"}
    assert any("AddmmBackward0" in name for name in seen.executed)


def test_phases_are_told_apart_and_contexts_stay_whole() -> None:
    forward, backward = select(Seen(), phase="forward"), select(Seen(), phase="backward")
    with amanda.apply(forward, backward):
        mlp()(x()).sum().backward()
    assert forward.executed
    assert not any("<" in name for name in forward.executed)
    assert backward.executed
    assert all("<" in name for name in backward.executed)


def test_tools_that_come_with_amanda_are_selected() -> None:
    model, inputs = mlp(), x()
    whole, part = FlopsTool(), select(FlopsTool(), module="1", phase="backward")
    with amanda.apply(whole, part):
        model(inputs).sum().backward()
    rows = [row for row in whole.result.rows() if row[0] == "backward" and row[2].startswith("1")]
    assert rows
    assert part.result.rows() == rows
    finder = select(NanTool(inf=True), phase="backward")
    with amanda.apply(finder):
        a = torch.zeros(2, requires_grad=True)
        (a.sqrt().sum() + torch.log(-torch.ones(2)).sum()).backward()
    assert {one.phase for one in finder.result.findings} == {"backward"}


def test_two_selections_hold_together() -> None:
    seen = select(select(Seen(), type="linear"), module="1")
    with amanda.apply(seen):
        mlp()(x())
    assert seen.analysed == ["1.1:linear"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"type": "linaer"}, "no op was selected by type=linaer; did you mean linear?"),
        ({"module": ["l.1", "l.2"]}, "no op was selected by module=l.1+l.2; did you mean 1.1?"),
        ({"type": "relu", "module": "1.1"}, "no op was selected by type=relu and module=1.1 together"),
        ({"phase": "optimizer"}, "no op was selected by phase=optimizer"),
        ({"module": ["1", "2"]}, "no op was selected by module=2; there were 0"),
        ({"exclude": ["1.o", "0"]}, "no op was excluded by exclude=1.o; did you mean 1.1 or 1.0?"),
        ({"module": "1", "exclude": "1"}, "every op of module=1 is excluded by exclude=1"),
        ({"module": []}, "no op was selected by module=[]; give None for all"),
        (
            {"type": "zzz", "module": "zzz"},
            "no op was selected by type=zzz; there were empty, linear, rand, relu, uniform, uniform_",
        ),
    ],
)
def test_a_selection_that_no_op_fitted_is_reported_when_the_scope_closes(
    given: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    tool = select(Seen(), **given)
    with amanda.apply(tool) as scope:
        mlp()(x())
        assert scope.report == []
    assert ("what was selected for Seen", told) in [entry[:2] for entry in scope.report]
    assert told in caplog.text


def test_a_selection_that_no_op_fits_is_logged_once_for_a_tool(caplog: pytest.LogCaptureFixture) -> None:
    tool, model = select(Seen(), type="conv2d"), mlp()
    for run in (lambda: model(x()), lambda: model(x()), lambda: model(x()).sum().item()):
        with amanda.apply(tool) as scope:
            run()
        assert [entry.what for entry in scope.report] == ["what was selected for Seen"]
    assert caplog.text.count("no op was selected by type=conv2d") == 1


def test_a_selection_that_fitted_once_or_met_no_op_is_not_reported() -> None:
    tool, model = select(Seen(), module="1"), mlp()
    for run in (lambda: None, lambda: model(x()), lambda: model(x()), lambda: torch.relu(x())):
        with amanda.apply(tool) as scope:
            run()
        assert scope.report == []


def selected_modules(tool: amanda.Tool, model: nn.Module) -> set[str]:
    """Return the modules of the ops that a tool selects, as its result names them."""
    with amanda.apply(tool):
        model(x())
    result: Any = getattr(tool, "result")  # noqa: B009
    index = [column.name for column in result.columns].index("module")
    return {row[index] for row in result.rows()}


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: PruneTool(**options),
        lambda **options: QuantizeTool(method="dynamic", **options),
        lambda **options: InjectTool("zero", type="linear", **options),
        lambda **options: PatchTool(type="linear", **options),
        lambda **options: select(FlopsTool(), type="linear", **options),
        lambda **options: SearchTool(Choice(["keep", "skip"], type="linear", **options)),
    ],
    ids=["prune", "quantize", "inject", "patch", "select", "search"],
)
def test_a_path_is_the_module_and_all_in_it_for_every_tool(make: Any) -> None:
    def model() -> nn.Module:
        block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
        return nn.Sequential(block, nn.Linear(4, 4))

    assert selected_modules(make(module="0"), model()) == {"0.0", "0.1.1"}
    assert selected_modules(make(module=["0.1", "1"]), model()) == {"0.1.1", "1"}
    assert selected_modules(make(exclude="0"), model()) == {"1"}
    assert selected_modules(make(module="*", exclude="0.1"), model()) == {"0.0", "1"}


def test_a_tool_with_a_selection_of_its_own_says_what_no_op_fitted_in_its_result() -> None:
    made = {
        InjectTool(type="linaer"): "linear",
        QuantizeTool(type="linaer"): "linear",
        PruneTool(0.5, module="1.l"): "1.1",
    }
    for tool, near in made.items():
        with amanda.apply(tool) as scope:
            mlp()(x())
        (entry,) = scope.report
        assert entry.reason.endswith(f"did you mean {near}?")
        assert f"No {entry.reason.removeprefix('no ')}" in list(tool.result.remarks)
    excluding = PruneTool(0.5, exclude="1.l")
    with amanda.apply(excluding) as scope:
        mlp()(x())
    (entry,) = scope.report
    assert entry.reason == "no op was excluded by exclude=1.l; did you mean 1.1?"


@pytest.mark.parametrize(
    ("given", "error", "part"),
    [
        ({"phase": "both"}, SelectionError, "'backward', 'optimizer', 'construction'"),
        ({"type": ""}, SelectionError, "type is ''"),
        ({"module": [3]}, SelectionError, "item 0 is 3"),
        ({"frequency": 0}, SelectionError, "frequency is 0"),
        ({"start": -1}, SelectionError, "start is -1"),
        ({"start": 3, "end": 3}, WindowError, "no step is in between"),
    ],
)
def test_what_cannot_be_is_an_error(given: dict[str, Any], error: type[AmandaError], part: str) -> None:
    with pytest.raises(error, match=part):
        select(Seen(), **given)


def test_a_step_begins_with_the_first_op_of_the_model() -> None:
    steps, model = Steps(), mlp()
    counted = []
    with amanda.apply(steps):
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # as scripts do ahead of the loop
        for _ in range(4):
            model(x()).sum().backward()
            counted.append(steps.number)
    assert counted == [0, 1, 2, 3]


def test_without_modules_the_first_op_leads() -> None:
    steps = Steps()
    counted = []
    with amanda.apply(steps):
        for _ in range(3):
            (torch.ones(2) * 2).sum()
            counted.append(steps.number)
    assert counted == [0, 1, 2]


def test_loops_within_a_step_do_not_count() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                h = self.cell(h)
            return h

    steps, model = Steps(), Recurrent()
    with amanda.apply(steps):
        for _ in range(3):
            model(x())
    assert steps.number == 2


def test_steps_may_be_explicit() -> None:
    steps, model = Steps(), mlp()
    numbers: list[int] = []
    steps.on_step(numbers.append)
    with amanda.apply(steps):
        model(x())
        for _ in range(3):
            steps.step()
            model(x())
            model(x())
    assert numbers == [0, 1, 2, 3]


def test_other_threads_begin_no_steps() -> None:
    steps, model = Steps(), mlp()
    with amanda.apply(steps) as scope:
        model(x())
        thread = threading.Thread(target=scope.bind(lambda: [model(x()) for _ in range(3)]))
        thread.start()
        thread.join()
        model(x())
    assert steps.number == 1


@pytest.mark.parametrize(
    ("window", "counted"),
    [
        ({"start": 2}, [2, 3, 4, 5]),
        ({"end": 2}, [0, 1]),
        ({"frequency": 2}, [0, 2, 4]),
        ({"start": 1, "end": 5, "frequency": 3}, [1, 4]),
    ],
)
def test_routines_run_at_steps_of_the_window(window: dict[str, int], counted: list[int]) -> None:
    steps, seen, model, inputs = Steps(), Seen(), mlp(), x()
    select(seen, steps=steps, **window)
    at: dict[int, list[str]] = {}
    with amanda.apply(seen):
        for step in range(6):
            model(inputs).sum().backward()
            at[step], seen.executed = seen.executed, []
    assert [step for step, names in at.items() if "0:linear" in names] == counted
    # One step is like another, its first op and its backward ops are in it, and the others have nothing.
    assert sorted(at[counted[0]]) == sorted(at[counted[-1]]) != []
    assert all(not any("linear" in name for name in at[step]) for step in range(6) if step not in counted)


def test_backward_routines_do_not_miss_what_was_left_out_in_the_forward_pass() -> None:
    handing, steps, model = Handing(), Steps(), mlp()
    select(handing, steps=steps, start=1)
    with amanda.apply(handing):
        losses = [model(x()).sum() for _ in range(2)]
        (losses[0] + losses[1]).backward()  # in step 1, of a forward pass in step 0 and of one in step 1
        assert len(handing.handed) == 2
        model(x()).sum().backward()
    assert len(handing.handed) == 4


def test_a_replacement_gives_way_outside_its_window() -> None:
    model, inputs = mlp(), x()
    tool = amanda.Tool()
    tool.add_inst_for_op(
        lambda context: context.get_op_type() == "relu" and context.replace_op(torch.zeros_like)
    )
    select(tool, start=1, end=2)
    plain = model(inputs)
    with amanda.apply(tool):
        first, second, third = (model(inputs) for _ in range(3))
    assert torch.equal(first, plain)
    assert torch.equal(third, plain)
    assert torch.equal(second, model[1][1](torch.zeros(3, 4)))


def test_one_window_serves_several_tools() -> None:
    steps = Steps()
    window = Window(steps, start=1)
    one, two, model = Seen(), Seen(), mlp()
    window.let(one)
    window.let(two)
    with amanda.apply(one, two):
        for _ in range(3):
            model(x())
    assert one.executed == two.executed
    assert one.executed.count("1.0:relu") == 2


def test_a_model_that_is_called_once_does_not_lead() -> None:
    steps, encoder, model = Steps(), mlp(), mlp()
    with amanda.apply(steps):
        encoder(x())
        for _ in range(4):
            model(x())
    assert steps.number == 3


def test_a_model_called_twice_in_a_step_does_not_lead() -> None:
    steps, generator, critic = Steps(), nn.Linear(4, 4), mlp()
    counted = []
    with amanda.apply(steps):
        for _ in range(4):
            critic(generator(x()))
            critic(x())
            counted.append(steps.number)
    assert counted[1:] == [1, 2, 3]


def test_each_tool_calls_the_steps_of_an_optimizer_so(tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {"dump": {"folder": tmp_path / "dump"}}
    tools = {
        name: amanda.load_tool(name, **options.get(name, {})) for name in ("stats", "dump", "trace", "flops")
    }
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], foreach=False)
    with amanda.apply(*tools.values()):
        weight.exp().sum().backward()
        optimizer.step()
    for name, tool in tools.items():
        phases = {row["phase"] for row in tool.result.to_dict()["rows"]}
        assert phases == {"forward", "backward", "optimizer"}, name


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_phase_selects_its_ops_alone(phase: Phase) -> None:
    tool = select(amanda.load_tool("trace"), phase=phase)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], foreach=False)
    with amanda.apply(tool):
        weight.exp().sum().backward()
        optimizer.step()
    assert {op.phase for op in tool.result.graph.ops} == {phase}


def test_a_path_selects_what_lies_in_it_in_every_tool() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.layer1(x))

    model, x = Model(), torch.rand(2, 4)
    tools: list[Any] = [
        InjectTool(module="layer1", count=1),
        InjectTool(module="layer1", target="grad_outputs", count=1),
        PruneTool(module="layer1"),
        select(QuantizeTool(activation_bits=None), module="layer1"),
        select(FlopsTool(), module="layer1", phase="forward"),
    ]
    for tool in tools:
        with amanda.apply(tool):
            model(x).sum().backward()
        module = [column.name for column in tool.result.columns].index("module")
        assert {row[module] for row in tool.result.rows()} == {"layer1.0", "layer1.1"}, tool


def test_restart_is_a_former_name_of_clear() -> None:
    steps = Steps()
    steps.step()
    with pytest.warns(DeprecationWarning, match="restart is deprecated since .* use clear"):
        steps.restart()
    assert steps.number == 0
    steps.step()
    steps.clear()
    assert steps.number == 0


def make_statistics() -> amanda.Tool:
    return StatsTool(bins=0)


@pytest.mark.parametrize("make", [FlopsTool, NanTool, make_statistics, InjectTool, PruneTool])
def test_tools_run_at_the_steps_of_a_window_whatever_their_routines_are_marked_as(
    make: Callable[[], amanda.Tool],
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    with amanda.apply(select(make(), start=1, frequency=2)):
        for _ in range(4):
            model(x).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("name", ["coverage", "dump", "flops", "nan", "profile", "stats", "trace"])
def test_tools_that_look_take_the_options_of_select(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4)
    tool = amanda.load_tool(name, module="1", type="linear")
    with amanda.apply(tool):
        model(x)
    assert tool.unmatched() == ["no op was selected by type=linear and module=1 together"]
    with pytest.raises(AmandaError, match="did you mean module"):
        amanda.load_tool(name, modul="0")


def test_flops_of_a_module_are_those_of_a_selection() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4)
    rows = []
    for tool in (FlopsTool(module="0", end=2), select(FlopsTool(), module="0", end=2)):
        with amanda.apply(tool):
            for _ in range(3):
                model(x)
        rows.append([(row[2], row[4]) for row in tool.result.rows()])
    assert rows == [[("0", 2)]] * 2
    with pytest.raises(WindowError, match="end is 1, start 2"):
        FlopsTool(start=2, end=1)


@pytest.mark.parametrize("kind", [FlopsTool, NanTool, PruneTool, QuantizeTool, StatsTool])
def test_a_tool_that_is_given_a_model_says_what_to_do(kind: Any) -> None:
    expected = (
        rf"{kind.__name__} takes options, not a Linear: tool = {kind.__name__}\(\); with amanda.apply\(tool"
    )
    with pytest.raises(AmandaError, match=expected):
        kind(nn.Linear(4, 2))
