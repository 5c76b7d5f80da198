"""MappingTool: whose rules run, where, in which order, and what it says of a faulty rule."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amanda
from amanda.plan.context import OpFacts
from amanda.tools.mapping import MappingTool, RuleError, StandardMapping

X = torch.rand(2, 2, requires_grad=True)
ONES = torch.ones(2, 2)


def log(into: list[str], line: str) -> Callable[[amanda.OpContext], None]:
    return lambda context: into.append(line)


def dependent(
    mapping: MappingTool, routine: Callable[[amanda.OpContext], None], **where: bool
) -> amanda.Tool:
    tool = amanda.Tool()
    tool.depends_on(mapping)
    tool.add_inst_for_op(routine, **where)
    return tool


def add_under(*tools: amanda.Tool) -> None:
    with amanda.apply(*tools):
        torch.add(X, X).backward(ONES)


@pytest.mark.parametrize(
    ("namespace", "runs"),
    [
        ("pytorch", True),
        ("pytorch/" + torch.__version__.split("+")[0], True),
        ("*/*/eager", True),
        (amanda.Namespace("pytorch"), True),
        ("tensorflow", False),
        ("*/*/graph", False),
        ("pytorch/0.4", False),
    ],
)
def test_a_rule_runs_where_its_namespace_matches(namespace: str, runs: bool) -> None:
    calls: list[str] = []
    mapping = MappingTool([[namespace, log(calls, "rule")]])
    add_under(dependent(mapping, log(calls, "tool")))
    assert calls == (["rule", "tool"] if runs else ["tool"])


def test_after_runs_once_behind_the_last_dependent() -> None:
    calls: list[str] = []
    mapping = MappingTool([["pytorch", log(calls, "before"), log(calls, "after")]])
    first, second = (dependent(mapping, log(calls, name)) for name in ("first", "second"))
    third = amanda.Tool()
    third.add_inst_for_op(log(calls, "third"))
    add_under(first, second, third)
    assert calls == ["before", "first", "second", "after", "third"]


def test_rules_wrap_the_tools_in_order() -> None:
    calls: list[str] = []
    mapping = MappingTool(
        [
            ["pytorch", log(calls, "a before"), log(calls, "a after")],
            ["pytorch", None, log(calls, "b after")],
            ["pytorch", log(calls, "c before")],
        ]
    )
    add_under(dependent(mapping, log(calls, "tool")))
    assert calls == ["a before", "c before", "tool", "b after", "a after"]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("require_outputs", [False, True])
def test_rules_run_at_the_points_of_their_dependents_alone(backward: bool, require_outputs: bool) -> None:
    names: list[str] = []

    def rule(context: amanda.OpContext) -> None:
        name = context.get_backward_op().__name__ if context.is_backward() else context.get_op().__name__
        names.append(name)
        get = context.get_grad_inputs if context.is_backward() else context.get_outputs
        values = get() if context.is_after() else None
        assert (values is not None) is require_outputs

    mapping = MappingTool([["pytorch", rule]])
    add_under(dependent(mapping, log([], ""), backward=backward, require_outputs=require_outputs))
    assert names == (["AddBackward0", "AccumulateGrad"] if backward else ["add"])


def test_a_mapping_translates_what_a_tool_put_into_the_context() -> None:
    mapping = MappingTool(
        [
            [
                "pytorch",
                lambda context: context.update(inputs=len(context.get_inputs())),
                lambda context: context.insert_after_op(lambda out: out * context["scale"]),
            ]
        ]
    )
    tool = dependent(mapping, lambda context: context.update(scale=context["inputs"]))
    with amanda.apply(tool):
        doubled = torch.add(X, X)
    assert torch.equal(doubled, (X + X) * 2)


def test_the_mapping_is_found_after_import_amanda_alone() -> None:
    assert amanda.tools.mapping.MappingTool is MappingTool  # type: ignore[attr-defined]
    assert isinstance(amanda.load_tool("standard_mapping"), StandardMapping)


def test_rules_of_a_mapping_serve_ops_of_several_namespaces_in_turn() -> None:
    seen: list[str] = []
    mapping = MappingTool(
        rules=[
            ["pytorch", log(seen, "pytorch before"), log(seen, "pytorch after")],
            ["tensorflow", log(seen, "tensorflow before"), log(seen, "tensorflow after")],
            ["*", log(seen, "any before"), log(seen, "any after")],
        ]
    )
    contexts = [
        amanda.OpContext(OpFacts(abs, number, amanda.Namespace(f"{framework}/1/eager")), lambda *_: None)
        for number, framework in enumerate(["pytorch", "tensorflow", "jax", "pytorch"])
    ]
    for context in contexts:
        mapping._apply_before(context)
        mapping._apply_after(context)
    expected: list[str] = []
    for framework in ("pytorch", "tensorflow", "", "pytorch"):
        own = [framework] if framework else []
        expected += [f"{rule} before" for rule in [*own, "any"]]
        expected += [f"{rule} after" for rule in ["any", *own]]
    assert seen == expected


def test_a_standard_mapping_can_be_pickled() -> None:
    mapping = StandardMapping()
    again = pickle.loads(pickle.dumps(mapping))
    assert [rule.namespace for rule in again.rules] == [rule.namespace for rule in mapping.rules]


def ignore(context: amanda.OpContext) -> None:
    pass


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("pytorch", r"rules is 'pytorch'; give a list of \[namespace, before, after\]"),
        ({"pytorch": ignore}, r"give a list of \[namespace, before, after\]"),
        ([["pytorch", ignore], "pytorch"], r"list of .*after\] \(item 1 is 'pytorch'\)"),
        ([["pytorch"]], r"rules\[0\] has 1 elements"),
        ([["pytorch", ignore, ignore, ignore]], r"rules\[0\] has 4 elements"),
        ([[ignore, "pytorch"]], r"the namespace of rules\[0\] is <function ignore"),
        ([["pytorch//eager", ignore]], r'"pytorch//eager", with an empty tag'),
        ([["pytorch", "conv2d"]], r"`before` of rules\[0\] is 'conv2d'; give a function"),
        ([["pytorch", ignore, 3]], r"`after` of rules\[0\] is 3"),
        ([["pytorch", None]], r"rules\[0\] has no function"),
    ],
)
def test_a_faulty_rule_is_named(rules: Any, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        MappingTool(rules)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, GeneratorExit, StopIteration, TypeError])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_an_exception_of_a_rule_reaches_the_user_as_itself_and_torch_is_as_before(
    error: type[BaseException], after: bool, backward: bool
) -> None:
    mistake, vanilla = error("on purpose"), torch.nn.Module.__call__

    def fail(context: amanda.OpContext) -> None:
        raise mistake

    mapping = MappingTool([["pytorch", None, fail] if after else ["pytorch", fail]])
    with pytest.raises(error) as raised:
        add_under(dependent(mapping, lambda context: None, backward=backward))
    assert raised.value is mistake
    assert "tool MappingTool" in mistake.__notes__[0]
    assert torch.nn.Module.__call__ is vanilla
    add_under(amanda.Tool())
