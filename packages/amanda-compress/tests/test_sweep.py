"""Sweeps of sparsity and bits on PyTorch, against pruning and quantising by hand."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.utils import prune

import amanda
from amanda.errors import OptionError
from amanda.tools.prune import PruneError, PruneTool
from amanda.tools.sweep import ALL, BitsSweep, SparsitySweep, Sweep, SweepError, command
from amanda.tools.sweep._allocation import KEEP, LevelOutcome, pareto_assignments

Evaluate = Callable[[], Any]


class Digits(nn.Module):
    """A network in which one call is of a function, and one layer is called in another's place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.classes = nn.Linear(96, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(images)), 2)
        scores: Tensor = self.classes(F.relu(self.second(x)).flatten(1))
        return scores


LAYERS = ("first", "second", "classes")
OPS = ("first/conv2d", "second/conv2d", "classes/linear")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.images[:, None] / 16, dtype=torch.float32), torch.tensor(found.target)


@pytest.fixture(scope="module")
def model(digits: tuple[Tensor, Tensor]) -> Digits:
    torch.manual_seed(0)
    images, labels = digits[0][:1200], digits[1][:1200]
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        for batch in torch.randperm(len(images)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def loss(model: nn.Module, digits: tuple[Tensor, Tensor]) -> float:
    """A number that tells any two sets of masks apart."""
    with torch.no_grad():
        return float(F.cross_entropy(model(digits[0][1200:]), digits[1][1200:]))


def accuracy(model: nn.Module, digits: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float((model(digits[0][1200:]).argmax(1) == digits[1][1200:]).float().mean())


def pruned(weight: nn.Module, level: float) -> None:
    prune.l1_unstructured(weight, "weight", level)


def quantised(layer: nn.Module, level: float) -> None:
    """Per output channel, symmetric, as the observers of torch.ao choose scales."""
    weight: Tensor = layer.weight.detach()  # type: ignore[assignment, operator]
    low, high = -(1 << int(level) - 1), (1 << int(level) - 1) - 1
    scale = weight.abs().flatten(1).amax(1) / ((high - low) / 2)
    made = torch.fake_quantize_per_channel_affine(weight, scale, torch.zeros(len(scale)).int(), 0, low, high)
    layer.weight = nn.Parameter(made)


@pytest.mark.parametrize(
    ("kind", "levels", "by_hand", "options"),
    [(SparsitySweep, [0.5, 0.9], pruned, {}), (BitsSweep, [4, 2], quantised, {"activations": False})],
)
def test_each_point_is_what_one_layer_changed_by_hand_gives(
    model: Digits,
    digits: tuple[Tensor, Tensor],
    kind: Any,
    levels: list[float],
    by_hand: Callable[[nn.Module, float], None],
    options: dict[str, Any],
) -> None:
    before = copy.deepcopy(model.state_dict())
    result = kind(lambda: loss(model, digits), levels, metric="loss", progress=False, **options).run()
    assert result.complete
    assert result.dense == loss(model, digits)
    expected = []
    for layers in (LAYERS, *((layer,) for layer in LAYERS)):
        for level in levels:
            other = copy.deepcopy(model)
            for layer in layers:
                by_hand(getattr(other, layer), level)
            expected.append(loss(other, digits))
    assert [point.metric for point in result.points] == expected
    assert len(set(expected)) == len(expected)
    assert [point.site.name for point in result.points[len(levels) :: len(levels)]] == list(OPS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_all_together_may_share_one_budget(model: Digits, digits: tuple[Tensor, Tensor]) -> None:
    result = SparsitySweep(lambda: loss(model, digits), [0.7], scope="global", progress=False).run()
    other = copy.deepcopy(model)
    layers = [(getattr(other, name), "weight") for name in LAYERS]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=0.7)
    assert result.points[0].metric == loss(other, digits)
    alone = copy.deepcopy(model)
    pruned(alone.second, 0.7)
    assert result.points[2].metric == loss(alone, digits)


def test_weights_may_be_ranked_by_the_inputs_of_the_evaluation(
    model: Digits, digits: tuple[Tensor, Tensor]
) -> None:
    result = SparsitySweep(lambda: loss(model, digits), [0.7], importance="wanda", progress=False).run()
    tool = PruneTool(0.7, importance="wanda")
    with tool.calibrating(), amanda.apply(tool):
        loss(model, digits)
    with amanda.apply(tool):
        assert result.points[0].metric == loss(model, digits)


def test_activations_are_calibrated_before_each_evaluation(
    model: Digits, digits: tuple[Tensor, Tensor]
) -> None:
    calibrated = []

    def calibrate() -> None:
        calibrated.append(accuracy(model, (digits[0][-300:], digits[1][-300:])) if digits else 0)
        model(digits[0][:200])

    dynamic = BitsSweep(lambda: accuracy(model, digits), [8, 2], progress=False).run()
    static = BitsSweep(lambda: accuracy(model, digits), [8, 2], calibrate=calibrate, progress=False).run()
    assert len(calibrated) == len(static.points) == len(dynamic.points) == 8
    assert static.dense is not None
    for result in (dynamic, static):
        by_level = [[one.metric or 0 for one in result.points if one.level == level] for level in (8, 2)]
        assert min(by_level[0]) > static.dense - 0.02
        assert min(by_level[1]) < static.dense - 0.02


class Scale(amanda.Tool):
    """Multiplies what activations give."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.add_inst_for_op(self.analyse)
        self.factor = factor

    def analyse(self, context: amanda.OpContext) -> None:
        if context["type"] == "relu":
            context.insert_after_op(lambda y: y * self.factor)


def test_any_tool_is_swept_at_the_ops_at_which_it_acts(model: Digits, digits: tuple[Tensor, Tensor]) -> None:
    images = digits[0][:4]

    def evaluate() -> Tensor:
        return F.relu(F.relu(images - 0.5)).sum()  # two ops that only their places tell apart

    result = Sweep(evaluate, Scale, [0.5, 0.25], progress=False).run()
    dense = float(evaluate())
    found = [one.metric for one in result.points]
    assert found == pytest.approx([dense / 4, dense / 16, *[dense / 2, dense / 4] * 2])
    assert [one.site.name for one in result.points] == ["", "", "/relu", "/relu", "/relu.1", "/relu.1"]
    assert result.points[0].site is ALL
    other = Sweep(lambda: loss(model, digits), Scale, [2.0], progress=False).run()
    assert [one.site.type for one in other.points] == ["all", "relu", "relu"]


def test_an_exception_in_an_evaluation_is_that_points_outcome(
    model: Digits, digits: tuple[Tensor, Tensor]
) -> None:
    def evaluate() -> float:
        found = loss(model, digits)
        if found > 1:
            raise ArithmeticError(f"a loss of {found:.0f}")
        return found

    result = SparsitySweep(evaluate, [0.1, 1.0], progress=False).run()
    errors = {(one.site.name, one.level): one.error for one in result.points}
    assert errors["", 1.0] == "ArithmeticError: a loss of 2"
    assert not errors["", 0.1]
    assert all(one.metric is None for one in result.points if one.error)
    assert "ArithmeticError" in str(result)
    assert result.complete


def test_an_interrupt_keeps_what_was_measured_and_the_sweep_goes_on(
    model: Digits, digits: tuple[Tensor, Tensor]
) -> None:
    calls = []

    def evaluate() -> float:
        calls.append(loss(model, digits))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return calls[-1]

    sweep = SparsitySweep(evaluate, [0.5, 0.9], progress=False)
    with pytest.raises(KeyboardInterrupt):
        sweep.run()
    assert [one.metric for one in sweep.result.points] == calls[1:3]
    assert "not finished" in str(sweep.result)
    before = copy.deepcopy(model.state_dict())
    assert sweep.run().complete
    assert len(calls) == 1 + 8 + 1
    whole = SparsitySweep(lambda: loss(model, digits), [0.5, 0.9], progress=False).run()
    assert sweep.result.rows() == whole.rows()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_swept_is_said(model: Digits, digits: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(SweepError, match=r"sparsities is \[\]"):
        SparsitySweep(lambda: 1.0, [])
    with pytest.raises(SweepError, match=r"evaluate is 0\.9; give a function"):
        SparsitySweep(0.9)  # type: ignore[arg-type]
    with pytest.raises(SweepError, match="gave 'good'; give a number"):
        SparsitySweep(lambda: "good", progress=False).run()
    with pytest.raises(SweepError, match=r"gave tensor\(\[.*; give a number"):
        SparsitySweep(lambda: torch.ones(2), progress=False).run()
    with pytest.raises(PruneError, match="pattern"):
        SparsitySweep(lambda: loss(model, digits), pattern="3:2", progress=False).run()
    with pytest.raises((OptionError, TypeError), match="colour"):
        SparsitySweep(lambda: loss(model, digits), colour="red", progress=False).run()


def test_the_levels_that_each_op_bears_are_told(model: Digits, digits: tuple[Tensor, Tensor]) -> None:
    result = SparsitySweep(lambda: accuracy(model, digits), [0.1, 0.5, 0.95], progress=False).run()
    borne = result.within(0.05)
    assert result.dense is not None
    for point in result.points:
        if point.site is not ALL and point.metric is not None:
            kept = point.level <= borne.get(point.site.name, 0)
            assert kept == (point.metric >= result.dense - 0.05)
    assert set(result.within(1.0).values()) == {0.95}
    assert result.within(-1) == {}


def test_stderr_tells_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: Digits,
    digits: tuple[Tensor, Tensor],
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    SparsitySweep(lambda: accuracy(model, digits), [0.5], metric="accuracy").run()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("1/2 without a tool: accuracy 0.")
    assert lines[2].startswith("3/5 first/conv2d, sparsity 0.5: accuracy 0.")
    assert len(lines) == 5
    monkeypatch.setenv("FORCE_COLOR", "1")
    SparsitySweep(lambda: accuracy(model, digits), [0.5]).run()
    out, err = capsys.readouterr()
    assert not out
    assert "\x1b[" in err
    assert "classes/linear" in err


def test_the_result_is_a_table_a_file_and_a_plot(
    tmp_path: Path, model: Digits, digits: tuple[Tensor, Tensor]
) -> None:
    pytest.importorskip("matplotlib")
    result = BitsSweep(lambda: accuracy(model, digits), [8, 4], metric="accuracy", progress=False).run()
    frame = result.to_pandas()
    assert list(frame)[:4] == ["phase", "type", "module", "source"]
    assert (frame["drop"] == result.dense - frame["accuracy"]).all()
    saved = json.loads(result.save(tmp_path / "bits.json").read_text())
    assert (saved["schema"], saved["version"], saved["dense"]) == ("amanda.sweep", 1, result.dense)
    assert saved["rows"][0]["bits"] == 8
    drawn = result.save(tmp_path / "bits.svg").read_text()
    assert all(text in drawn for text in ("all together", "classes", "accuracy", "bits"))


PROGRAM = """
import torch
from torch import nn

torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4)

def total():
    return model(x).sum()
"""


def test_the_command_sweeps_a_function_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, saved = tmp_path / "evaluate_total.py", tmp_path / "total.json"
    program.write_text(PROGRAM)
    named = f"{program}:total"
    assert command(["bits", named, "--levels", "8,4", "--metric", "total", "--save", str(saved)]) == 0
    out, err = capsys.readouterr()
    assert "total against bits" in out
    assert "7/7 2/linear, bits 4" in err
    assert [row["bits"] for row in json.loads(saved.read_text())["rows"]] == [8, 4] * 3
    budgets = ["--budgets", "0.4,0.3", "-q", "--save", str(saved)]
    assert command(["bits", named, "--levels", "8,2", "--metric", "total", *budgets]) == 0
    assert "5 architectures by total, size" in capsys.readouterr().out
    assert json.loads(saved.read_text())["rows"][0]["architecture"] == "keep keep"
    assert command(["bits", named, "--levels", "8,4", "-q", "--budgets", "0.01", "--save", str(saved)]) != 0
    out, err = capsys.readouterr()
    assert "metric against bits" in out
    assert "a budget is 0.01" in err
    assert len(json.loads(saved.read_text())["rows"]) == 6
    assert command(["sparsity", named, "--levels", "0.5", "--type", "conv2d", "-q"]) == 0
    out = capsys.readouterr().out
    assert "linear" not in out
    assert "The tool acted at no op." in out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["sparsity", "swept.py:totl"], 2, "swept.py has no function 'totl'; did you mean total?"),
        (["sparsity", "swept.py"], 2, "'swept.py' names no function; give FILE:FUNCTION"),
        (["sparsity", "absent.py:total"], 2, "there is no file absent.py"),
        (["sparsity", "swept.txt:total"], 2, "swept.txt is no Python file"),
        (["sparsity", "no_such_module:total"], 2, "there is no module no_such_module"),
        (
            ["sparsity", "swept.py:total", "--levels", "few"],
            2,
            "'few' is not numbers with commas between them",
        ),
        (
            ["sparsity", "swept.py:total", "--levels", "2"],
            2,
            "--levels 2: SparsitySweep: sparsities is",
        ),
        (["bits", "swept.py:total", "--levels", "8,2.5"], 2, "--levels 8,2.5: bits are integers"),
        (["sparsity", "swept.py:total", "--save", "a.xyz"], 2, "a.xyz ends in none of .json, .csv"),
        (
            ["sparsity", "swept.py:total", "--save", "no/a.csv"],
            2,
            "no/a.csv cannot be written: there is no folder",
        ),
        (["sparsity", "swept.py:fails", "-q"], 1, "line 12, in fails"),
        (["sparsity", "swept.py:fails", "-q"], 1, "swept.py:fails cannot be evaluated: KeyError: 'digits'"),
        (["sparsity", "broken.py:total"], 1, "broken.py:total cannot be evaluated: SyntaxError"),
        (["sparsity", "swept.py:name", "-q"], 1, "gave 'x'; give a number"),
    ],
)
def test_what_cannot_be_swept_is_told_without_our_own_frames(
    arguments: list[str], status: int, message: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    more = "\ndef fails():\n    raise KeyError('digits')\n\ndef name():\n    return 'x'\n"
    Path("swept.py").write_text(f"{PROGRAM}{more}")
    Path("broken.py").write_text("def total(:\n")
    Path("swept.txt").touch()
    assert command(arguments) == status
    told = capsys.readouterr()
    assert message in told.err
    assert "amanda/tools" not in told.err
    assert not told.out


def test_a_metric_that_is_no_number_is_no_success(digits: tuple[Tensor, Tensor], model: Digits) -> None:
    given = iter([0.5, float("nan"), float("inf"), 0.5, 0.5])

    def diverges() -> float:
        model(digits[0][:2])
        return next(given)

    result = SparsitySweep(diverges, [0.5], type="conv2d", progress=False).run()
    assert [point.error for point in result.points] == [
        "ValueError: metric is nan",
        "ValueError: metric is inf",
        "",
    ]
    assert result.within(drop=0.1) == {"second/conv2d": 0.5}
    json.loads(result.to_json(), parse_constant=lambda name: pytest.fail(name))
    with pytest.raises(SweepError, match="accuracy is nan without a tool"):
        SparsitySweep(lambda: float("nan"), [0.5], metric="accuracy", progress=False).run()


@pytest.mark.parametrize(
    "make",
    [
        lambda evaluate: SparsitySweep(evaluate, [0.5], patern="channel"),
        lambda evaluate: SparsitySweep(evaluate, [0.5, 1.5]),
        lambda evaluate: BitsSweep(evaluate, [8, 1]),
        lambda evaluate: BitsSweep(evaluate, [8], weights=False, activations=False),
    ],
)
def test_wrong_options_are_said_before_anything_is_evaluated(make: Callable[[Evaluate], Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        make(lambda: pytest.fail("it was evaluated"))


def test_levels_go_from_mild_to_harsh_in_whatever_order_they_are_given() -> None:
    assert SparsitySweep(lambda: 1.0, (one for one in (0.9, 0.5))).result.level == "sparsity"
    model, x = nn.Linear(4, 4), torch.rand(2, 4)
    for sweep, levels in (
        (SparsitySweep(lambda: (model(x), 1.0)[1], [0.9, 0.5], progress=False), [0.5, 0.9]),
        (BitsSweep(lambda: (model(x), 1.0)[1], [2, 8], progress=False), [8, 2]),
    ):
        result = sweep.run()
        assert [point.level for point in result.points] == levels * 2
        assert result.within(0.1) == {"/linear": levels[-1]}
    for wrong in (0.5, ["a", 0.5]):
        with pytest.raises(SweepError, match="sparsities is"):
            SparsitySweep(lambda: 1.0, wrong)  # type: ignore[arg-type]


def test_compiled_code_is_swept_where_it_is_asked_to() -> None:
    graphs: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(torch.nn.Linear(4, 2), backend=backend)
    evaluate = lambda: compiled(torch.ones(1, 4)).sum()  # noqa: E731
    sweep = SparsitySweep(evaluate, sparsities=[0.5], progress=False, compiled="instrument")
    result = sweep.run()
    assert any("instrumented_linear" in code for code in graphs)
    assert result.points[0].metric is not None
    torch._dynamo.reset()


def drops(result: Any) -> dict[tuple[str, float], float]:
    return {(one.site.name, one.level): max(result.dense - one.metric, 0.0) for one in result.points}


def test_levels_within_a_budget_are_those_that_enumeration_finds(
    model: Digits, digits: tuple[Tensor, Tensor]
) -> None:
    sweep = BitsSweep(lambda: accuracy(model, digits), [8, 4, 3, 2], activations=False, progress=False)
    sweep.run()
    lost = drops(sweep.result)
    numbers = [getattr(model, name).weight.numel() for name in LAYERS]
    whole = sum(one.numel() * 4 for one in model.parameters())
    budgets = [0.5, 0.25, 0.14, 0.1]
    trials = sweep.search(budgets).trials[1 : 1 + len(budgets)]
    for budget, trial in zip(budgets, trials, strict=True):
        best = min(
            sum(lost.get((op, bits), 0.0) for op, bits in zip(OPS, chosen, strict=True))
            for chosen in itertools.product([32, 8, 4, 3, 2], repeat=3)
            if whole - sum(n * (32 - b) / 8 for n, b in zip(numbers, chosen, strict=True)) <= budget * whole
        )
        chosen = {op: label for op, label in trial.architecture.items() if label != "keep"}
        assert sum(lost[op, int(bits)] for op, bits in chosen.items()) == pytest.approx(best)
        assert trial.costs["size"] <= budget * whole
        other = copy.deepcopy(model)
        for op, bits in chosen.items():
            quantised(getattr(other, op.split("/")[0]), int(bits))
        assert trial.metric == accuracy(other, digits)


def test_ops_that_share_a_weight_get_one_level_and_count_it_once() -> None:
    torch.manual_seed(0)
    one, other, head = (nn.Linear(8, width, bias=False) for width in (8, 8, 2))
    other.weight = one.weight
    tied, x = nn.Sequential(one, nn.ReLU(), other, head), torch.rand(64, 8)
    wanted = tied(x).detach()

    def fit() -> Tensor:
        return -(tied(x) - wanted).square().mean().detach()

    sweep = BitsSweep(fit, [8, 2], activations=False, progress=False)
    found = sweep.search([0.3, 0.1])
    for trial in found.trials:
        first, second, _ = trial.architecture.values()
        assert first == second
    assert found.trials[0].costs == {"size": 4 * (64 + 16)}
    assert found.trials[-1].costs == {"size": (64 + 16) / 4}
    assert found.trials[1].costs["size"] <= 0.3 * 4 * 80


def test_a_cost_may_be_measured_with_the_tools_in_force(model: Digits, digits: tuple[Tensor, Tensor]) -> None:
    def kept(*tools: Any) -> int:
        pruned = [int((~one.mask).sum()) for tool in tools for one in tool.weights]
        return sum(one.numel() for one in model.parameters()) - sum(pruned)

    sweep = SparsitySweep(lambda: accuracy(model, digits), [0.5, 0.9], cost=kept, progress=False)
    result = sweep.search([0.6, 0.4])
    dense = kept()
    assert result.costs == ("kept",)
    assert result.trials[0].costs["kept"] == dense
    for budget, trial in zip([0.6, 0.4], result.trials[1:3], strict=True):
        with amanda.apply(*(tools := sweep.tools(trial.architecture))):
            assert accuracy(model, digits) == trial.metric
            assert kept(*tools) == trial.costs["kept"] <= budget * dense
    flops = SparsitySweep(lambda: accuracy(model, digits), [0.5], cost="flops", progress=False).search([0.9])
    macs = {"first": 64 * 54, "second": 16 * 324, "classes": 960}
    batch = len(digits[0]) - 1200
    assert flops.trials[0].costs["flops"] - flops.trials[-1].costs["flops"] == sum(macs.values()) * batch


def test_a_search_that_cannot_be_is_said(model: Digits, digits: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(SweepError, match=r"a budget is 0\.01; the harshest levels leave 0\.\d+ of the size"):
        BitsSweep(lambda: accuracy(model, digits), [8, 4], activations=False, progress=False).search([0.01])
    with pytest.raises(SweepError, match="has no cost; give it one"):
        Sweep(lambda: loss(model, digits), Scale, [2.0], progress=False).search([0.5])
    with pytest.raises(SweepError, match="cost is 'size' without left"):
        Sweep(lambda: loss(model, digits), Scale, [2.0], cost="size")
    with pytest.raises(SweepError, match="of which fewer bits save none"):
        BitsSweep(lambda: 1.0, cost="flops")
    with pytest.raises(
        SweepError, match=r"budgets is \[1.5\]; give a non-empty list of numbers above 0 and at most 1"
    ):
        BitsSweep(lambda: 1.0).search([1.5])
    for budgets in (0.5, ["half"]):
        with pytest.raises(SweepError, match="give a non-empty list of numbers above 0 and at most 1"):
            BitsSweep(lambda: 1.0).search(budgets)  # type: ignore[arg-type]
    for levels in ([0.9000001, 0.9000002], ["half"]):
        with pytest.raises(SweepError, match=r"sparsities is|all different in six digits"):
            SparsitySweep(lambda: 1.0, levels)  # type: ignore[arg-type]
    for drop in (float("nan"), "little", None):
        with pytest.raises(SweepError, match="drop is"):
            SparsitySweep(lambda: 1.0, [0.5]).result.within(drop)  # type: ignore[arg-type]


def test_ops_at_a_level_that_failed_cost_what_it_leaves() -> None:
    layer, x = nn.Linear(8, 8, bias=False), torch.rand(4, 8)
    wanted = layer(x).detach()

    def fit() -> Tensor:
        error = (layer(x) - wanted).square().mean().detach()
        if error > 1e-3:
            raise ValueError("too far")
        return -error

    trials = BitsSweep(fit, [8, 2], activations=False, progress=False).search([0.3]).trials
    assert trials[-1].error == "ValueError: too far"
    assert trials[-1].costs == {"size": 64 * 2 / 8}


@settings(deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(-2, 9), st.integers(0, 9)), max_size=3), min_size=1, max_size=4),
    st.integers(0, 36),
)
def test_levels_are_the_best_of_all(pairs: list[list[tuple[int, int]]], wanted: int) -> None:
    groups = [
        [LevelOutcome(KEEP, 0, 0), *(LevelOutcome(str(i), *one) for i, one in enumerate(pair))]
        for pair in pairs
    ]
    ways = [
        (sum(one.saved for one in way), sum(one.drop for one in way), tuple(one.level for one in way))
        for way in itertools.product(*groups)
    ]
    drops = [drop for saved, drop, _ in ways if saved >= wanted]
    found = next((one for one in pareto_assignments(groups) if one.saved >= wanted), None)
    assert (found is None) == (not drops)
    if found is not None:
        assert found.drop == min(drops)
        assert tuple(found) in ways


def flaky(model: nn.Module, x: Tensor, *failing: int) -> Evaluate:
    """Return an evaluation whose calls of these numbers fail."""
    calls = itertools.count(1)

    def evaluate() -> Tensor:
        if next(calls) in failing:
            raise RuntimeError("out of memory, say")
        with torch.no_grad():
            return -model(x).abs().sum()

    return evaluate


def test_failed_points_are_run_again_on_request() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(4, 8)
    wanted = SparsitySweep(flaky(model, x), sparsities=[0.5, 0.9], progress=False).run()
    sweep = SparsitySweep(flaky(model, x, 2, 4), sparsities=[0.5, 0.9], progress=False)
    failed = [bool(point.error) for point in sweep.run().points]
    assert failed == [True, False, True, False, False, False]
    assert [bool(point.error) for point in sweep.run().points] == failed
    found = sweep.run(retries=1)
    assert [point.metric for point in found.points] == [point.metric for point in wanted.points]
    assert not any(point.error for point in found.points)
    at_once = SparsitySweep(flaky(model, x, 2, 3, 6), sparsities=[0.5, 0.9], progress=False).run(retries=2)
    assert [point.metric for point in at_once.points] == [point.metric for point in wanted.points]


def test_retries_are_a_whole_number() -> None:
    with pytest.raises(SweepError, match="retries is -1; give an integer >= 0"):
        SparsitySweep(lambda: 1.0, progress=False).run(retries=-1)


def test_command_runs_failed_points_again(tmp_path: Path) -> None:
    (tmp_path / "evaluate.py").write_text(
        "import itertools, torch\n"
        "model, calls = torch.nn.Sequential(torch.nn.Linear(4, 4)), itertools.count()\n"
        "def run():\n"
        "    if next(calls) == 1:\n"
        "        raise RuntimeError('busy')\n"
        "    return model(torch.ones(1, 4)).sum().item()\n"
    )
    saved = tmp_path / "sweep.json"
    arguments = [f"{tmp_path / 'evaluate.py'}:run", "--levels", "0.5", "-q", "--save", str(saved)]
    for retries, errors in ((0, 1), (1, 0)):
        assert command(["sparsity", *arguments, "--retries", str(retries)]) == 0
        points = json.loads(saved.read_text())["rows"]
        assert sum(bool(one["error"]) for one in points) == errors


def test_warning_of_a_sweep_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(4, 8)
    SparsitySweep(flaky(model, x), sparsities=[0.5, 0.9], exclude="head*", progress=False).run()
    assert caplog.text.count("no op was excluded by exclude=head*") == 1
