"""Where runs diverge: planted bugs are the first divergence, at their module and line."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_pairs import Double, Single
from torch import Tensor, nn

import amanda
from amanda.__main__ import main
from amanda.errors import AmandaError
from amanda.tools.diff import DiffResult, diff
from amanda.tools.diff._alignment import matching_positions
from amanda.tools.dump import DumpTool
from amanda.tools.stats import StatsTool


def line_of(function: Callable[..., Any], text: str) -> str:
    """The "file:line" of the one line of a function that has this text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(function)}:{number}"


def training(model: nn.Module, *inputs: Tensor) -> Callable[[], None]:
    def program() -> None:
        output = model(*inputs)
        output = output if isinstance(output, Tensor) else output.last_hidden_state
        output.float().square().mean().backward()

    return program


def inferred(model: nn.Module, other_model: nn.Module, *inputs: Tensor, **options: Any) -> DiffResult:
    with torch.no_grad():
        return diff(lambda: model(*inputs), lambda: other_model(*inputs), **options)


def compared(model: nn.Module, other_model: nn.Module, *inputs: Tensor, **options: Any) -> DiffResult:
    return diff(training(model, *inputs), training(other_model, *inputs), **options)


@pytest.fixture(scope="module")
def bert(transformers: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


@pytest.fixture
def tokens() -> Tensor:
    return torch.arange(24).reshape(2, 12)


def test_two_runs_of_one_model_are_the_same_to_the_last_bit(bert: nn.Module, tokens: Tensor) -> None:
    result = compared(bert, copy.deepcopy(bert), tokens)
    assert not result
    assert result.first_difference is None
    assert (result.only_a, result.only_b) == ((), ())
    assert len(result.comparisons) > 200
    assert {comparison.phase for comparison in result.comparisons} == {"forward", "backward"}
    assert "No divergence" in str(result)


def test_a_wrong_epsilon_deep_in_bert_is_found(bert: nn.Module, tokens: Tensor) -> None:
    other_model = copy.deepcopy(bert)
    other_model.encoder.layer[2].output.LayerNorm.eps = 1e-2
    first = inferred(bert, other_model, tokens).first
    assert first is not None
    assert (first.phase, first.type) == ("forward", "layer_norm")
    assert first.module == "encoder.layer.2.output.LayerNorm"
    assert first.inputs is True
    assert first.weight == 0.0


def test_an_epsilon_within_tolerance_is_the_first_difference(bert: nn.Module, tokens: Tensor) -> None:
    other_model = copy.deepcopy(bert)
    other_model.encoder.layer[2].attention.output.LayerNorm.eps = 1e-7
    result = inferred(bert, other_model, tokens)
    assert not result
    assert result.first_difference is not None
    assert result.first_difference.module == "encoder.layer.2.attention.output.LayerNorm"
    assert result.first_difference.verdict == "close"
    strict = inferred(bert, other_model, tokens, rtol=0.0).first
    assert strict is not None
    assert strict.module == "encoder.layer.2.attention.output.LayerNorm"


def test_a_transposed_weight_in_a_resnet_is_found(transformers: Any) -> None:
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic"
    )
    model = transformers.ResNetModel(config).eval()
    other_model = copy.deepcopy(model)
    weight = other_model.encoder.stages[1].layers[1].layer[0].convolution.weight
    weight.data = weight.data.transpose(0, 1).contiguous()
    first = inferred(model, other_model, torch.randn(1, 3, 64, 64)).first
    assert first is not None
    assert (first.type, first.module) == ("conv2d", "encoder.stages.1.layers.1.layer.0.convolution")
    assert first.inputs is True
    assert first.weight is not None
    assert first.weight > 0.5
    assert "its inputs agree" in str(first)


class Attention(nn.Module):
    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.out(attended.transpose(1, 2).flatten(2))


class ByHand(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        if self.scale is not None:
            scores = scores * self.scale
        attended = scores.softmax(-1) @ v
        return self.out(attended.transpose(1, 2).flatten(2))


def twin(model: nn.Module, other_model: nn.Module) -> nn.Module:
    other_model.load_state_dict(model.state_dict())
    return other_model


def test_a_dropped_scale_in_attention_is_found_at_its_line() -> None:
    model = nn.Sequential(Attention(), nn.LayerNorm(16), Attention())
    other_model = twin(model, nn.Sequential(Attention(), nn.LayerNorm(16), Attention(1.0)))
    first = compared(model, other_model, torch.randn(2, 5, 16)).first
    assert first is not None
    assert (first.type, first.module) == ("scaled_dot_product_attention", "2")
    assert first.source == line_of(Attention.forward, "scaled_dot_product_attention")


def test_an_op_that_one_run_lacks_is_named_before_the_op_that_reads_its_result() -> None:
    model = nn.Sequential(ByHand(0.5), ByHand(0.5))
    other_model = twin(model, nn.Sequential(ByHand(0.5), ByHand(None)))
    result = compared(model, other_model, torch.randn(2, 5, 16))
    assert {(op.phase, op.type) for op in result.only_a} == {("forward", "mul"), ("backward", "mul_backward")}
    assert result.only_b == ()
    assert result.first_forward is not None
    assert (result.first_forward.type, result.first_forward.module) == ("mul", "1")
    assert result.first_forward.source == line_of(ByHand.forward, "scores * self.scale")
    assert (result.first_forward.only, result.rows()[result.comparisons.index(result.first_forward)][4]) == (
        "a", "(a alone)",
    )  # fmt: skip
    reader = result.comparisons[result.comparisons.index(result.first_forward) + 1]
    assert (reader.type, reader.source) == ("softmax", line_of(ByHand.forward, "softmax"))
    assert f"an op of a alone, whose result softmax in 1, {reader.source} reads" in result.sentence


class Faulty(nn.Module):
    """A residual block with one op too many or too few; `extra` ops change nothing."""

    def __init__(self, fault: str = "", extra: str = "") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.fault, self.extra = fault, extra

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.fault == "clamp":
            h = h.clamp(max=0.3)
        if self.fault == "mul":
            h.mul_(1.5)
        if self.extra == "clone":
            h = h.clone()
        if self.extra == "to":
            h = h.double().to(h.dtype)
        y = self.down(h)
        return y if self.fault == "add" else x + y


def run_as(precision: str, model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    lower = copy.deepcopy(model).bfloat16()

    def autocast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)  # type: ignore[no-any-return]

    runs = {"float32": lambda: model(x), "bfloat16": lambda: lower(x.bfloat16()), "autocast": autocast}
    return runs[precision]


@pytest.mark.parametrize("extra", ["", "clone", "to"])
@pytest.mark.parametrize(("fault", "run"), [("", ""), ("clamp", "b"), ("mul", "b"), ("add", "a")])
@pytest.mark.parametrize(
    ("a", "b", "options"),
    [
        ("float32", "float32", {}),
        ("float32", "bfloat16", {"rtol": 8e-2}),
        ("float32", "autocast", {"rtol": 8e-2}),
        ("autocast", "float32", {"rtol": 8e-2}),
        ("bfloat16", "float32", {"control": "float64"}),
    ],
)
def test_an_op_of_one_run_is_the_cause_across_element_types(
    a: str, b: str, options: dict[str, Any], fault: str, run: str, extra: str
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Faulty(), Faulty(), Faulty()), torch.randn(8, 16)
    other_model = twin(model, nn.Sequential(Faulty(), Faulty(fault, extra), Faulty()))
    first = diff(run_as(a, model, x), run_as(b, other_model, x), **options).first
    found = None if first is None else (first.type, first.module, first.only)
    assert found == ((fault, "1", run) if fault else None)


def test_a_transposed_tensor_is_a_change() -> None:
    def turned(x: Tensor) -> Tensor:
        return x.sin().transpose(1, 3).cos()

    first = diff(
        lambda x: x.sin().cos(), turned, torch.randn(2, 3, 3, 3, generator=torch.manual_seed(0))
    ).first
    assert first is not None
    assert (first.type, first.only) == ("transpose", "b")


class Rounded(Tensor):
    """A weight whose products its class computes, and rounds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return super().__torch_function__(func, types, args, kwargs)
        x, weight, bias = args
        with torch._C.DisableTorchFunctionSubclass():
            return ((x @ weight.t()) * 64).round().div(64).add(bias).to(x.dtype)


@pytest.mark.parametrize("by", ["op", "module"])
def test_an_op_ends_after_those_that_it_calls(by: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    rounded = copy.deepcopy(model)
    for i in (0, 2):
        rounded[i].weight = nn.Parameter(model[i].weight.detach().as_subclass(Rounded))
    result = inferred(model, rounded, torch.rand(4, 8), by=by)
    assert [(comparison.module, comparison.other_type) for comparison in result.comparisons] == [
        ("0", "linear"), ("1", "relu"), ("2", "linear")
    ]  # fmt: skip
    assert result.first is not None
    assert result.first.module == "0"


def test_another_way_to_compute_the_same_diverges_nowhere() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Attention())
    other_model = twin(model, nn.Sequential(nn.Linear(16, 16), ByHand(0.5)))
    result = compared(model, other_model, torch.randn(2, 5, 16))
    assert not result
    attentions = [
        comparison for comparison in result.comparisons if comparison.type == "scaled_dot_product_attention"
    ]
    assert [(comparison.other_type, comparison.verdict) for comparison in attentions] == [("matmul", "close")]
    assert "softmax" in {op.type for op in result.only_b}


def test_bfloat16_agrees_with_float32_within_its_precision(bert: nn.Module, tokens: Tensor) -> None:
    result = inferred(bert, copy.deepcopy(bert).bfloat16(), tokens, rtol=8e-2)
    assert not result.first_forward
    assert {comparison.tolerance for comparison in result.comparisons if comparison.type == "linear"} == {
        8e-2
    }
    errors = [comparison.relative for comparison in result.comparisons if comparison.type == "linear"]
    assert 1e-4 < max(errors) < 8e-2


def test_a_bug_in_bfloat16_is_found_among_its_errors(bert: nn.Module, tokens: Tensor) -> None:
    other_model = copy.deepcopy(bert).bfloat16()
    other_model.encoder.layer[1].attention.self.key.bias.data += 0.5
    first = inferred(bert, other_model, tokens, rtol=8e-2).first
    assert first is not None
    assert first.module == "encoder.layer.1.attention.self.key"


class Lower(nn.Linear):
    """A product in bfloat16 of a model in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


def layers(middle: type[nn.Linear]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), middle(6, 6), nn.Tanh(), nn.Linear(6, 2))


def test_one_product_in_bfloat16_diverges_from_float32() -> None:
    result = inferred(layers(nn.Linear), layers(Lower), torch.randn(3, 6))
    first = result.first
    assert first is not None
    assert (first.type, first.module, first.tolerance) == ("linear", "2", 1e-4)
    assert first.dtypes == ("float32", "bfloat16")
    assert "float32 in a, bfloat16 in b; pass rtol=0.08 (--rtol 0.08) for the" in str(first)
    assert not inferred(layers(nn.Linear), layers(Lower), torch.randn(3, 6), rtol=8e-2)


def test_precision_that_both_runs_lack_raises_no_tolerance_where_nothing_differs() -> None:
    model, other_model = layers(Lower), layers(Lower)
    other_model[4].bias.data *= 1.01
    first = inferred(model, other_model, torch.randn(3, 6)).first
    assert first is not None
    assert (first.module, first.tolerance) == ("4", 1e-4)


def test_what_a_raised_tolerance_hides_is_told() -> None:
    model, other_model = layers(Lower), layers(Lower)
    other_model[2].bias.data *= 1.01
    result = inferred(model, other_model, torch.randn(3, 6))
    assert not result
    assert result.hidden is not None
    assert result.hidden.by_type == 1e-4 < result.hidden.relative < result.hidden.tolerance == 8e-2
    assert "No divergence" not in str(result)
    assert "First difference beyond the tolerance of its own element types (0.0001)" in str(result)


class Squared(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


def test_a_wrong_backward_is_found_where_forward_agrees() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Squared(Double), nn.Linear(6, 6), nn.Tanh())
    other_model = twin(model, nn.Sequential(nn.Linear(6, 6), Squared(Single), nn.Linear(6, 6), nn.Tanh()))
    result = compared(model, other_model, torch.randn(3, 6))
    first = result.first  # the backward function's own op, at its line
    assert first is not None
    assert first.type == "mul"
    assert first.source == line_of(Double.backward, "return 2 * x")
    assert first.other_source == line_of(Single.backward, "return x")
    backward = next(
        comparison
        for comparison in result.comparisons
        if comparison.diverges and comparison.type == "Double_backward"
    )
    assert (backward.phase, backward.module) == ("backward", "1")
    assert backward.other_type == "Single_backward"
    assert backward.source == line_of(Squared.forward, "apply")


def test_a_hook_that_spoils_a_gradient_is_found_in_the_backward_pass() -> None:
    def spoil(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] * 1.5,)

    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))
    other_model = copy.deepcopy(model)
    other_model[2].register_full_backward_hook(spoil)
    result = compared(model, other_model, torch.randn(3, 6))
    assert result.first_forward is None
    assert result.first_backward is not None
    assert result.first_backward.type == "mul"
    assert result.first_backward.source == line_of(spoil, "inputs[0] * 1.5")
    assert "whose result gelu_backward in 1" in str(result.first_backward)


def test_modules_are_compared_where_ops_are_not_the_same() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Attention(), nn.Linear(16, 4))
    other_model = twin(model, nn.Sequential(nn.Linear(16, 16), ByHand(0.5), nn.Linear(16, 4)))
    x = torch.randn(2, 5, 16)
    result = compared(model, other_model, x, by="module")
    assert not result
    assert set(result.modules) == {"0", "1", "1.qkv", "1.out", "2"}
    other_model[2].bias.data += 1
    first = compared(model, other_model, x, by="module", mapping={"1": "1", "2": "2"}).first
    assert first is not None
    assert first.module == "2"


def test_long_runs_of_equal_ops_are_aligned_at_once() -> None:
    keys = [("", "add")] * 20_000
    assert list(matching_positions(keys, [*keys[:7_000], ("", "mul"), *keys[7_000:]]))[-1] == (19_999, 20_000)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_alignment_pairs_equal_keys_in_order(keys: list[int], other_keys: list[int]) -> None:
    pairs = list(matching_positions(keys, other_keys))
    assert all(keys[i] == other_keys[j] for i, j in pairs)
    assert all(i < k and j < m for (i, j), (k, m) in itertools.pairwise(pairs))
    assert len(list(matching_positions(keys, keys))) == len(keys)


def test_a_renamed_module_is_compared_by_its_name_in_the_other_run() -> None:
    names = [("conv", "stem"), ("head", "classifier")]
    layers = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
    model = nn.Sequential()
    other_model = nn.Sequential()
    for (name, renamed), layer in zip(names, layers, strict=True):
        model.add_module(name, layer)
        other_model.add_module(renamed, copy.deepcopy(layer))
    other_model.classifier.bias.data += 1
    first = compared(model, other_model, torch.randn(1, 3, 8, 8), mapping=dict(names)).first
    assert first is not None
    assert (first.module, first.other_module) == ("head", "classifier")


def test_a_gradient_that_is_noise_does_not_diverge() -> None:
    # The bias ahead of a normalisation over the batch has no gradient but what rounding leaves.
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    other_model = copy.deepcopy(model).to(memory_format=torch.channels_last)
    result = compared(model, other_model, torch.randn(4, 3, 10, 10))
    assert result.first_forward is None
    assert result.first_backward is None


def test_later_steps_diverge_where_the_optimizer_does() -> None:
    def program(rate: float) -> Callable[[], None]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(5, 4)
        optimizer = torch.optim.SGD(model.parameters(), rate)

        def train() -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()

        return train

    result = diff(program(0.1), program(0.2))
    first = result.first
    assert first is not None
    assert (first.module, first.execution) in {("", 0), ("0", 1)}  # the step itself, or what reads its result
    assert any(comparison.phase == "optimizer" and comparison.diverges for comparison in result.comparisons)
    assert "First divergence, optimizer: " in str(result)


def test_nan_and_inf_diverge_where_they_differ() -> None:
    scores, mask = torch.randn(3, 3), torch.tensor([[True, False, False]])
    same = lambda: scores.masked_fill(mask, float("-inf")).exp()  # noqa: E731
    assert not diff(same, same)
    first = diff(same, lambda: scores.masked_fill(mask, float("nan")).exp()).first
    assert first is not None
    assert (first.type, first.relative) == ("masked_fill", float("inf"))


def test_complex_integer_and_boolean_tensors_are_compared() -> None:
    x = torch.randn(8, dtype=torch.complex64)
    assert not diff(lambda: torch.fft.fft(x), lambda: torch.fft.fft(x))
    assert diff(lambda: x.conj().mul(x), lambda: x.mul(x))
    integers = torch.arange(5)
    first = diff(lambda: integers.add(1).gt(3), lambda: integers.add(2).gt(3)).first
    assert first is not None
    assert (first.type, first.tolerance) == ("add", 0.0)


def dumped(folder: Path, program: Callable[[], Any], **options: Any) -> Path:
    tool = DumpTool(folder, **options)
    with amanda.apply(tool):
        program()
    assert tool.result
    return folder


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    other_model = copy.deepcopy(model)
    other_model[2].weight.data = other_model[2].weight.data.t().contiguous()
    return model, other_model


def test_summaries_show_where_dumps_diverge(models: Any, tmp_path: Path) -> None:
    x = torch.randn(50, 6)
    folders = [dumped(tmp_path / f"{i}", training(model, x)) for i, model in enumerate(models)]
    result = diff(*folders)
    assert result.first is not None
    assert result.first.module == "2"
    assert not result.first.exact
    assert "compared by statistics and samples alone" in str(result)
    assert not diff(folders[0], folders[0])


def test_statistics_of_two_runs_are_compared(models: Any, tmp_path: Path) -> None:
    x, paths = torch.randn(50, 6), []
    for i, model in enumerate(models):
        tool = StatsTool()
        with amanda.apply(tool):
            training(model, x)()
        paths.append(tool.result.save(tmp_path / f"{i}.json"))
    first = diff(*paths).first
    assert first is not None
    assert first.module == "2"
    assert not diff(paths[0], paths[0])


def test_the_command_has_the_status_of_diff(
    models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(5, 6)
    dump, other_dump = (
        str(dumped(tmp_path / name, training(model, x), outputs="full"))
        for name, model in zip("ab", models, strict=True)
    )
    assert main(["diff", dump, dump]) == 0
    assert "No divergence" in capsys.readouterr().out
    page = tmp_path / "diff.html"
    assert main(["diff", dump, other_dump, "--save", str(page)]) == 1
    assert "First divergence, forward: linear in 2 (forward)" in capsys.readouterr().out
    assert "<svg" in page.read_text()
    assert main(["diff", "-q", dump, other_dump, "--rtol", "1e9"]) == 0
    assert main(["diff", dump, str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["diff", dump]) == 2
    assert main(["diff", "--help"]) == 0
    assert main(["diff", dump, other_dump, "--map", "no.json"]) == 2
    assert main(["diff", dump, other_dump, "--rtol", "-1"]) == 2
    assert main(["diff", dump, other_dump, "--save", str(tmp_path / "diff.pdf")]) == 2
    assert "diff.pdf ends in none of .html, .json, .csv, .txt" in capsys.readouterr().err
    (tmp_path / "weights.pt").write_bytes(b"PK" + bytes(range(256)) * 9)
    assert main(["diff", dump, str(tmp_path / "weights.pt")]) == 2
    errors = capsys.readouterr().err
    assert "weights.pt is no file of statistics that can be read: it is no JSON (" in errors
    assert len(errors) < 400
    names = tmp_path / "names.json"
    names.write_text('{"0": "0"}')
    assert main(["diff", dump, other_dump, "--map", str(names), "--map", "2=2"]) == 1


def test_a_result_goes_to_every_form(models: Any, tmp_path: Path) -> None:
    result = compared(*models, torch.full((2, 6), float("inf")))
    content = json.loads(result.save(tmp_path / "diff.json").read_text(), parse_constant=pytest.fail)
    assert content["schema"] == "amanda.diff"
    assert content["rows"][content["first"]["forward"] or 0]["phase"] == "forward"
    assert len(result.to_pandas()) == len(result.comparisons)
    html = result.to_html()
    picture = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    circles = picture.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) >= len(result.comparisons)


def test_what_cannot_be_compared_is_told(tmp_path: Path) -> None:
    with pytest.raises(AmandaError, match="executed no op"):
        diff(lambda: None, lambda: torch.ones(1).neg())
    with pytest.raises(AmandaError, match="no op in common"):
        diff(lambda: torch.linspace(0, 1, 3), lambda: torch.eye(3))
    (tmp_path / "flops.json").write_text('{"schema": "amanda.flops"}')
    with pytest.raises(AmandaError, match="is no file of statistics"):
        diff(tmp_path / "flops.json", tmp_path / "flops.json")
    x = torch.ones(2, 3)
    model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(AmandaError, match=r"module '1' of the mapping executed nothing in .*; it has 0"):
        diff(lambda: model(x), lambda: model(x), mapping={"1": "0"})
    with pytest.raises(AmandaError, match="by is 'layer'"):
        diff(lambda: model(x), lambda: model(x), by="layer")  # type: ignore[arg-type]
    with pytest.raises(AmandaError, match="a is 3; give a function"):
        diff(3, 4)  # type: ignore[arg-type]
    with pytest.raises(AmandaError, match="control is 'flaot64'; did you mean 'float64'"):
        diff(lambda: model(x), lambda: model(x), control="flaot64")


def test_a_program_without_a_function_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "d.py"
    program.touch()
    assert main(["diff", str(program), str(program)]) == 2
    assert f"d.py:FUNCTION, or --a {program}" in capsys.readouterr().err


def test_the_repr_of_a_comparison_is_its_verdict() -> None:
    x = torch.ones(2, 3)
    assert "No difference: all" in repr(diff(lambda: x + 1, lambda: x + 1))
    assert "first differ at add" in repr(diff(lambda: x + 1, lambda: x + 2))


def test_what_runs_at_once_is_compared_with_the_same_in_pieces() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.rand(2, 6, 4)

    def in_pieces(*sizes: int, offset: float = 0.0) -> None:
        for piece in x.split(sizes, 1):
            model(piece + offset * (piece.shape[1] == 1))

    agree = diff(lambda: model(x), lambda: in_pieces(3, 1, 1, 1))
    assert not agree
    assert len(agree.comparisons) == 3
    assert agree.told == ("3 ops ran once in one run and in pieces in the other: the pieces were joined",)
    assert not diff(lambda: in_pieces(3, 1, 1, 1), lambda: model(x))
    for sides in (lambda a, b: (a, b)), (lambda a, b: (b, a)):
        first = diff(*sides(lambda: model(x), lambda: in_pieces(3, 1, 1, 1, offset=0.1))).first
        assert first is not None
        assert (first.type, first.module, first.inputs) == ("linear", "0", False)
        assert 0 < first.relative < 1


def test_pieces_may_be_the_end_or_the_beginning_of_the_whole_or_do_not_fit() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(4, 8), nn.Linear(8, 3)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = body, head

        def forward(self, x: Tensor, last: bool = False) -> Tensor:
            hidden = self.body(x).tanh()
            scores: Tensor = self.head(hidden[:, -1:] if last else hidden)
            return scores

    model, x = Model(), torch.rand(2, 6, 4)
    ends = diff(lambda: model(x), lambda: [model(one, last=True) for one in x.split((3, 1, 1, 1), 1)])
    assert [one.verdict != "different" for one in ends.comparisons] == [True] * 3
    beginning = diff(lambda: model(x), lambda: [model(one) for one in x[:, :4].split(1, 1)])
    assert [one.verdict != "different" for one in beginning.comparisons] == [True] * 3
    overlapping = diff(lambda: [x.relu(), model(x)], lambda: [x.relu(), model(x[:, :4]), model(x[:, 2:])])
    assert "3 ops in pieces do not make up what the other run gave, and were left" in str(overlapping)


def test_micro_batches_are_compared_with_the_batch() -> None:
    torch.manual_seed(0)
    model, x, y = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        torch.rand(8, 4),
        torch.rand(8, 3),
    )

    def loss(x: Tensor, y: Tensor, share: float) -> None:
        (F.mse_loss(model(x), y) / share).backward()

    def accumulated(share: float) -> None:
        for part, target in zip(x.split(2), y.split(2), strict=True):
            loss(part, target, share)

    assert not diff(lambda: loss(x, y, 1.0), lambda: accumulated(4.0)).first
    wrong = diff(lambda: loss(x, y, 1.0), lambda: accumulated(2.0)).first
    assert wrong is not None
    assert wrong.type != "linear"


def test_executions_that_one_run_has_more_than_the_other_are_told() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4), torch.rand(2, 4)

    def rounds(number: int) -> None:
        value = x
        for _ in range(number):
            value = model(value)

    for numbers in ((1, 3), (3, 2)):
        result = diff(lambda: rounds(numbers[0]), lambda: rounds(numbers[1]))  # noqa: B023
        assert not result
        count = abs(numbers[0] - numbers[1])
        sentence = f"{count} executions of ops that one run has more than the other were not compared"
        assert result.told == (sentence,)


def test_a_value_that_was_joined_of_pieces_replaces_none() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), torch.rand(2, 6, 4)
    result = diff(lambda: model(x), lambda: [model(item + 0.1) for item in x.split(2, 1)], bisect=True)
    assert result.remaining is None
    assert any("no op can give a's value in b" in item for item in result.told)


def test_pieces_of_modules_are_joined() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), torch.rand(6, 4)

    def loss(batch: Tensor) -> None:
        model(batch).square().sum().backward()

    def accumulated(offset: float = 0.0) -> None:
        for piece in x.split([3, 2, 1]):
            loss(piece + offset * (len(piece) == 1))

    for sides in (lambda a, b: (a, b)), (lambda a, b: (b, a)):
        agree = diff(*sides(lambda: loss(x), accumulated), by="module", rtol=1e-5)
        assert not agree, agree.sentence
        assert {one.phase for one in agree.comparisons} == {"forward", "backward"}
        assert any("in pieces in the other: the pieces were joined" in one for one in agree.told)
    first = diff(lambda: loss(x), lambda: accumulated(0.1), by="module", rtol=1e-5).first
    assert first is not None
    assert (first.phase, first.module) == ("forward", "0")


def test_modules_that_are_called_another_number_of_times_are_told() -> None:
    shared = nn.Linear(8, 8)

    class Calls(nn.Module):
        def __init__(self, *scales: float) -> None:
            super().__init__()
            self.linear, self.scales = shared, scales

        def forward(self, x: Tensor) -> Any:
            return sum(self.linear(x * scale) for scale in self.scales)

    x = torch.rand(3, 8)
    for calls, other_calls in (((2, 1), (1,)), ((2, 1), (3, 2, 1))):
        sentences = diff(Calls(*calls), Calls(*other_calls), x, by="module").told
        assert sentences == (
            "Modules that one run called more often than the other, of which the last outputs alone were "
            "compared: linear",
        )
    assert diff(Calls(2, 1), Calls(2, 1), x, by="module").told == ()


def test_sentences_are_folded_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.rand(3, 4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[2].weight += 1
    result = inferred(model, other, x)
    assert max(map(len, str(result).splitlines())) > 80
    monkeypatch.setenv("COLUMNS", "80")
    lines = str(result).splitlines()
    words = [line for line in lines if len(line) > 80 and " " in line.strip()]
    assert not words
    assert " ".join(result.sentence.split()) in " ".join(str(result).split())
