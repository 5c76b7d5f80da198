"""Which session a node runs in, and when routines run."""

from __future__ import annotations

from onnx_models import node

from amanda.drivers.onnxruntime._graph_runner import ScheduledStep, schedule
from amanda.drivers.onnxruntime._items import ComputedNode, GraphItem, RoutineCall


def described(steps: list[ScheduledStep]) -> list[tuple[list[int], list[str], list[str], list[str]]]:
    """Slots, nodes, inputs and outputs of each step."""
    return [
        ([call.slot for call in step.calls], [item.name for item in step.nodes], step.inputs, step.outputs)
        for step in steps
    ]


def compute(name: str, inputs: str, output: str) -> ComputedNode:
    return ComputedNode(node("Sum", inputs, output, name))


def test_a_routine_that_gives_a_value_cuts_where_it_is_read() -> None:
    items: list[GraphItem] = [
        compute("a", "x w", "a"), RoutineCall(0, ["a"], ["b"], []), compute("c", "b w", "c"), compute("d",
        "x", "d"), compute("e", "c d", "e"),
    ]  # fmt: skip
    assert described(schedule(items, {"w"}, {"e"})) == [
        ([], ["a", "d"], ["x"], ["a", "d"]),
        ([0], ["c", "e"], ["b", "d"], ["e"]),
    ]


def test_branches_share_a_cut() -> None:
    items: list[GraphItem] = [
        compute("a", "x", "a"), RoutineCall(0, ["a"], ["b"], []), compute("c", "b", "c"),
        compute("d", "x", "d"), RoutineCall(1, ["d"], ["e"], []), compute("f", "e c", "f"),
    ]  # fmt: skip
    steps = schedule(items, (), {"f"})
    assert [[item.name for item in step.nodes] for step in steps] == [["a", "d"], ["c", "f"]]
    assert [call.slot for call in steps[1].calls] == [0, 1]


def test_routines_on_weights_and_inputs_run_before_the_first_session() -> None:
    items: list[GraphItem] = [RoutineCall(0, ["w"], ["v"], []), compute("a", "x v", "a")]
    assert described(schedule(items, {"w"}, {"a"})) == [([0], ["a"], ["x", "v"], ["a"])]


def test_an_observer_needs_no_cut_and_one_without_values_waits_for_its_op() -> None:
    items: list[GraphItem] = [
        compute("a", "x", "a"), RoutineCall(0, ["a"], [], []), RoutineCall(1, [], [], ["a"]), compute("b",
        "a", "b"), RoutineCall(2, ["b"], [], []),
    ]  # fmt: skip
    assert described(schedule(items, (), {"b"})) == [
        ([], ["a", "b"], ["x"], ["a", "b"]),
        ([0, 1, 2], [], [], []),
    ]


def test_what_observers_see_is_kept_within_a_budget() -> None:
    items: list[GraphItem] = []
    for i in range(6):
        items += [compute(str(i), f"v{i}", f"v{i + 1}"), RoutineCall(i, [f"v{i + 1}"], [], [])]
    steps = schedule(items, (), {"v6"}, lambda name: 10, budget=25)
    assert [len(step.nodes) for step in steps] == [3, 3, 0]
    assert steps[1].names_to_drop == ["v1", "v2", "v3"]


def test_values_are_let_go_of_after_the_step_that_reads_them_last() -> None:
    items: list[GraphItem] = [
        compute("a", "x", "a"), RoutineCall(0, ["a"], ["b"], []), compute("c", "b", "c"), RoutineCall(1,
        ["c"], ["d"], []), compute("e", "d a", "e"),
    ]  # fmt: skip
    steps = schedule(items, (), {"e"})
    assert [step.names_to_drop for step in steps] == [["x"], ["b"], ["a", "c", "d"]]
