"""The tools that these tests apply."""

from collections.abc import Callable
from typing import Any

import pytest
from suite_device import DEVICE

import amanda
from amanda import interceptor
from amanda.testing import Unchanged, never

# What the pure-Python interceptor does not see, by the name of the test that shows it.
TAKEN = "without native code a callable taken before the scope is not seen"
WRAPPED = "without native code what torch keeps in a closure of its own is not seen"
FRAMES = "without native code every call of a module takes a frame of the recursion limit"
POWERS = [f"[{n}-power{mode}]" for n in (1, 2) for mode in ("", " in a mode")]
TAKEN_EARLY = ("sort", "nn.functional.linear")
FALLBACK_GAPS = {
    "test_a_name_imported_before_the_scope_is_seen": TAKEN,
    "test_a_bound_method_taken_before_the_scope_is_seen": TAKEN,
    "test_an_operator_is_one_op[a ** 2]": WRAPPED,
    "test_an_augmented_assignment_is_one_op[ipow]": WRAPPED,
    "test_every_node_is_found_once_and_again_by_the_same_id[attention]": WRAPPED,
    "test_a_scope_takes_no_depth_from_a_model_whose_ops_are_known": FRAMES,
    **{f"test_all_that_calls_of_the_sample_compute_is_seen[{part}]": TAKEN for part in range(4)},
    **{f"test_a_tool_that_changes_values_is_found_and_no_other[{op}]": TAKEN for op in TAKEN_EARLY},
    "test_what_is_made_of_ops_computes_nothing_besides[__dlpack__]": TAKEN,
    "test_what_is_made_of_ops_computes_nothing_besides[lobpcg]": WRAPPED,
    **{
        f"test_a_type_error_of_a_routine_is_not_taken_for_a_wrong_operand{power}": WRAPPED for power in POWERS
    },
}


CUDA_GAPS = {
    "test_a_scope_does_not_follow_a_fork": "CUDA cannot be used in a fork of a process that has used it"
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect the gaps of the pure-Python interceptor where it is in force, and those of a GPU on one."""
    gaps = ({} if interceptor.NATIVE else FALLBACK_GAPS) | (CUDA_GAPS if DEVICE == "cuda" else {})
    for item in items:
        if item.name in gaps:
            item.add_marker(never(gaps[item.name]))


class Executed(amanda.Tool):
    """Names of the ops that execute, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.add_inst_for_op(self._watch)

    def _watch(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self._note, inputs=[], name=context.get_op().__name__)

    def _note(self, name: str) -> None:
        self.names.append(name)


class Acting(amanda.Tool):
    """One action at every op of one name, forward or backward."""

    def __init__(self, action: str, name: str, routine: Callable[..., Any], **options: Any) -> None:
        self.name, self.action, self.routine, self.options = name, action, routine, options
        self.backward = "backward" in action
        self.add_inst_for_op(self._record, backward=self.backward)

    def _record(self, context: amanda.OpContext) -> None:
        op = context.get_backward_op() if self.backward else context.get_op()
        if op.__name__ == self.name:
            getattr(context, self.action)(self.routine, **self.options)


class BackwardOps(amanda.Tool):
    """Pairs of forward op and backward op that were analysed, and the ids of the latter."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []
        self.ids: list[int | None] = []
        self.add_inst_for_op(self._note, backward=True)

    def _note(self, context: amanda.OpContext) -> None:
        self.pairs.append((context.get_op().__name__, context.get_backward_op().__name__))
        self.ids.append(context.get_backward_op_id())


def _ops_of(program: Callable[[], Any]) -> list[str]:
    tool = Executed()
    with amanda.apply(tool):
        program()
        first = tool.names.copy()
        program()
    assert tool.names == first * 2
    return first


def _applied(tool: amanda.Tool, program: Callable[[], Any], runs: int = 3) -> Any:
    with amanda.apply(tool):
        for _ in range(runs):
            result = program()
    return result


@pytest.fixture
def ops_of() -> Callable[[Callable[[], Any]], list[str]]:
    """Names of the ops that a program executes; it runs twice, analysed and from the cache."""
    return _ops_of


@pytest.fixture
def applied() -> Callable[..., Any]:
    """`applied(tool, program)`: the result of the last of three runs, so that cached plans run too."""
    return _applied


@pytest.fixture
def acting() -> type[Acting]:
    """`acting("insert_before_op", "relu", routine, inputs=[0])`: a tool with that action."""
    return Acting


@pytest.fixture
def backward_ops() -> type[BackwardOps]:
    """A tool that keeps the backward ops it analyses."""
    return BackwardOps


class Seen(amanda.Tool):
    """Ids and names of the ops that execute, in order."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.names: list[str] = []
        self.add_inst_for_op(self._see)

    def _see(self, context: amanda.OpContext) -> None:
        name = context.get_op().__name__
        context.insert_before_op(self._note, inputs=[], op_id=context.get_op_id(), name=name)

    def _note(self, op_id: int, name: str) -> None:
        self.ids.append(op_id)
        self.names.append(name)


@pytest.fixture
def op_log() -> Seen:
    """A tool that notes ids and names of the ops that execute."""
    return Seen()


@pytest.fixture(params=[amanda.Tool, Seen, Unchanged])
def harmless(request: pytest.FixtureRequest) -> amanda.Tool:
    """Tools that change nothing: an empty one, one that looks, one with routines at every point."""
    tool: amanda.Tool = request.param()
    return tool
