"""Modules and layers: paths, regions, and ids of the ops within."""

import sys
from typing import Any

import children
import keras
import pytest
import tensorflow as tf

import amanda


class Block(keras.Layer):
    """Two layers by attribute, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.more = [keras.layers.Dense(2), keras.layers.Dense(2)]

    def call(self, x: Any) -> Any:
        for layer in [self.dense, *self.more]:
            x = layer(x)
        return keras.ops.relu(x)


def _functional() -> Any:
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="stem")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.ReLU(name="act")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


@pytest.fixture
def scopes(contexts: Any) -> Any:
    """A tool that keeps the scopes of ops."""
    return contexts(lambda context: context.get_scope())


def test_the_scope_is_the_path_of_attributes(scopes: Any) -> None:
    block = Block()
    x = tf.ones([1, 2])
    block(x)
    with amanda.apply(scopes):
        block(x)
    assert scopes.answers["MatMul"] == ["dense", "more.0", "more.1"]
    assert scopes.answers["Relu"] == [""]


def test_layers_of_a_functional_model_go_by_their_names(scopes: Any) -> None:
    model = _functional()
    with amanda.apply(scopes):
        model(tf.ones([1, 8, 8, 3]))
    assert scopes.answers["Conv2D"] == ["stem"]
    assert scopes.answers["Relu"] == ["act"]
    assert scopes.answers["MatMul"] == ["head"]


def test_projections_of_an_attention_have_paths_of_their_own(scopes: Any) -> None:
    attention = keras.layers.MultiHeadAttention(2, 4)
    x = tf.ones([1, 3, 8])
    attention(x, x)
    with amanda.apply(scopes):
        attention(x, x)
    projections = ["_query_dense", "_key_dense", "_value_dense", "_output_dense"]
    assert set(projections) <= set(scopes.answers["BatchMatMulV2"] + scopes.answers["Einsum"])


def test_a_module_class_with_two_bases_is_patched_once(scopes: Any) -> None:
    class Scaled(tf.Module):
        pass

    class Shifted(tf.Module):
        pass

    class Both(Scaled, Shifted):
        def __call__(self, x: Any) -> Any:
            return tf.nn.relu(x)

    call, x = Both.__call__, tf.ones(2)
    with amanda.apply(scopes):
        assert Both.__call__.__wrapped__ is call  # type: ignore[attr-defined]
        Both()(x)
    assert Both.__call__ is call
    assert list(scopes.answers) == ["Relu"]


def test_modules_made_in_the_scope_are_regions_too(scopes: Any) -> None:
    with amanda.apply(scopes):

        class Inner(tf.Module):
            def __call__(self, x: Any) -> Any:
                return tf.nn.relu(x)

        class Outer(tf.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Inner()

            def __call__(self, x: Any) -> Any:
                return self.inner(x)

        Outer()(tf.ones([1]))
    assert scopes.answers["Relu"] == ["inner"]
    assert type(vars(Outer)["__call__"]).__name__ == "function"


def test_two_models_have_ops_of_their_own(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_op_id())
    first, second = Block(), Block()
    x = tf.ones([1, 2])
    first(x), second(x)
    with amanda.apply(tool):
        for model in (first, second, first, second):
            model(x)
    assert len(tool.answers["MatMul"]) == len(set(tool.answers["MatMul"])) == 6


def test_a_gradient_step_of_a_model_in_the_scope_is_what_it_was() -> None:
    def trained(tools: list[amanda.Tool]) -> list[bytes]:
        keras.utils.set_random_seed(7)
        model = _functional()
        optimizer = keras.optimizers.Adam(0.01)
        x, y = keras.random.normal((4, 8, 8, 3), seed=1), tf.constant([0, 1, 0, 1])
        with amanda.apply(*tools):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    logits = model(x, training=True)
                    loss = tf.reduce_mean(
                        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
                    )
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return [bytes(variable.numpy().tobytes()) for variable in model.variables]

    busy = amanda.Tool()
    busy.add_inst_for_op(lambda context: context.insert_before_op(lambda *values: values or None))
    busy.add_inst_for_op(lambda context: context.insert_after_op(lambda *values: values or None))
    busy.add_inst_for_op(
        lambda context: context.insert_before_backward_op(lambda *grads: grads or None), backward=True
    )
    plain = trained([])
    assert trained([amanda.Tool()]) == plain
    assert trained([busy]) == plain


def test_many_variables_at_one_place_are_many_ops(contexts: Any) -> None:
    tool = contexts(lambda context: context.get_op_id())
    variables = [tf.Variable(float(i)) for i in range(100)]
    with amanda.apply(tool):
        for variable in variables:
            variable.assign_add(1.0)
    assert len(set(tool.answers["AssignAddVariableOp"])) == 100


def test_variables_of_keras_tell_ops_apart(contexts: Any) -> None:
    tool = contexts(lambda context: (context.get_op_id(), context.get_parameters()))
    layers = [keras.layers.Dense(2) for _ in range(3)]
    x = tf.ones([1, 2])
    for layer in layers:
        layer(x)

    class Products(tf.Module):
        def __call__(self, order: list[Any]) -> None:
            for layer in order:
                tf.raw_ops.MatMul(a=x, b=layer.kernel)

    products = Products()
    with amanda.apply(tool), amanda.cache_disabled():
        products(layers)
        products(layers[::-1])
    ids = [op_id for op_id, _ in tool.answers["MatMul"]]
    assert ids[:3] == ids[3:][::-1]
    assert len(set(ids)) == 3
    assert {parameters for _, parameters in tool.answers["MatMul"]} == {(1,)}


@pytest.mark.slow
def test_models_of_tf_keras_have_paths_too() -> None:
    program = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import amanda, tensorflow as tf, tf_keras
model = tf_keras.Sequential([tf_keras.layers.Dense(2, name="one"), tf_keras.layers.Dense(2, name="two")])
model(tf.ones([1, 2]))
scopes = []
tool = amanda.Tool()
def see(context):
    if context.get_op().type == "MatMul":
        scopes.append(context.get_scope())
tool.add_inst_for_op(see)
with amanda.apply(tool):
    model(tf.ones([1, 2]))
print(scopes)
"""
    done = children.run([sys.executable, "-c", program])
    assert done.stdout.strip() == "['one', 'two']", done.stderr


class Gate(tf.Module):  # type: ignore[misc]
    """Control flow that AutoGraph makes operations of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable([[2.0]])

    def __call__(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 0:
            return x @ self.weight
        return x * 0.0


class Repeated(Gate):
    def __call__(self, x: Any) -> Any:
        y = super().__call__(x)
        for _ in tf.range(3):
            y = y + 1.0
        return y


class Unconverted(Gate):
    @tf.autograph.experimental.do_not_convert
    def __call__(self, x: Any) -> Any:
        if tf.reduce_sum(x) > 0:
            return x
        return -x


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize(("kind", "values"), [(Gate, (2.0, 0.0)), (Repeated, (5.0, 3.0))])
def test_autograph_converts_calls_of_modules_in_a_scope_and_after_it(
    scopes: Any, kind: Any, values: tuple[float, float], attached_first: bool
) -> None:
    with amanda.apply(scopes):
        module = kind() if attached_first else None
    module = module or kind()
    original = vars(kind)["__call__"]

    def calling(x: Any) -> Any:
        return module(x)

    for program in (module, calling):
        inside, outside = tf.function(program), tf.function(program)
        with amanda.apply(scopes):
            results = [inside(tf.constant([[x]])).numpy().item() for x in (1.0, -1.0)]
        assert tuple(results) == values
        assert tuple(outside(tf.constant([[x]])).numpy().item() for x in (1.0, -1.0)) == values
    assert vars(kind)["__call__"] is original


def test_autograph_leaves_a_call_that_is_not_to_be_converted(scopes: Any) -> None:
    module = Unconverted()
    with amanda.apply(scopes), pytest.raises(TypeError, match="Tensor"):
        tf.function(lambda x: module(x))(tf.ones([1, 1]))
