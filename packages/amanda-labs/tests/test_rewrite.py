"""Subgraph rewriting on PyTorch."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.rewrite import (
    Capture,
    Match,
    Maybe,
    Op,
    PatternError,
    RewriteResult,
    RewriteTool,
    Rule,
    insert_after,
    remove,
)

FIRST = "the match was not known yet"


class Model(nn.Module):
    """A function as a model, each of whose calls is the same program."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def rewritten(tool: amanda.Tool, program: Callable[[], Any], times: int = 3) -> Any:
    """What a program gives in the last of some executions."""
    model = program if isinstance(program, Model) else Model(program)
    with amanda.apply(tool):
        for _ in range(times):
            result = model()
    return result


def normalised(seed: int = 0) -> nn.Sequential:
    """Two convolutions with normalisations, one in place, whose statistics are not the first ones."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, bias=False, groups=4), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
    )  # fmt: skip
    return with_statistics(model)


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TEN = Rule(Op("relu", Op("neg")), lambda match: match.original() + 10, name="ten")


negated_relu = Model(lambda x: torch.relu(torch.neg(x)))


def test_a_match_is_replaced_as_one_from_its_second_execution_on() -> None:
    tool, x = RewriteTool([TEN]), torch.tensor([1.0, -2.0])
    with amanda.apply(tool):
        results = [negated_relu(x).tolist() for _ in range(3)]
    assert results == [[0, 2], [10, 12], [10, 12]]
    (match,) = tool.result.matches
    assert match.ops == ("neg", "relu")
    assert match.replaced == 2
    assert match.fallbacks == {FIRST: 1}


def test_ops_that_are_replaced_do_not_run() -> None:
    ran: list[str] = []

    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ran.append("forward")
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    rule = Rule(Op("relu", Op("Mine", Capture("x"))), lambda match: torch.relu(match["x"]))
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    result = rewritten(RewriteTool([rule]), lambda: torch.relu(Mine.apply(x)), times=5)
    result.sum().backward()
    assert result.tolist() == [1, 0]
    assert ran == ["forward"] * 2  # the first one, and one to learn the form of what it makes
    assert x.grad is not None
    assert x.grad.tolist() == [1, 0]


def test_the_inputs_of_a_sum_are_matched_in_any_order() -> None:
    rule = Rule(Op("add", Op("neg"), Capture("other")), lambda match: match["other"], name="rest")
    x, y = torch.tensor([1.0]), torch.tensor([5.0])
    for program in (lambda: torch.neg(x) + y, lambda: y + torch.neg(x)):
        assert rewritten(RewriteTool([rule]), program).item() == 5
    turned = Rule(Op("sub", Op("neg"), Capture("other")), lambda match: match["other"])
    assert rewritten(RewriteTool([turned]), lambda: y - torch.neg(x)).item() == 6


def test_an_op_may_be_absent() -> None:
    start = Op("neg", Capture("x"))
    rule = Rule(
        Op("relu", Maybe(Op("mul", start, Capture("factor")))),
        lambda match: match["x"] * 100 * match.get("factor", 1),
    )
    x = torch.tensor([2.0])
    assert rewritten(RewriteTool([rule]), lambda: torch.relu(torch.neg(x))).item() == 200
    assert rewritten(RewriteTool([rule]), lambda: torch.relu(torch.neg(x) * 3)).item() == 600


def test_a_star_is_any_op_and_where_asks_for_its_context() -> None:
    def in_second(context: amanda.OpContext) -> bool:
        return context.get_scope() == "1"

    rule = Rule(Op("relu", Op("*", where=in_second)), lambda match: match.original() + 10)
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.ReLU(), nn.Tanh(), nn.ReLU())
    tool = RewriteTool([rule])
    with amanda.apply(tool):
        model(torch.ones(2))
    assert [match.ops for match in tool.result.matches] == [("sigmoid", "relu")]


def test_one_op_that_several_read_is_one_in_the_pattern() -> None:
    centre = Op("neg", Capture("x"))
    rule = Rule(Op("mul", Op("tanh", centre), Op("sigmoid", centre)), lambda match: match["x"])
    x = torch.tensor([2.0])

    def shared() -> Tensor:
        y = torch.neg(x)
        return torch.tanh(y) * torch.sigmoid(y)

    assert rewritten(RewriteTool([rule]), shared).item() == 2
    tool = RewriteTool([rule])
    rewritten(tool, lambda: torch.tanh(torch.neg(x)) * torch.sigmoid(torch.neg(x)))
    assert not tool.result.matches


def test_captures_of_one_name_are_one_value() -> None:
    rule = Rule(Op("mul", Capture("x"), Op("sigmoid", Capture("x"))), lambda match: F.silu(match["x"]))
    x, y = torch.randn(4), torch.randn(4)
    tool = RewriteTool([rule])
    result = rewritten(tool, lambda: (x * torch.sigmoid(x), x * torch.sigmoid(y)))
    torch.testing.assert_close(result, (F.silu(x), x * torch.sigmoid(y)))
    assert tool.result.count() == 1


def test_an_op_that_may_be_absent_fits_no_input_that_an_op_lacks() -> None:
    scaled = Maybe(Op("mul", Capture("bias"), None))
    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3), torch.randn(4)

    def matches_of(pattern: Op, program: Callable[[], Any]) -> list[dict[str, bool]]:
        matches: list[dict[str, bool]] = []

        def original(match: Match) -> Any:
            matches.append({"bias": "bias" in match, "mul": "mul" in match.ops})
            return match.original()

        torch.testing.assert_close(rewritten(RewriteTool([Rule(pattern, original)]), program), program())
        return matches

    linear = Op("linear", None, None, scaled)
    assert matches_of(linear, lambda: F.linear(x, weight)) == []
    assert matches_of(linear, lambda: F.linear(x, weight, bias)) == [{"bias": True, "mul": False}] * 3
    assert len(matches_of(linear, lambda: F.linear(x, weight, bias * 2))) == 2  # the first is not known yet
    nested = Op("linear", None, None, Maybe(Op("mul", Maybe(Op("neg", Op("relu", None))))))
    assert matches_of(nested, lambda: F.linear(x, weight)) == []
    assert matches_of(nested, lambda: F.linear(x, weight, bias)) == []
    beyond = Op("relu", Capture("x"), Maybe(Op("mul", Capture("x"))))
    assert matches_of(beyond, lambda: torch.relu(x)) == []
    assert len(matches_of(Op("linear", None, None, None), lambda: F.linear(x, weight))) == 3


def test_a_condition_is_asked_at_each_execution() -> None:
    rule = Rule(TEN.pattern, TEN.replacement, when=lambda match: match.original().sum() > 1)
    tool = RewriteTool([rule])
    inputs = [torch.tensor([number]) for number in (-2.0, -2.0, 2.0, -2.0)]
    with amanda.apply(tool):
        results = [negated_relu(x).item() for x in inputs]
    assert results == [2, 12, 0, 12]
    (match,) = tool.result.matches
    assert match.fallbacks == {FIRST: 1, "the rule's condition does not hold": 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Op(""), "type"),
        (lambda: Op("relu", "neg"), "'neg'"),  # type: ignore[arg-type]
        (lambda: Maybe(Op("relu")), "Maybe"),
        (lambda: Capture(""), "name"),
        (lambda: Rule(Op("relu"), 3), "3"),  # type: ignore[arg-type]
        (lambda: Rule(Op("relu", Op("neg", name="a"), name="a"), TEN.replacement), "'a'"),
        (lambda: RewriteTool(["fold_batchnorm"]), "did you mean 'fold_batch_norm'"),
        (lambda: RewriteTool([Op("relu")]), "item 0 is Op\\(relu\\)"),  # type: ignore[list-item]
        (lambda: RewriteTool(3), "rules is 3"),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_with_a_rule_is_said(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(PatternError, match=message):
        wrong()


def test_one_rule_needs_no_list() -> None:
    assert RewriteTool("fold_batch_norm").rules[0].name == "fold_batch_norm"
    assert RewriteTool(TEN).rules == (TEN,)


def test_a_replacement_that_returns_nothing_is_named() -> None:
    def forgetful(match: Match) -> None:
        match.original()

    with (
        amanda.apply(RewriteTool(Rule(Op("neg"), forgetful))),
        pytest.raises(PatternError, match="'forgetful' gave None"),
    ):
        torch.neg(torch.ones(2))


def test_an_unknown_capture_is_an_error_that_tells_those_there_are() -> None:
    rule = Rule(Op("neg", Capture("x")), lambda match: match["y"])
    with amanda.apply(RewriteTool([rule])), pytest.raises(PatternError, match="captured x, not 'y'"):
        torch.neg(torch.ones(2))


def labelled(pattern: Op, label: float, name: str) -> Rule:
    return Rule(pattern, lambda match: match.original() + label, name=name)


def test_of_matches_that_overlap_the_earliest_and_then_the_longest_is_replaced() -> None:
    first = Op("neg")
    short = labelled(Op("tanh", first), 10, "short")
    long = labelled(Op("sigmoid", Op("tanh", first)), 100, "long")
    late = labelled(Op("relu", Op("sigmoid")), 1000, "late")
    x = torch.tensor([-1.0])

    def program() -> Tensor:
        return torch.relu(torch.sigmoid(torch.tanh(torch.neg(x))))

    for rules in ([short, long, late], [late, long, short]):
        tool = RewriteTool(rules)
        result = rewritten(tool, program, times=4)
        assert result.item() == pytest.approx(100 + program().item())
        states = {match.rule: match.obstacle for match in tool.result.matches}
        assert states["long"] == ""
        assert "overlaps with long" in states["short"]
        assert "overlaps with long" in states["late"]


def test_of_equal_matches_that_of_the_first_rule_is_replaced() -> None:
    rules = [labelled(Op("relu", Op("neg")), 10, "one"), labelled(Op("relu", Op("neg")), 20, "two")]
    assert rewritten(RewriteTool(rules), lambda: negated_relu(torch.tensor([-1.0]))).item() == 11


def test_a_chain_of_equal_ops_is_matched_in_pairs() -> None:
    rule = Rule(Op("neg", Op("neg", Capture("x"))), lambda match: match["x"] + 10)
    tool, x = RewriteTool([rule]), torch.tensor([1.0])

    def program() -> Tensor:
        return torch.neg(torch.neg(torch.neg(torch.neg(torch.neg(x)))))

    assert rewritten(tool, program, times=4).item() == -21
    assert tool.result.count() == 2


def test_a_match_whose_intermediate_is_read_elsewhere_is_not_replaced() -> None:
    x = torch.tensor([-2.0])

    def program() -> Tensor:
        y = torch.neg(x)
        return torch.relu(y) + y * 3

    tool = RewriteTool([TEN])
    assert rewritten(tool, program).item() == 8
    (match,) = tool.result.matches
    assert match.replaced == 0
    assert "what neg makes is read by mul" in match.obstacle


def test_an_op_that_reads_an_intermediate_in_a_list_reads_it() -> None:
    x = torch.tensor([-2.0])

    def program() -> Tensor:
        y = torch.neg(x)
        return torch.cat([torch.relu(y), y])

    tool = RewriteTool([TEN])
    assert rewritten(tool, program).tolist() == [2, 2]
    (match,) = tool.result.matches
    assert match.replaced == 0
    assert "what neg makes is read by cat" in match.obstacle


def test_an_intermediate_that_the_user_keeps_is_right_and_ends_the_match() -> None:
    intermediates: list[Tensor] = []
    weight = torch.tensor([2.0], requires_grad=True)

    def program() -> Tensor:
        intermediates.append(torch.neg(weight))
        return torch.relu(intermediates[-1])

    tool = RewriteTool([TEN])
    model = Model(program)
    with amanda.apply(tool):
        for _ in range(4):
            model()
        assert [tensor.item() for tensor in intermediates] == [-2] * 4
        for _ in range(2):
            model()
    assert [tensor.item() for tensor in intermediates] == [-2] * 6
    assert "read by" in tool.result.matches[0].obstacle
    (gradient,) = torch.autograd.grad(sum(intermediates).sum(), weight)  # type: ignore[union-attr]
    assert gradient.item() == -6


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.numpy(), lambda y: np.asarray(y), lambda y: y.tolist(), repr,
        lambda y: y[0].item(), lambda y: torch.from_dlpack(y).numpy(), lambda y: y.data.numpy(),
        lambda y: y.clone().numpy(),
        lambda y: bytes(y.untyped_storage()), lambda y: pickle.loads(pickle.dumps(y)).numpy(),
        lambda y: copy.deepcopy(y).numpy(), lambda y: F.softmax(y, 0).numpy(), lambda y: [*y.split(1)],
    ],
)  # fmt: skip
def test_whatever_reads_an_intermediate_has_its_value(read: Callable[[Tensor], Any]) -> None:
    x, intermediates = torch.tensor([1.0, -2.0]), []

    def program() -> None:
        intermediates.append(torch.neg(x))
        torch.relu(intermediates[-1])

    model = Model(program)
    with amanda.apply(RewriteTool([TEN])):
        for _ in range(3):
            model()
        value_read = read(intermediates[-1])
    assert np.array_equal(value_read, read(torch.neg(x)))
    assert np.array_equal(read(intermediates[-1]), read(torch.neg(x)))


def test_an_intermediate_that_outlives_the_scope_has_the_value_of_its_time() -> None:
    x, intermediates = torch.tensor([1.0, -2.0]), []

    def program() -> None:
        intermediates.append(torch.neg(x))
        torch.relu(intermediates[-1])

    rewritten(RewriteTool([TEN]), program)
    x.mul_(100)
    assert intermediates[-1].tolist() == [-1, 2]


def test_writing_what_an_intermediate_is_computed_of_comes_after_it() -> None:
    intermediates: list[Tensor] = []

    def program(x: Tensor) -> Tensor:
        intermediates.append(torch.neg(x))
        x.mul_(100)
        return torch.relu(intermediates[-1])

    model = Model(program)
    with amanda.apply(RewriteTool([TEN])):
        for _ in range(3):
            result = model(torch.tensor([1.0, -2.0]))
    assert intermediates[-1].tolist() == [-1, 2]
    assert result.tolist() in ([0, 2], [10, 12])


def test_writing_through_data_what_an_op_was_given_is_a_write() -> None:
    weight = torch.tensor([1.0, -2.0], requires_grad=True)

    def program() -> Tensor:
        y = torch.neg(weight)
        weight.data.add_(1)
        return torch.relu(y)

    rule = Rule(Op("relu", Op("neg", Capture("x"))), lambda match: torch.relu(-match["x"]))
    assert rewritten(RewriteTool([rule]), program).tolist() == [0, 0]


def test_a_detached_intermediate_is_read_without_its_gradient() -> None:
    model = normalised()
    intermediates: list[Any] = []

    def program() -> Tensor:
        intermediates.append(model[0](IMAGES))
        result: Tensor = model[1](intermediates[-1])
        return result

    rewritten(RewriteTool("fold_batch_norm"), program)
    assert np.array_equal(intermediates[-1].detach().numpy(), model[0](IMAGES).detach().numpy())


@pytest.mark.parametrize("first", [1, 3])
@pytest.mark.parametrize("later", [False, True])
def test_hooks_on_an_intermediate_have_its_gradient_and_end_the_match(
    first: int, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, recorded = normalised(), []

    def hook(y: Tensor, gradients: list[Tensor]) -> None:
        y.register_hook(lambda gradient: gradients.append(gradient) or 2 * gradient)
        y.retain_grad()

    def step(hooked: bool = True) -> list[Any]:
        model.zero_grad()
        gradients: list[Any] = []
        y = model[0](IMAGES)
        if hooked and not later:
            hook(y, gradients)
        z = model[1](y)
        if hooked and later:
            hook(y, gradients)
        z.square().sum().backward()
        return [*gradients, y.grad if hooked else None, model[0].weight.grad.clone()]

    plain, program = step(), Model(step)
    tool = RewriteTool("fold_batch_norm")
    with amanda.apply(tool):
        for i in range(6):
            recorded.append(program(i >= first))
    for gradients in recorded[4 if later else first :]:
        assert all(map(torch.equal, gradients, plain))
    assert "read by register_hook" in tool.result.matches[0].obstacle
    assert later == ("gets no gradient in this execution" in caplog.text)


def test_shapes_of_intermediates_are_there_without_their_values() -> None:
    x = torch.ones(2, 3, 4)

    def program() -> Tensor:
        y = torch.neg(x)
        assert y.shape == (2, 3, 4)
        assert y.dim() == y.ndim == 3
        assert (y.dtype, y.device) == (x.dtype, x.device)
        assert y.is_contiguous()
        assert len(y) == y.size(0) == 2
        assert isinstance(y, Tensor)
        return torch.relu(y)

    tool = RewriteTool([TEN])
    rewritten(tool, program, times=4)
    assert tool.result.matches[0].replaced == 3


def test_a_match_that_control_flow_breaks_is_computed_op_by_op() -> None:
    weight = torch.tensor([2.0], requires_grad=True)

    def program(*, straight: bool) -> Tensor:
        y = torch.neg(weight)
        return torch.relu(y) if straight else torch.tanh(y) * 3

    tool, model = RewriteTool([TEN]), Model(program)
    with amanda.apply(tool):
        for straight in (True, True, False, True):
            result = model(straight=straight)
            (gradient,) = torch.autograd.grad(result, weight)
            if not straight:
                assert torch.equal(result, torch.tanh(-weight) * 3)
                assert torch.allclose(gradient, -3 * (1 - torch.tanh(-weight) ** 2))


def test_a_branch_that_is_taken_after_the_match_is_known_is_right_and_told() -> None:
    x = torch.tensor([-2.0])
    module = Model(lambda broken: torch.relu(torch.neg(x) if not broken else torch.abs(x) * 1))
    tool = RewriteTool([TEN])
    with amanda.apply(tool):
        results = [module(broken).item() for broken in (False, False, True, False)]
    assert results == [2, 12, 2, 12]
    (match,) = tool.result.matches
    assert match.fallbacks == {FIRST: 1, "control flow: its ops ran in another way": 1}
    assert "control flow" in tool.result.whole()


def test_new_shapes_are_rewritten_too() -> None:
    tool = RewriteTool([TEN])
    with amanda.apply(tool):
        for n in (1, 2, 3, 2, 1):
            result = negated_relu(-torch.ones(n))
            assert result.shape == (n,)
    assert result.tolist() == [11]
    assert tool.result.matches[0].replaced == 4


def test_after_an_exception_in_a_replacement_all_is_as_it_was() -> None:
    def fail(match: Match) -> Tensor:
        raise ZeroDivisionError("mine")

    x = torch.tensor([-2.0])
    tool = RewriteTool([Rule(TEN.pattern, fail)])
    with pytest.raises(ZeroDivisionError, match="mine"):
        rewritten(tool, lambda: negated_relu(x))
    assert negated_relu(x).item() == 2
    assert x.tolist() == [-2]
    with amanda.apply(RewriteTool([TEN])):
        assert [negated_relu(x).item() for _ in range(2)] == [2, 12]


def test_nothing_is_kept_of_an_execution() -> None:
    tool, model = RewriteTool(["fold_batch_norm"]), normalised()
    with amanda.apply(tool):
        for _ in range(4):
            x = IMAGES.clone().requires_grad_()
            y = model(x)
        y.sum().backward()
        died = [weakref.ref(x), weakref.ref(y)]
        del x, y
        gc.collect()
        assert [reference() for reference in died] == [None, None]
        assert not tool._executions["pytorch"].delayed


def test_routines_of_other_tools_at_ops_of_a_match_run_and_gradients_are_right() -> None:
    class Halve(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "neg":
                context.insert_after_op(lambda y: y * 0.5)

    weight = torch.tensor([-2.0], requires_grad=True)
    with amanda.apply(RewriteTool([TEN]), Halve()):
        for _ in range(4):
            result = negated_relu(weight)
            (gradient,) = torch.autograd.grad(result, weight)
            assert gradient.item() == -1  # straight through
    assert result.item() == 1


def test_weights_that_another_tool_changes_are_folded_as_changed() -> None:
    class Zero(amanda.Tool):
        def __init__(self) -> None:
            super().__init__()
            self.add_inst_for_op(self.analyse)

        def analyse(self, context: amanda.OpContext) -> None:
            if context.get_op_type() == "conv2d":
                context.insert_before_op(lambda weight: weight * (weight > 0), inputs=["weight"])

    model = normalised()
    with amanda.apply(Zero()):
        expected = model(IMAGES)
    for tools in ((Zero(), RewriteTool(["fold_batch_norm"])), (RewriteTool(["fold_batch_norm"]), Zero())):
        with amanda.apply(*tools):
            for _ in range(3):
                result = model(IMAGES)
        torch.testing.assert_close(result, expected)
        (rewrite,) = (tool for tool in tools if isinstance(tool, RewriteTool))
        assert rewrite.result.matches[0].replaced == 2


def test_the_result_goes_through_a_file(tmp_path: Any) -> None:
    tool = RewriteTool(["fold_batch_norm"])
    model = normalised()
    rewritten(tool, lambda: model(IMAGES))
    path = tool.result.save(tmp_path / "rewrite.json")
    again = RewriteResult.from_dict(json.loads(path.read_text()))
    assert again.rows() == tool.result.rows()
    assert again.count("fold_batch_norm") == 2
    tool.clear()
    assert not tool.result.matches
    assert "No rule" in str(tool.result)


def test_a_folded_normalisation_gives_what_it_gave_and_its_gradients() -> None:
    model = normalised()
    expected = model(IMAGES)
    expected.pow(2).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    tool, flops = RewriteTool(["fold_batch_norm"]), FlopsTool()
    with amanda.apply(tool, flops):
        for _ in range(3):
            result = model(IMAGES)
        result.pow(2).sum().backward()
    assert type(result) is Tensor
    torch.testing.assert_close(result, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-4)
    assert tool.result.count("fold_batch_norm") == 2


def test_a_normalisation_that_learns_is_not_folded() -> None:
    model, tool = normalised().train(), RewriteTool(["fold_batch_norm"])
    twin, program = normalised().train(), Model(lambda: model(IMAGES))
    result = rewritten(tool, program)
    for _ in range(3):
        expected = twin(IMAGES)
    assert torch.equal(result, expected)
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert "condition" in tool.result.matches[0].why
    model.eval(), twin.eval()
    torch.testing.assert_close(rewritten(tool, program), twin(IMAGES))
    assert tool.result.matches[0].replaced == 3


@pytest.mark.parametrize(("name", "pairs"), [("resnet50", 53), ("mobilenet_v2", 52)])
def test_each_convolution_of_a_model_of_torchvision_takes_its_normalisation(
    name: str, pairs: int, torchvision: Any
) -> None:
    torch.manual_seed(0)
    model = with_statistics(getattr(torchvision.models, name)())
    images = torch.rand(1, 3, 32, 32)
    tool = RewriteTool(["fold_batch_norm"])
    with torch.no_grad():
        result, expected = rewritten(tool, lambda: model(images), times=2), model(images)
    assert tool.result.count("fold_batch_norm") == pairs
    assert all(match.replaced == 1 for match in tool.result.matches)
    scale = expected.abs().max()
    torch.testing.assert_close(result / scale, expected / scale, rtol=1e-4, atol=1e-4)


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BertConfig(vocab_size=50, attn_implementation="eager", **SIZES, **OFF)
    tokens, mask = torch.randint(0, 50, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    return transformers.BertModel(config), {"input_ids": tokens, "attention_mask": mask}


def gpt2(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=32, n_layer=2, n_head=2, attn_implementation="eager", use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2Model(config), {"input_ids": torch.randint(0, 50, (2, 6))}


def vit(transformers: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(image_size=32, patch_size=8, attn_implementation="eager", **SIZES, **OFF)
    return transformers.ViTModel(config), {"pixel_values": torch.rand(2, 3, 32, 32)}


@pytest.mark.parametrize("make", [bert, gpt2, vit])
def test_attention_of_a_transformer_is_fused_forward_and_backward(make: Any, torchvision: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = make(transformers)
    tool = RewriteTool(["fuse_attention"])

    def step() -> Tensor:
        model.zero_grad()
        output: Tensor = model(**inputs)[0]
        output.pow(2).mean().backward()
        return output.detach()

    expected = step()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with amanda.apply(tool):
        for _ in range(3):
            result = step()
    assert tool.result.count("fuse_attention") == 2
    assert [match.replaced for match in tool.result.matches] == [2, 2]
    assert [match.why for match in tool.result.matches] == [f"{FIRST} (1)"] * 2
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    fused_gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch.testing.assert_close(fused_gradients, gradients, rtol=1e-3, atol=1e-5)
    model.eval()
    with torch.no_grad():
        with amanda.apply(tool):
            result = model(**inputs)[0]
        torch.testing.assert_close(result, model(**inputs)[0], rtol=1e-4, atol=1e-5)


def test_attention_whose_weights_are_asked_for_keeps_them(torchvision: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = bert(transformers)
    model.eval()

    def weights() -> Any:
        return model(**inputs, output_attentions=True).attentions

    torch.testing.assert_close(rewritten(RewriteTool(["fuse_attention"]), weights), weights())


def test_attention_over_another_axis_is_left_alone() -> None:
    q, k, v = (torch.rand(2, 3, 4, 4) for _ in range(3))
    tool = RewriteTool(["fuse_attention"])

    def program() -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-2) @ v

    assert torch.equal(rewritten(tool, program), program())
    assert "condition" in tool.result.matches[0].why


def test_attention_with_a_mask_of_one_axis_is_fused() -> None:
    q, k, v = (torch.rand(2, 3, 4, 4) for _ in range(3))
    mask, tool = torch.linspace(-1, 0, 4), RewriteTool(["fuse_attention"])

    def program() -> Tensor:
        return torch.softmax(q @ k.transpose(-2, -1) * 0.5 + mask, dim=-1) @ v

    torch.testing.assert_close(rewritten(tool, program), program())
    assert tool.result.matches[0].replaced == 2


@pytest.mark.parametrize("drop", [lambda y: y, lambda y: F.dropout(y, 0.5)])
def test_an_op_that_is_put_off_and_computed_has_the_gradients_of_each_of_its_inputs(drop: Any) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 8), torch.rand(2, 5, 8)

    def attend() -> list[Tensor]:
        torch.manual_seed(1)
        q = layer(x)
        y = drop((q @ q.transpose(-1, -2)).softmax(-2)) @ q  # another axis: no attention
        first, bias = torch.autograd.grad(y.square().sum(), [layer.weight, layer.bias], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), layer.weight)
        return [y.detach(), first.detach(), bias.detach(), second, torch.rand(2)]

    expected, program = attend(), Model(attend)
    tool = RewriteTool("fuse_attention")
    with amanda.apply(tool):
        for _ in range(4):
            torch.testing.assert_close(program(), expected)
    assert sum(tool.result.matches[0].fallbacks.values()) == 4


def test_compiled_graphs_keep_matches_of_several_ops_and_say_so() -> None:
    torch._dynamo.reset()
    model = normalised()
    expected = model(IMAGES)
    compiled, tool = torch.compile(model, backend="aot_eager"), RewriteTool(["fold_batch_norm"])
    inserted = RewriteTool(insert_after(Op("relu"), lambda y: y + 1))
    with amanda.apply(tool, compiled="instrument"):
        for _ in range(2):
            assert torch.equal(compiled(IMAGES), expected)
    assert [(match.replaced, "matches of a single op" in match.why) for match in tool.result.matches] == [
        (0, True), (0, True)
    ]  # fmt: skip
    layers = nn.Sequential(model[0], nn.ReLU(), model[3])
    with amanda.apply(inserted, compiled="instrument"):
        changed = torch.compile(layers, backend="aot_eager")(IMAGES)
    torch.testing.assert_close(changed, model[3](model[0](IMAGES).relu() + 1))
    torch._dynamo.reset()


def test_dropout_is_removed_also_in_place() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5, inplace=True))
    x = torch.rand(3, 4)
    tool = RewriteTool(["remove_dropout"])
    with amanda.apply(tool):
        assert torch.equal(model(x), model[1](x))
    assert tool.result.count() == 2
    assert torch.equal(rewritten(RewriteTool([remove("relu")]), lambda: torch.relu(x - 1)), x - 1)


def test_ops_are_inserted_after_a_pattern() -> None:
    @torch.no_grad()
    def doubled(y: Tensor) -> Tensor:
        return y * 2

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.rand(3, 4)
    expected = model(x) * 2
    tool = RewriteTool([insert_after(Op("relu", Op("linear")), doubled)])
    assert torch.equal(rewritten(tool, lambda: model(x)), expected)
    assert tool.result.matches[0].rule == "insert doubled"


def test_rules_are_given_by_name_on_the_command_line() -> None:
    tool = amanda.load_tool("rewrite", rules=["fold_batch_norm", "remove_dropout"])
    assert [rule.name for rule in tool.rules] == ["fold_batch_norm", "fold_batch_norm", "remove_dropout"]
