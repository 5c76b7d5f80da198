"""The operation that `get_op` gives: attributes of the graph's one, copies, and pickles."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow._operation import TensorFlowOperation


@pytest.fixture
def operations() -> dict[str, TensorFlowOperation]:
    """Operations by mode: one of a function's graph, which is gone, and one of eager mode."""
    operations_by_mode: dict[str, TensorFlowOperation] = {}
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        if context.get_op_type() == "Relu":
            operations_by_mode[context.namespace[-1]] = context.get_op()

    tool.add_inst_for_op(analyse)
    with amanda.apply(tool):
        tf.function(tf.nn.relu)(tf.ones(2))
        tf.nn.relu(tf.ones(2))
    gc.collect()
    return operations_by_mode


def test_an_operation_of_a_living_graph_has_the_attributes_of_tensorflow() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2])
        node = tf.nn.relu(x).op
        operation = TensorFlowOperation("Relu", node.name, node)
        assert operation.inputs[0].name == x.name
        assert operation.node_def.op == "Relu"
        assert not hasattr(operation, "no_such_attribute")
        assert not hasattr(operation, "_c_op")
        for duplicate in (copy.copy(operation), copy.deepcopy(operation)):
            assert duplicate == operation
            assert duplicate.graph_op is node


def test_an_operation_without_a_graph_is_copied_and_pickled(
    operations: dict[str, TensorFlowOperation],
) -> None:
    eager = operations["eager"]
    for duplicate in (copy.copy(eager), copy.deepcopy(eager), pickle.loads(pickle.dumps(eager))):
        assert duplicate == eager
        assert (duplicate.type, duplicate.name, duplicate.graph_op) == ("Relu", "Relu", None)
    assert len(operations) == 2
    for operation in operations.values():
        assert copy.copy(operation) == operation
    with pytest.raises(AttributeError, match=r"<Relu> has no 'inputs'; a tf\.Operation has"):
        _ = eager.inputs


def test_an_operation_that_is_not_made_yet_lacks_its_attributes() -> None:
    empty = TensorFlowOperation.__new__(TensorFlowOperation)
    with pytest.raises(AttributeError):
        _ = empty.type
    with pytest.raises(AttributeError):
        _ = empty.graph_op
