"""What newcomers get wrong: each mistake is told in one line that says what to write."""

from __future__ import annotations

import copy
import importlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda.tools.flops import FlopsTool
from amanda.tools.mapping import StandardMapping
from amanda.tools.profile import ProfileTool
from amanda.tools.prune import PruneTool
from amanda.tools.select import select
from amanda.tools.stats import StatsTool
from amanda.tools.trace import TraceTool

Mistake = Callable[[], object]


def run(*tools: Any) -> Any:
    """Train a small model for a step under tools; return the scope."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.rand(3, 4)
    with amanda.apply(*tools) as scope:
        model(x).sum().backward()
    return scope


def analysing(routine: Any, **options: Any) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(routine, **options)
    return tool


def at_linear(action: str, routine: Any, **options: Any) -> Mistake:
    """Record an action at linear ops."""

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "linear":
            getattr(context, action)(routine, **options)

    return lambda: run(analysing(analyse))


def at_linear_backward(action: str, routine: Any, after: bool = False, **options: Any) -> Mistake:
    """Record an action at backward ops of linear ops."""

    def analyse(context: amanda.OpContext) -> None:
        if str(context.get_backward_op().__name__).startswith("Addmm"):
            getattr(context, action)(routine, **options)

    return lambda: run(analysing(analyse, backward=True, require_outputs=after))


def on_replacement(*routines: Any) -> Mistake:
    def tool(routine: Any) -> amanda.Tool:
        return analysing(
            lambda context: context.replace_op(routine) if context.get_op_type() == "relu" else None
        )

    return lambda: run(*map(tool, routines))


def kept_context() -> amanda.OpContext:
    kept: list[amanda.OpContext] = []
    run(analysing(kept.append))
    return kept[0]


def applied(kind: Any) -> amanda.Tool:
    tool: amanda.Tool = kind()
    run(tool)
    return tool


class Called(amanda.Tool):
    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse())  # type: ignore[func-returns-value, arg-type]

    def analyse(self) -> None: ...


class WithoutContext(amanda.Tool):
    def __init__(self) -> None:
        self.add_inst_for_op(self.analyse)  # type: ignore[arg-type]

    def analyse(self) -> None: ...


def opened_twice() -> None:
    with amanda.apply(FlopsTool()) as scope, scope:
        pass


def circle() -> None:
    one, two = amanda.Tool(), amanda.Tool()
    one.depends_on(two)
    two.depends_on(one)
    amanda.apply(one)


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "a routine of too few values": (
        at_linear("insert_before_op", lambda x: x),
        "cannot be called with 3 values: too many positional arguments. The op has 0: input (Tensor (3, 4)), "
        "1: weight (Parameter (8, 4)), 2: bias (Parameter (8,)) here. Select values, as by inputs=[0]",
    ),
    "a routine that misses a keyword": (
        at_linear("insert_before_op", lambda weight, mask: weight, inputs=["weight"]),
        "cannot be called with 1 value: missing a required argument: 'mask'. The op has 0: input",
    ),
    "a keyword that the routine misses": (
        at_linear("insert_before_op", lambda weight: weight, inputs=["weight"], mask=1),
        "unexpected keyword argument 'mask'. Give the routine a parameter mask, or leave mask= away",
    ),
    "too few values returned": (
        at_linear("insert_before_op", lambda *inputs: inputs[:1]),
        "returned 1 value; it was given 3 values and may return None (no change) or a sequence of 3",
    ),
    "another shape returned": (
        at_linear("insert_after_op", lambda y: y[:1]),
        "returned shape (1, 8) where shape (3, 8) was given; mark it @amanda.differentiable",
    ),
    "an array returned": (
        at_linear("insert_after_op", lambda y: y.detach().numpy()),
        "returned ndarray where a tensor was given; return a tensor of that shape, or None for no change",
    ),
    "a value changed in place": (
        at_linear("insert_before_op", lambda weight: weight.mul_(2), inputs=["weight"]),
        "wrote into value 0 that it was given; return a new value instead",
    ),
    "a wrong name of an input": (
        at_linear("insert_before_op", lambda weight: weight, inputs=["wieght"]),
        "was asked for 'wieght'; it has 3 values (input, weight, bias); did you mean 'weight'?",
    ),
    "a wrong position of an input": (
        at_linear("insert_before_op", lambda weight: weight, inputs=[7]),
        "was asked for 7; it has 3 values (input, weight, bias)",
    ),
    "a misspelt option": (
        at_linear("insert_before_op", lambda weight: weight, input=["weight"]),
        "insert_before_op has no option 'input'; did you mean inputs=? (other keywords go to the routine)",
    ),
    "a misspelt option that the routine would take": (
        at_linear("insert_before_op", lambda *values, **kwargs: None, input=["weight"]),
        "insert_before_op has no option 'input'; did you mean inputs=?",
    ),
    "an option of another action": (
        at_linear("insert_after_op", lambda *values, **kwargs: None, inputs=["weight"]),
        "insert_after_op has no option 'inputs'; did you mean outputs=?",
    ),
    "a wrong position of a gradient": (
        at_linear_backward("insert_after_backward_op", lambda g: g, grad_inputs=[5]),
        "selects [5]; AddmmBackward0 has 3 values here",
    ),
    "a wrong position of a single gradient": (
        at_linear_backward("insert_before_backward_op", lambda g: g, grad_outputs=[5]),
        "selects [5]; AddmmBackward0 has 1 value here",
    ),
    "a name of a gradient": (
        at_linear_backward("insert_after_backward_op", lambda g: g, grad_inputs=["weight"]),
        "was asked for 'weight'; values here have positions, as 0 for the first, and no names",
    ),
    "a name of a gradient that is known": (
        at_linear_backward("insert_after_backward_op", lambda g: g, after=True, grad_inputs=["weight"]),
        "values here have positions, as 0 for the first, and no names, and it has 3 values here",
    ),
    "a backward action in a forward routine": (
        at_linear("insert_before_backward_op", lambda g: g),
        "call it in a callback registered with add_inst_for_op(callback, backward=True)",
    ),
    "an action before an op that has run": (
        lambda: run(analysing(lambda c: c.insert_before_op(lambda *x: None), require_outputs=True)),
        "when the op had run; call it in a callback registered with require_outputs=False",
    ),
    "an action after analysis": (
        lambda: kept_context().insert_before_op(lambda *inputs: None),
        "was called outside an analysis routine; actions are recorded while the callback",
    ),
    "values after analysis": (
        lambda: kept_context().get_inputs(),
        "are gone: forward values are kept for the analysis of the first execution; keep what you need",
    ),
    "no StandardMapping": (
        lambda: run(analysing(lambda context: context["type"])),
        "StandardMapping writes it: self.depends_on(StandardMapping()) in Tool",
    ),
    "a misspelt key": (
        lambda: run(analysing(lambda context: (context.update(mask=1), context["maks"]))),
        "reads 'maks' of a context that has no such key",
    ),
    "a class": (lambda: run(FlopsTool), "not the class FlopsTool; give an instance: FlopsTool()"),
    "a class to depend on": (
        lambda: amanda.Tool().depends_on(StandardMapping),  # type: ignore[arg-type]
        "which is not a Tool; give an instance: StandardMapping()",
    ),
    "a list of tools": (lambda: run([FlopsTool()]), "give them one by one: apply(*tools)"),
    "a function": (lambda: run(lambda context: None), "tool = amanda.Tool(); tool.add_inst_for_op(function)"),
    "a model": (lambda: run(torch.nn.ReLU()), "not ReLU(); give instances of amanda.Tool"),
    "nothing": (lambda: run(None), "give instances of amanda.Tool, such as amanda.load_tool('flops')"),
    "a routine that was called": (
        Called, "is None; give the routine without calling it: add_inst_for_op(self.analyse)",
    ),
    "an analysis routine without a context": (
        WithoutContext, "cannot be called with that; write def analyse(self, context)",
    ),
    "two replacements": (
        on_replacement(lambda x: x, lambda x: x), "one op has one replacement: apply one of the two",
    ),
    "a circle": (circle, "tools depend on each other in a circle: Tool -> Tool -> Tool; drop one depends_on"),
    "a scope opened twice": (opened_twice, "this scope is open already; amanda.apply(...) makes another"),
    "a scope that is not open": (
        lambda: amanda.apply(FlopsTool()).stop(), "start() or a with statement opens it",
    ),
    "a word for compiled code": (
        lambda: amanda.apply(FlopsTool(), compiled="graph"),  # type: ignore[arg-type]
        "apply: compiled is 'graph'; give 'eager' or 'instrument'",
    ),
    "a pickled tool": (
        lambda: pickle.dumps(applied(PruneTool)),
        "make another PruneTool, and other.load_state_dict(tool.state_dict())",
    ),
    "a copied tool": (lambda: copy.deepcopy(applied(PruneTool)), "cannot be pickled or copied"),
    "an unknown tool": (lambda: amanda.load_tool("flop"), "did you mean flops?"),
    "an unknown option": (
        lambda: amanda.load_tool("prune", sparsty=0.5), "did you mean sparsity? its options are ",
    ),
    "an option out of range": (lambda: PruneTool(sparsity=50), "sparsity is 50; give a number from 0 to 1"),
    "an unknown phase": (
        lambda: select(FlopsTool(), phase="forwards"),  # type: ignore[arg-type]
        "give one of 'forward', 'backward', 'optimizer', 'construction'",
    ),
    "a namespace as a string": (
        lambda: run(analysing(lambda context: context.namespace == "pytorch/2.13.0")),
        'matches("pytorch/2.13.0") says whether',
    ),
    "an unknown package": (
        lambda: importlib.import_module("amanda.tools").flosp, "did you mean flops?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_what_to_write(name: str) -> None:
    mistake, part = MISTAKES[name]
    with pytest.raises((amanda.AmandaError, AttributeError)) as raised:
        mistake()
    assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def started_before() -> Any:
    """Run a model on a thread that began before the scope."""
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        torch.relu(torch.ones(2))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with amanda.apply(FlopsTool()) as scope:
        go.set()
        done.wait()
    thread.join()
    return scope


def of_a_namespace() -> Any:
    tool = amanda.Tool("torch")
    tool.add_inst_for_op(lambda context: None)
    return run(tool)


def compiled() -> Any:
    model = torch.compile(nn.Linear(4, 2), backend="eager")
    with amanda.apply(FlopsTool()) as scope:
        model(torch.rand(3, 4))
    return scope


SILENT: dict[str, tuple[Callable[[], Any], str]] = {
    "no op of a type": (
        lambda: run(select(FlopsTool(), type="lineal")), "selected by type=lineal; did you mean linear",
    ),
    "no op of a module": (
        lambda: run(select(FlopsTool(), module="encoder")), "by module=encoder; there were 0, 1, 2",
    ),
    "another framework": (of_a_namespace, "no op is of the namespace torch; there were ops of pytorch/"),
    "a thread from before": (started_before, "scope.bind(function) brings the scope along"),
    "compiled code": (compiled, 'compiled="instrument" (Python) puts tools into the compiled code'),
}  # fmt: skip


@pytest.mark.parametrize("name", SILENT)
def test_the_report_tells_what_tools_did_not_see(name: str) -> None:
    mistake, part = SILENT[name]
    assert part in str(mistake().report)


def test_a_routine_has_a_parameter_named_like_an_option() -> None:
    seen: list[object] = []

    def see(weight: object, input: object) -> None:
        seen.append(input)

    at_linear("insert_before_op", see, inputs=["weight"], input="keyword")()
    assert seen == ["keyword", "keyword"]


@pytest.mark.parametrize("kind", [FlopsTool, StatsTool, TraceTool, ProfileTool])
def test_a_scope_that_was_never_entered_is_told(kind: Any) -> None:
    tool = kind()
    amanda.apply(tool)
    torch.relu(torch.ones(2))
    reason = "Nothing was recorded: no scope of this tool was entered"
    assert f"{reason}; run the model in `with amanda.apply(tool):`." in str(tool.result)
    assert reason in repr(tool)
    assert "No op that this tool selects" not in str(tool.result)


@pytest.mark.parametrize("kind", [FlopsTool, StatsTool, TraceTool, ProfileTool])
def test_a_scope_in_which_nothing_ran_is_told(kind: Any) -> None:
    tool = select(kind(), type="conv2d")
    run(tool)
    told = "No op that this tool selects ran in its scope; `scope.report` names patterns that matched no op."
    assert told in str(tool.result)
