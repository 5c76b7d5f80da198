"""After the last scope TensorFlow is what it was."""

import gc
import sys
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute, forwardprop, imperative_grad, record
from tensorflow.python.ops import custom_gradient

import amanda
from amanda.drivers.tensorflow.eager import TensorFlowEagerDriver
from amanda.errors import DriverError

HOLDERS = (
    pywrap_tfe, backprop, execute, forwardprop, imperative_grad, record, custom_gradient, tf, tf.Module,
    keras.Layer, tf.Variable, tf.GradientTape,
)  # fmt: skip


class Doubling(tf.Module):
    """A module with a call. No Python number becomes a tensor: TensorFlow 2.16 leaks two objects for each."""

    def __call__(self, x: Any) -> Any:
        y = tf.nn.relu(x)
        return y + y


def visible() -> list[dict[str, Any]]:
    return [dict(vars(holder)) for holder in (*HOLDERS, Doubling)]


def differences(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    return [
        name
        for names_before, names_after in zip(before, after, strict=True)
        for name in {*names_before, *names_after}
        if names_before.get(name) is not names_after.get(name)
    ]


def train(x: tf.Variable, module: tf.Module | None = None) -> Any:
    with tf.GradientTape() as tape:
        y = tf.reduce_sum((module or Doubling())(x))
    return tape.gradient(y, x)


def test_every_attribute_is_put_back() -> None:
    x = tf.Variable([1.0, -2.0])
    train(x)
    with amanda.apply(amanda.Tool()):
        train(x)
    before = visible()
    with amanda.apply(amanda.Tool()):
        assert differences(before, visible()) != []
        train(x)
    assert differences(before, visible()) == []


@pytest.mark.parametrize("point", range(4))
def test_every_attribute_is_put_back_after_an_exception(point: int) -> None:
    def fail(_: Any) -> None:
        raise ZeroDivisionError

    x = tf.Variable([1.0, -2.0])
    tool = amanda.Tool()
    tool.add_inst_for_op(fail, backward=point > 1, require_outputs=point % 2 == 1)
    plain = train(x).numpy().tolist()
    before = visible()
    with pytest.raises(ZeroDivisionError), amanda.apply(tool):
        train(x)
    assert differences(before, visible()) == []
    assert train(x).numpy().tolist() == plain


@pytest.mark.parametrize("kind", [TypeError, ValueError, NotImplementedError, KeyError])
def test_exceptions_that_tensorflow_handles_itself_reach_the_user(kind: type[Exception]) -> None:
    def fail(*_: Any) -> None:
        raise kind("not enough bits")

    for where in ("insert_before_op", "insert_after_op", "replace_op"):
        tool = amanda.Tool()
        tool.add_inst_for_op(lambda context, where=where: getattr(context, where)(fail))
        x = tf.constant([1.0])
        for call in (
            lambda x=x: x + 1.0,
            lambda x=x: tf.nn.relu(x),
            lambda x=x: tf.raw_ops.AddV2(x=x, y=1.0),
        ):
            with amanda.apply(tool), pytest.raises(kind, match="not enough bits"):
                call()


def test_a_tape_from_a_scope_is_walked_after_it() -> None:
    x = tf.Variable([1.0, -2.0])
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_backward_op(lambda *_: None), backward=True)
    with amanda.apply(tool), tf.GradientTape() as tape:
        y = tf.reduce_sum(tf.nn.relu(x) * 2.0)
    assert tape.gradient(y, x).numpy().tolist() == [2.0, 0.0]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tensorflow.python.eager.execute"
    monkeypatch.setattr(TensorFlowEagerDriver, "private_names", (f"{module}:quick_execute", f"{module}:gone"))
    with pytest.raises(DriverError, match=r"lacks tensorflow\.python\.eager\.execute\.gone.*eager mode"):
        TensorFlowEagerDriver().check_private_names()


@pytest.mark.slow
@pytest.mark.parametrize("module", [Doubling(), None])
def test_many_scopes_keep_no_more_than_tensorflow_does(module: tf.Module | None) -> None:
    x = tf.Variable([1.0, -2.0])
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_before_op(lambda *_: None))
    tool.add_inst_for_op(lambda context: context.insert_before_backward_op(lambda *_: None), backward=True)

    def objects_left(*tools: amanda.Tool) -> int:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(200):
            with amanda.apply(*tools):
                train(x, module)
        gc.collect()
        return sys.getallocatedblocks() - before

    objects_left(tool)
    plain = objects_left()
    assert any(objects_left(tool) < plain + 400 for _ in range(3))  # other threads may make objects meanwhile
