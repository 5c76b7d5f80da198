"""Which ops are seen in eager mode, and what is seen of them."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import amanda


def test_python_numbers_and_lists_are_given_as_tensors(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_inputs())
    x = tf.constant([1.0, 2.0])
    with amanda.apply(tool):
        x + 1.0
        tf.raw_ops.AddV2(x=x, y=[3.0, 4.0])
        tf.raw_ops.Reshape(tensor=x, shape=[2, 1])
    flat = [value for inputs in tool.answers["AddV2"] + tool.answers["Reshape"] for value in inputs]
    assert all(isinstance(value, tf.Tensor) for value in flat)
    assert tool.answers["AddV2"][1][1].numpy().tolist() == [3.0, 4.0]


def test_a_list_of_tensors_is_one_input(contexts: Any) -> None:
    tool = contexts(lambda context: [type(value) for value in context.get_inputs()])
    x = tf.constant([1.0, 2.0])
    with amanda.apply(tool):
        tf.concat([x, x, x], 0)
        tf.raw_ops.AddN(inputs=[x, x])
        tf.raw_ops.ConcatV2(values=[x, x], axis=tf.constant(0))
    assert [len(value) for value in tool.answers["ConcatV2"]] == [2, 2]
    assert all(value[0] is list for value in tool.answers["ConcatV2"] + tool.answers["AddN"])


def test_a_variable_is_read_once_where_an_op_is_given_it(ops: Any) -> None:
    weight = tf.Variable([1.0, 2.0])
    with amanda.apply(ops):
        tf.concat([weight, tf.ones(2)], 0)
        tf.nn.relu(weight)
    assert [type for type in ops.forward if type in ("ReadVariableOp", "Identity")] == ["ReadVariableOp"] * 2


def test_a_variable_in_a_list_has_the_gradient_of_no_scope_to_the_bit() -> None:
    weight = tf.Variable([[0.1, 0.7, 1.3], [0.2, 0.8, 1.4]])

    def gradient() -> list[list[float]]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.concat([weight, weight * 2, weight], 0) ** 2)
        return tape.gradient(loss, weight).numpy().tolist()

    vanilla = gradient()
    with amanda.apply(amanda.Tool()):
        assert gradient() == vanilla


def test_a_list_of_tensors_is_one_output(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_outputs())
    x = tf.constant([1.0, 2.0])
    with amanda.apply(tool):
        for result in (
            tf.split(x, 2),
            tf.unstack(x),
            tf.raw_ops.Split(axis=tf.constant(0), value=x, num_split=2),
        ):
            assert len(result) == 2
    for outputs in tool.answers["Split"] + tool.answers["Unpack"]:
        assert len(outputs) == 1
        assert len(outputs[0]) == 2


def test_several_outputs_keep_the_form_that_the_op_gives(contexts: Any, acting: Any) -> None:
    tool = contexts(lambda context: len(context.get_outputs()))
    double = acting("insert_after_op", "Unique", lambda y, index: (y * 2, index))
    with amanda.apply(tool, double):
        outputs = tf.unique(tf.constant([3.0, 3.0, 4.0]))
    assert type(outputs).__name__ == "Unique"
    assert outputs.y.numpy().tolist() == [6.0, 8.0]
    assert tool.answers["Unique"] == [2]


def test_attributes_are_known_by_name(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_attrs())
    x, w = tf.ones([1, 4, 4, 1]), tf.ones([2, 2, 1, 1])
    with amanda.apply(tool):
        tf.nn.conv2d(x, w, strides=2, padding="SAME")
        tf.concat([x, x], 0)
        tf.raw_ops.ConcatV2(values=[x, x], axis=tf.constant(0))
    (conv,) = tool.answers["Conv2D"]
    assert conv["strides"] == [1, 2, 2, 1]
    assert conv["padding"] == "SAME"
    assert conv["data_format"] == "NHWC"
    assert conv["T"] == tf.float32
    assert [attributes["N"] for attributes in tool.answers["ConcatV2"]] == [2, 2]
    assert all(tf.as_dtype(attributes["T"]) == tf.float32 for attributes in tool.answers["ConcatV2"])


def test_inputs_are_selected_by_name(acting: Any) -> None:
    x = tf.ones([1, 2, 2, 1])
    change = acting("insert_before_op", "Conv2D", lambda filter: filter * 3, inputs=["filter"])
    with amanda.apply(change):
        result = tf.nn.conv2d(x, tf.ones([1, 1, 1, 1]), 1, "SAME")
    assert result.numpy().flatten().tolist() == [3.0] * 4


def test_reads_and_assignments_of_variables_are_ops(ops: Any) -> None:
    v = tf.Variable([1.0, 2.0])
    with amanda.apply(ops):
        x = v * 2.0
        v.assign(x)
        v.assign_add(x)
        v.scatter_sub(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0])))
        v[0].assign(3.0)
    expected = ["ReadVariableOp", "AssignVariableOp", "AssignAddVariableOp", "ResourceScatterSub"]
    assert [type for type in ops.forward if type in expected][:4] == expected
    assert "ResourceStridedSliceAssign" in ops.forward
    assert v.numpy().tolist() == [3.0, 8.0]


def test_what_is_assigned_can_be_changed(acting: Any) -> None:
    v = tf.Variable([1.0, 2.0])
    with amanda.apply(acting("insert_before_op", "AssignVariableOp", lambda x: x * 10, inputs=["value"])):
        v.assign([3.0, 4.0])
    assert v.numpy().tolist() == [30.0, 40.0]


def test_the_op_is_told_by_type(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_op())
    with amanda.apply(tool):
        tf.nn.relu(tf.constant([1.0]))
    (op,) = tool.answers["Relu"]
    assert (op.type, op.name, op.__name__, op.graph_op) == ("Relu", "Relu", "Relu", None)


def test_outside_of_layers_the_scope_is_the_name_scope(contexts: Any) -> None:
    tool = contexts(lambda context: (context.get_scope(), context.get_source()))
    with amanda.apply(tool), tf.name_scope("encoder"), tf.name_scope("block"):
        tf.nn.relu(tf.constant([1.0]))
    ((scope, source),) = tool.answers["Relu"]
    assert scope == "encoder/block"
    assert source.rpartition(":")[0] == __file__


def test_a_function_is_no_eager_op(ops: Any) -> None:
    x = tf.constant([1.0])

    @tf.function
    def plain(x: Any) -> Any:
        return tf.nn.relu(x)

    plain(x)
    eager = amanda.Tool()
    namespaces: list[str] = []
    eager.add_inst_for_op(lambda context: namespaces.append(str(context.namespace)))
    with amanda.apply(eager):
        plain(x)
    assert not any(namespace.endswith("/eager") for namespace in namespaces)


def test_ops_of_a_python_function_in_an_op_are_seen(ops: Any) -> None:
    with amanda.apply(ops):
        tf.py_function(lambda x: tf.nn.relu(x), [tf.constant([1.0])], tf.float32)
    assert ops.forward[:1] == ["EagerPyFunc"]


def test_random_ops_give_what_they_gave(ops: Any) -> None:
    def numbers() -> list[Any]:
        tf.random.set_seed(3)
        generator = tf.random.Generator.from_seed(5)
        return [
            tf.random.normal([2]).numpy().tolist(),
            tf.random.uniform([2]).numpy().tolist(),
            generator.normal([2]).numpy().tolist(),
            tf.nn.dropout(tf.ones([8]), 0.5).numpy().tolist(),
        ]

    plain = numbers()
    with amanda.apply(ops):
        assert numbers() == plain
    assert numbers() == plain


DATASETS = "the functions of datasets (tf.data)"


@pytest.mark.parametrize("iterator_before", [True, False])
def test_the_functions_of_a_dataset_that_was_built_before_the_scope_are_reported(
    ops: Any, iterator_before: bool
) -> None:
    mapped = tf.data.Dataset.range(3).map(tf.square).batch(2)
    plain = tf.data.Dataset.range(3).batch(2)
    iterators = [iter(mapped), iter(plain)]
    with amanda.apply(ops) as scope:
        next(iterators[1])
        next(iter(plain))
        assert not scope.report
        next(iterators[0] if iterator_before else iter(mapped))
    assert [entry.what for entry in scope.report] == [DATASETS]


def test_the_functions_of_datasets_that_are_built_in_the_scope_are_reported_once(ops: Any) -> None:
    with amanda.apply(ops) as scope:
        dataset = tf.data.Dataset.range(3).map(tf.square).filter(lambda x: x < 9)
        assert [int(element) for element in dataset] == [0, 1, 4]
    assert [entry.what for entry in scope.report] == [DATASETS]


def test_fits_in_a_scope_log_their_datasets_once(caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((4, 2), np.float32)
    with amanda.apply(amanda.Tool()) as scope:
        for _ in range(2):
            model.fit(x, x[:, :1], verbose=0)
    assert [entry.what for entry in scope.report] == [DATASETS]
    (message,) = (record.getMessage() for record in caplog.records if record.name == "amanda")
    assert DATASETS in message


def test_an_op_names_the_device_of_its_tensors(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_device())
    x = tf.constant([1.0, 2.0])
    with amanda.apply(tool):
        tf.nn.relu(x)
    assert tool.answers["Relu"] == [x.device]
