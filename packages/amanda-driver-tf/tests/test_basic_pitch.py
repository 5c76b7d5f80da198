"""A trained model that a package ships as a SavedModel: counted, dumped and pruned, as it is on disk."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.python.framework import op_def_registry
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from unfused import unfused

import amanda

Outputs = dict[str, NDArray[np.float32]]
Call = Callable[[Any, Any], Outputs]

pytestmark = pytest.mark.filterwarnings("ignore")  # what an old SavedModel makes TensorFlow warn of


def load() -> Any:
    """The transcription network of basic-pitch (Spotify, 2022); the package itself is not imported."""
    package = importlib.util.find_spec("basic_pitch")
    assert package is not None
    (folder,) = package.submodule_search_locations or ()
    return tf.saved_model.load(str(Path(folder, "saved_models", "icassp_2022", "nmp")))


@pytest.fixture(scope="module")
def model() -> Any:
    return load()


@pytest.fixture(scope="module")
def audio() -> Any:
    """Two seconds of two notes, as the network takes them."""
    time = np.arange(43844) / 22050
    return tf.constant((np.sin(2764 * time) + np.sin(4140 * time)).astype(np.float32)[None, :, None])


@pytest.fixture(autouse=True)
def _without_fusion() -> Iterator[None]:
    """No operators folded or fused, so that a copy of the graph computes the same, to the bit."""
    with unfused():
        yield


def by_signature(model: Any, audio: Any) -> Outputs:
    return {name: value.numpy() for name, value in model.signatures["serving_default"](audio).items()}


def by_call(model: Any, audio: Any) -> Outputs:
    return {name: value.numpy() for name, value in model(audio).items()}


CALLS = {"signature": by_signature, "call": by_call}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


def assert_same(outputs: Outputs, expected: Outputs) -> None:
    assert set(outputs) == set(expected) == {"contour", "note", "onset"}
    for name, value in outputs.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


class Passing(amanda.Tool):
    """A routine before and one after every op; they return nothing, or what they were given."""

    def __init__(self, returning: bool) -> None:
        self.returning, self.calls = returning, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_before_op(self.routine)
        context.insert_after_op(self.routine)

    def routine(self, *values: Any) -> Any:
        self.calls += 1
        return values if self.returning else None


@pytest.mark.parametrize("returning", [False, True])
@pytest.mark.parametrize("loaded", ["before", "within"])
def test_outputs_are_the_same_under_a_tool_that_changes_nothing(
    model: Any, audio: Any, call: Call, loaded: str, returning: bool
) -> None:
    bare = call(model, audio)
    tool = Passing(returning)
    with amanda.apply(tool):
        there = load() if loaded == "within" else model
        before = tool.calls
        assert_same(call(there, audio), bare)
        once = tool.calls - before
        assert_same(call(there, audio), bare)
    assert once > 0
    assert tool.calls == before + 2 * once
    assert_same(call(there, audio), bare)
    assert tool.calls == before + 2 * once


class Counting(amanda.Tool):
    """Counts ops that were analysed and their executions, by type."""

    def __init__(self) -> None:
        self.analysed: Counter[str] = Counter()
        self.executed: Counter[str] = Counter()
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        self.analysed[context.get_op().type] += 1
        context.insert_after_op(self.count, outputs=[], type=context.get_op().type)

    def count(self, type: str) -> None:
        self.executed[type] += 1


@pytest.mark.parametrize("loaded", ["before", "within"])
def test_every_op_is_counted(model: Any, audio: Any, loaded: str) -> None:
    tool = Counting()
    with amanda.apply(tool):
        there = load() if loaded == "within" else model
        tool.analysed.clear()
        tool.executed.clear()
        by_signature(there, audio)
    expected = node_types(there.signatures["serving_default"].function_def.signature.name)
    assert expected["Conv2D"] == 32
    assert sum(expected.values()) > 600
    assert without_calls(tool.analysed) == without_calls(expected)
    assert without_calls(tool.executed) == without_calls(expected)


CALL_OPS = ("PartitionedCall", "StatefulPartitionedCall")


def without_calls(types: Counter[str]) -> Counter[str]:
    """Nodes that compute, without those that call a function whose nodes are counted."""
    return Counter({name: count for name, count in types.items() if name not in CALL_OPS})


def node_types(function: str) -> Counter[str]:
    """Types of the nodes that a call of a function executes, by its FunctionDef and those that it calls."""
    from tensorflow.python.eager import context

    definition = context.context().get_function_def(function)
    nodes = {node.name: node for node in definition.node_def}
    pending = [*definition.ret.values(), *definition.control_ret.values()]
    pending += [name for name, node in nodes.items() if op_def_registry.get(node.op).is_stateful]
    reached: set[str] = set()
    while pending:
        name = pending.pop().lstrip("^").split(":")[0]
        if name in nodes and name not in reached:
            reached.add(name)
            pending.extend(nodes[name].input)
    types: Counter[str] = Counter()
    for name in reached:
        types[nodes[name].op] += 1
        for attribute in nodes[name].attr.values():
            if attribute.HasField("func"):
                types += node_types(attribute.func.name)
    return types


class Dumping(amanda.Tool):
    """Keeps every floating output of every op by the op's name."""

    def __init__(self) -> None:
        self.activations: dict[str, NDArray[Any]] = {}
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        context.insert_after_op(self.dump, name=context.get_op().name)

    def dump(self, *outputs: Any, name: str) -> None:
        for number, value in enumerate(tf.nest.flatten(outputs)):
            if value.dtype.is_floating:
                self.activations[f"{name}:{number}"] = value.numpy()


RESERVED = tuple(f"FusedBatchNormV3:{output}" for output in (3, 4, 5))
"""Outputs that only a gradient reads; where a graph has none, TensorFlow leaves in them what memory held."""


def test_activations_are_those_of_an_independent_run(model: Any, audio: Any) -> None:
    tool = Dumping()
    with amanda.apply(tool):
        by_signature(model, audio)
    independent = all_activations(model, audio)
    compared: Counter[str] = Counter()
    for name, (type, value) in independent.items():
        mine = [activation for key, activation in tool.activations.items() if name.endswith(key)]
        if mine and not name.endswith(RESERVED):
            np.testing.assert_array_equal(mine[0], value, err_msg=name)
            compared[type] += 1
    assert compared["Conv2D"] == 32
    assert compared["Relu"] == 3
    assert compared["Sigmoid"] == 3
    assert sum(compared.values()) > 200


def all_activations(model: Any, audio: Any) -> dict[str, tuple[str, NDArray[Any]]]:
    """Type and value of every floating tensor, from a frozen copy of the graph in a session of its own."""
    frozen = convert_variables_to_constants_v2(model.signatures["serving_default"], lower_control_flow=False)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(frozen.graph.as_graph_def(), name="")
    (audio_input,) = (op.outputs[0] for op in graph.get_operations() if op.type == "Placeholder")
    tensors = [value for op in graph.get_operations() for value in op.outputs if value.dtype.is_floating]
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        values = session.run(tensors, {audio_input: audio.numpy()})
    return {tensor.name: (tensor.op.type, value) for tensor, value in zip(tensors, values, strict=True)}


KERNEL = "conv2d_2/kernel:0"


class PruningOne(amanda.Tool):
    """Drops the smaller half of one convolution's weight, which it knows by its values."""

    def __init__(self, weight: NDArray[np.float32]) -> None:
        self.weight, self.pruned = weight, 0
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if context.get_op().type == "Conv2D" and np.array_equal(context.get_value(1), self.weight):
            self.pruned += 1
            context.insert_before_op(self.prune, inputs=[1], mask=mask_of(self.weight))

    def prune(self, weight: Any, mask: NDArray[np.float32]) -> Any:
        return weight * mask


def mask_of(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 where a magnitude is above the median."""
    return (np.abs(weight) > np.median(np.abs(weight))).astype(np.float32)


@pytest.mark.parametrize("loaded", ["before", "within"])
def test_a_pruned_weight_is_as_one_pruned_by_hand(model: Any, audio: Any, call: Call, loaded: str) -> None:
    bare = call(model, audio)
    (variable,) = (candidate for candidate in model.variables if candidate.name == KERNEL)
    tool = PruningOne(variable.numpy())
    scope: AbstractContextManager[Any] = amanda.apply(tool)
    with scope if loaded == "within" else nullcontext():
        there = load() if loaded == "within" else model
        with nullcontext() if loaded == "within" else scope:
            pruned = call(there, audio)
    assert tool.pruned == 1
    before = variable.numpy()
    np.testing.assert_array_equal(before, tool.weight)
    variable.assign(before * mask_of(before))
    by_hand = call(model, audio)
    variable.assign(before)
    assert_same(pruned, by_hand)
    assert any(not np.array_equal(pruned[name], bare[name]) for name in bare)
    assert_same(call(there, audio), bare)
