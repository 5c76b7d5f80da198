"""The conformance suite on TensorFlow's sessions: calls of modules and of ops are runs of a session.

What a call computes is built once for the signature of its arguments, of placeholders. A call that can be
differentiated is a partial run: it stops where gradients enter, and `backward` feeds those. So forward and
backward pass are one execution, as they are in a train step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf

import amanda
from amanda.drivers.tensorflow.session import GraphDriver
from amanda.testing import DriverTests, Sample, never

tf1 = tf.compat.v1

NODES = never("an op is a node of a graph, however often it is run, and from wherever")
SYMBOLS = never("a graph is analysed before it runs, on symbols")
WHOLE = never("a run is one execution, of forward and backward pass alike, of the scope that it begins in")
GRAPH = never("a plan dies with the graph, which is the session's")

FIRST = [[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]]
SECOND = [[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]]


def fed(value: Any, leaf: bool = False, origin: tuple[Call, int] | None = None) -> Any:
    """A tensor that is fed or fetched.

    leaf: whether it gets a gradient.  origin: where it can be differentiated, the call that gave it and
    its position among what that gave.
    """
    tensor = tf.constant(value)
    tensor.leaf, tensor.origin, tensor.grad = leaf, origin, None
    return tensor


def is_fed(value: Any) -> bool:
    return hasattr(value, "origin")


class Program:
    """Nodes that compute a function of placeholders."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.inputs: list[Any] = []
        args, kwargs = tf.nest.map_structure(self._placeholder, (args, kwargs))
        self.form = function(*args, **kwargs)
        self.outputs = [] if self.form is None else tf.nest.flatten(self.form)

    def _placeholder(self, value: Any) -> Any:
        if not is_fed(value):
            return value
        self.inputs.append(tf1.placeholder(value.dtype, [None] * value.ndim))
        return self.inputs[-1]

    def feeds(self, inputs: Sequence[Any]) -> dict[Any, Any]:
        """What is fed for some inputs."""
        return {placeholder: value.numpy() for placeholder, value in zip(self.inputs, inputs, strict=True)}

    @cached_property
    def seeds(self) -> list[Any]:
        """Placeholders for the gradients that enter."""
        return [tf1.placeholder(output.dtype, output.shape) for output in self.outputs]

    @cached_property
    def gradients(self) -> dict[Any, Any]:
        """Gradients of the inputs, by their positions, and of the variables."""
        sources = dict(enumerate(self.inputs)) | {
            gradient.ref(): gradient for gradient in tf1.global_variables()
        }
        gradients = tf.gradients(self.outputs, list(sources.values()), self.seeds)
        return {
            key: gradient for key, gradient in zip(sources, gradients, strict=True) if gradient is not None
        }


class Call:
    """One execution of a program, up to where gradients enter."""

    def __init__(self, number: int, session: Any, program: Program, inputs: Sequence[Any]) -> None:
        self.number, self.inputs = number, inputs
        self._session, self._program = session, program
        fetches = [*program.outputs, *program.gradients.values()]
        self._handle = session.partial_run_setup(fetches, [*program.inputs, *program.seeds])
        self.outputs = session.partial_run(self._handle, program.outputs, program.feeds(inputs))

    def gradients(self, seeds: Sequence[Any]) -> dict[Any, Any]:
        """Gradients of the inputs, by their positions, and of the variables."""
        feeds = dict(zip(self._program.seeds, seeds, strict=True))
        values = self._session.partial_run(self._handle, list(self._program.gradients.values()), feeds)
        return dict(zip(self._program.gradients, values, strict=True))


class Module:
    """A run of a session where it is called with what is fed; elsewhere, a part of what is being built."""

    def __init__(self, sample: SessionSample, forward: Callable[..., Any]) -> None:
        self.sample, self.forward = sample, forward
        self.scope = ""
        self.programs: dict[Any, Program] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            value.scope = name
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(map(is_fed, tf.nest.flatten((args, kwargs)))):
            return self.sample.run(self, args, kwargs)
        with tf1.name_scope(self.scope) if self.scope else nullcontext():
            return self.forward(*args, **kwargs)


class Linear(Module):
    """A layer without bias."""

    def __init__(self, sample: SessionSample, weight: Sequence[Any]) -> None:
        super().__init__(sample, lambda x: tf.linalg.matmul(x, self.weight))
        self.weight = sample.parameter(weight)


class Network(Module):
    """Two layers and what is between them."""

    def __init__(self, sample: SessionSample) -> None:
        super().__init__(sample, lambda x: self.second(tf.nn.relu(self.first(x))))
        self.first = Linear(sample, FIRST)
        self.second = Linear(sample, SECOND)


class SessionSample(Sample):
    """TensorFlow's sessions: one graph and one session."""

    driver = GraphDriver
    op_names: ClassVar = {
        "linear": "MatMul", "relu": "Relu", "add": "AddV2", "cat": "ConcatV2", "pair": "Qr", "many": "MatMul",
    }  # fmt: skip
    dtypes = (tf.float64, tf.float32, tf.int64, tf.complex128)
    relu_backward = "ReluGrad"
    lasting_patches = ("consumers", "_control_outputs")
    differentiates = True

    linear = property(lambda self: self._op(tf.linalg.matmul))
    relu = property(lambda self: self._op(tf.nn.relu))
    add = property(lambda self: self._op(tf.add))
    cat = property(lambda self: self._op(lambda tensors: tf.concat(tensors, 0), "cat"))
    pair = property(lambda self: self._op(tf.linalg.qr))
    many = property(lambda self: self._op(tf.linalg.matmul))

    def __init__(self) -> None:
        self._ops: dict[Any, Module] = {}
        self._gradients: dict[Any, Any] = {}
        self._calls = 0
        self._graph = tf.Graph()
        self._session: Any = None
        self._making = threading.RLock()  # TensorFlow makes the ops of a graph on one thread at a time

    def _op(self, function: Callable[..., Any], key: Any = None) -> Callable[..., Any]:
        if not tf.executing_eagerly():
            return function
        return self._ops.setdefault(key or function, Module(self, function))

    def run(self, module: Module, args: Any, kwargs: Any) -> Any:
        """What the module gives for these arguments, from the session."""
        flat = tf.nest.flatten((args, kwargs))
        inputs = [value for value in flat if is_fed(value)]
        signature = tuple(
            (value.dtype, value.ndim) if is_fed(value) else value.ref() if hasattr(value, "ref") else value
            for value in flat
        )
        with self._graph.as_default():
            with self._making:
                program = module.programs.get(signature)
                if program is None:
                    program = module.programs[signature] = Program(module.forward, args, kwargs)
                session = self.session
            if self._is_differentiated(program, inputs):
                self._calls += 1
                with self._closed_after_failure():
                    call = Call(self._calls, self.session, program, inputs)
                outputs = call.outputs
            else:
                call = None
                outputs = session.run(program.outputs, program.feeds(inputs))
        values = [fed(output, origin=call and (call, position)) for position, output in enumerate(outputs)]
        return tf.nest.pack_sequence_as(program.form, values) if values else None

    def _is_differentiated(self, program: Program, inputs: Sequence[Any]) -> bool:
        if not self.differentiates or not all(value.dtype.is_floating for value in program.outputs):
            return False
        if any(value.leaf or value.origin for value in inputs):
            return True
        return bool(tf1.global_variables()) and any(not isinstance(key, int) for key in program.gradients)

    @property
    def session(self) -> Any:
        """The session; a new one after a partial run has failed, which cancels all that a session does."""
        if self._session is None:
            self._session = tf1.Session(graph=self._graph)
            with self._graph.as_default(), amanda.disabled():
                self._session.run(tf1.global_variables_initializer())
        return self._session

    def close(self) -> None:
        """Close the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextmanager
    def _closed_after_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        return fed(np.array(values, (dtype or tf.float64).as_numpy_dtype), requires_grad)

    def parameter(self, values: Sequence[Any]) -> Any:
        with self._graph.as_default():
            variable = tf1.Variable(values, dtype=tf.float64, use_resource=True)
        self.session.run(variable.initializer)
        return variable

    def bits(self, tensor: Any) -> bytes:
        return self._value(tensor).tobytes()

    def numbers(self, tensor: Any) -> list[Any]:
        return list(self._value(tensor).flatten().tolist())

    def _value(self, tensor: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.session.run(tensor) if isinstance(tensor, tf.Variable) else tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tf.cast(tensor, dtype)

    def gradient(self, tensor: Any) -> Any:
        return tensor.grad if is_fed(tensor) else self._gradients.get(tensor.ref())

    def backward(self, tensor: Any) -> None:
        seeds: dict[Call, list[Any]] = {}
        self._arrive(tensor, np.ones_like(tensor.numpy()), seeds)
        while seeds:
            call = max(seeds, key=lambda call: call.number)
            with self._closed_after_failure():
                gradients = call.gradients(seeds.pop(call))
            for source, gradient in gradients.items():
                if isinstance(source, int):
                    self._arrive(call.inputs[source], gradient, seeds)
                else:
                    self._gradients[source] = self._gradients.get(source, 0) + gradient

    @staticmethod
    def _arrive(tensor: Any, gradient: Any, seeds: dict[Call, list[Any]]) -> None:
        if tensor.leaf:
            tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        elif tensor.origin:
            call, position = tensor.origin
            seeds.setdefault(call, [np.zeros_like(output) for output in call.outputs])[position] += gradient

    def model(self) -> Any:
        return Network(self)

    def module(self, forward: Any) -> Any:
        return Module(self, forward)

    def checkpoint(self, function: Any, tensor: Any) -> Any:
        return self._op(tf.recompute_grad(function), function)(tensor)

    @cached_property
    def _server(self) -> Any:
        return tf.distribute.Server.create_local_server()

    def run_uninstrumentable_op(self) -> None:
        with self._graph.as_default(), tf1.Session(self._server.target) as session:
            session.run(tf.constant(1.0))


class TestGraphDriver(DriverTests):
    """The suite on TensorFlow, sessions."""

    lacks: ClassVar = {
        "auxiliary_state": "a batch normalization returns its statistics, and another op assigns them",
        "in_place": "tensors are immutable",
        "mutable_tensors": "tensors are immutable",
        "out": "no op of TensorFlow takes a tensor to write its result into",
        "leaves": "tf.gradients gives tensors, it stores none",
        "call_sites": "an op is a node of a graph, however often it is run, and from wherever",
        "values": "a graph is analysed before it runs, on symbols",
        "pickles": "the session holds a model's variables",
        "schema": "an op is given what is read of a variable, and the schema's names are its own",
        "numbers": "`numpy()` is no op",
        "fork": "a forked child of TensorFlow waits for threads that it does not have",
        "traceable_calls": "a traceable routine is called when it is traced",
        "batched_values": "tf.vectorized_map builds a graph",
        "grad": "TensorFlow has tapes and accumulators, no transforms of functions",
        "jvp": "TensorFlow has tapes and accumulators, no transforms of functions",
        "vmap": "tf.vectorized_map builds a graph",
    }
    gaps: ClassVar = {
        "test_a_value_handed_back_unchanged_adds_nothing": never("what a run gives is fetched anew"),
        "test_backward_routines_run_only_in_a_scope_with_their_tool": WHOLE,
        "test_of_several_tools_those_run_whose_scope_is_open_at_the_backward_pass": WHOLE,
        "test_the_routines_of_the_tools_that_are_open_run_in_each_backward_pass": WHOLE,
        "test_a_tool_that_decides_by_shape_is_asked_for_each": SYMBOLS,
        "test_a_plan_dies_with_its_model": GRAPH,
        "test_a_plan_dies_with_its_parameter": GRAPH,
        "test_ops_of_a_routine_are_not_instrumented": SYMBOLS,
        "test_one_call_site_over_several_weights_is_several_ops": NODES,
        "test_ops_computed_again_by_a_checkpoint_have_the_ids_of_the_first_run": NODES,
        "test_a_checkpoint_computes_the_same_executions_again": NODES,
    }

    def test_a_plan_dies_with_its_tool(self, sample: Sample) -> None:
        assert isinstance(sample, SessionSample)
        sample.differentiates = False  # a partial run holds what it runs until its second part
        super().test_a_plan_dies_with_its_tool(sample)

    @pytest.fixture
    def sample(self) -> Iterator[Sample]:
        sample = SessionSample()
        yield sample
        sample.close()
