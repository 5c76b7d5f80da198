"""The conformance suite on ONNX Runtime: a call of a module or an op is a run of a session.

What a call computes is built once for the signature of its arguments. ONNX Runtime has no backward pass:
`backward` does nothing here, so that tests of forward and backward alike show what holds of the forward pass.
"""

from __future__ import annotations

import threading
import traceback
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from amanda.drivers.onnxruntime import OnnxRuntimeDriver, session_options
from amanda.testing import DriverTests, Sample, never

Pair = namedtuple("Pair", "values indices")

NODES = never("an op is a node of a graph, however often it is run, and from wherever")
SYMBOLS = never("a graph is analysed before it runs, on symbols")


class Parameter:
    """A weight: an initializer of the models that read it."""

    def __init__(self, values: Any) -> None:
        self.value = np.array(values, np.float64)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


class Value:
    """A value of a graph that is being built."""

    def __init__(self, graph: Building, name: str) -> None:
        self.graph, self.name = graph, name


class Building:
    """Nodes of a model that is being built."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.path: list[str] = []

    def name(self, value: Any) -> str:
        if isinstance(value, Value):
            return value.name
        array = value.value if isinstance(value, Parameter) else np.array(value, np.float64)
        self.weights[name := f"weight{len(self.weights)}"] = array
        return name

    def add(self, type: str, inputs: Sequence[Any], outputs: int = 1, **attributes: Any) -> Any:
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        label = "/".join(["", *self.path, f"{type}_{len(self.nodes)}"])
        input_names = [self.name(value) for value in inputs]
        node = helper.make_node(type, input_names, names, label, **attributes)
        lines = traceback.format_list(
            frame for frame in traceback.extract_stack() if frame.filename != __file__
        )
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="".join(lines))  # as torch.onnx does
        self.nodes.append(node)
        values = [Value(self, name) for name in names]
        return values[0] if outputs == 1 else Pair(*values)


class Program:
    """A session that computes a function of arrays."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any]) -> None:
        graph = Building()
        self.array_positions = [i for i, arg in enumerate(args) if isinstance(arg, (np.ndarray, list))]
        symbols, inputs = list(args), []
        for i in self.array_positions:
            arrays = args[i] if isinstance(args[i], list) else [args[i]]
            values = [Value(graph, f"x{i}_{k}") for k in range(len(arrays))]
            inputs += [
                helper.make_tensor_value_info(
                    value.name, helper.np_dtype_to_tensor_dtype(array.dtype), [None] * array.ndim
                )
                for value, array in zip(values, arrays, strict=True)
            ]
            symbols[i] = values if isinstance(args[i], list) else values[0]
        Module.building.append(graph)
        try:
            self.form = function(*symbols)
        finally:
            Module.building.pop()
        outputs = list(self.form) if isinstance(self.form, Pair) else [self.form]
        model = helper.make_model(
            helper.make_graph(
                graph.nodes, "graph", inputs, [onnx.ValueInfoProto(name=output.name) for output in outputs],
                [numpy_helper.from_array(value, name) for name, value in graph.weights.items()],
            ),
            opset_imports=[helper.make_opsetid("", 18)], ir_version=9,
        )  # fmt: skip
        self.names = [output.name for output in outputs]
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), session_options(), ["CPUExecutionProvider"]
        )

    def __call__(self, args: Sequence[Any]) -> Any:
        feed = {}
        for i in self.array_positions:
            arrays = args[i] if isinstance(args[i], list) else [args[i]]
            feed |= {f"x{i}_{k}": array for k, array in enumerate(arrays)}
        results = self.session.run(self.names, feed)
        return Pair(*results) if isinstance(self.form, Pair) else results[0]


class Module:
    """A run of a session where it is called with arrays; elsewhere, a part of what is being built."""

    building: ClassVar[list[Building]] = []
    making: ClassVar[Any] = threading.RLock()

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.scope = ""
        self.programs: dict[Any, Program] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            value.scope = name
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "programs": {}}

    def __call__(self, *args: Any) -> Any:
        if not any(isinstance(arg, (np.ndarray, list)) and not _is_symbolic(arg) for arg in args):
            path = self.building[-1].path
            path += [self.scope] * bool(self.scope)
            try:
                return self.forward(*args)
            finally:
                del path[len(path) - bool(self.scope) :]
        key = tuple(map(_signature, args))
        with self.making:  # threads may call it for the first time at once
            if key not in self.programs:
                self.programs[key] = Program(self.forward, args)
        return self.programs[key](args)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(element, Value) for element in value)


def _signature(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_signature, value))
    return (value.dtype.name, value.ndim) if isinstance(value, np.ndarray) else value


class Linear(Module):
    """A layer without bias."""

    def __init__(self, weight: Sequence[Any]) -> None:
        self.weight = Parameter(weight)
        super().__init__(self._product)

    def _product(self, x: Any) -> Any:
        return x.graph.add("MatMul", [x, self.weight])


class Network(Module):
    """Two layers and what is between them."""

    def __init__(self) -> None:
        super().__init__(self._layers)
        self.first = Linear([[0.5, 0.25, -1.0], [1.5, -0.75, 2.0], [0.125, 1.0, -0.5]])
        self.second = Linear([[1.0, -0.25, 0.5], [-1.5, 0.625, 1.0], [2.0, -1.0, 0.375]])

    def _layers(self, x: Any) -> Any:
        hidden = self.first(x)
        return self.second(hidden.graph.add("Relu", [hidden]))


def _node(type: str, outputs: int = 1, **attributes: Any) -> Any:
    """An op of the sample: a module of one node."""

    def op(self: OnnxSample) -> Any:
        return self.ops.setdefault(
            type, Module(lambda *args: Module.building[-1].add(type, args, outputs, **attributes))
        )

    return property(op)


class OnnxSample(Sample):
    """Sessions of models that are built for each call."""

    driver = OnnxRuntimeDriver
    op_names: ClassVar = {
        "linear": "MatMul", "relu": "Relu", "add": "Add", "cat": "Concat", "pair": "TopK", "many": "MatMul",
    }  # fmt: skip
    dtypes = (np.dtype("float64"), np.dtype("float32"), np.dtype("int64"), np.dtype("complex128"))

    linear = _node("MatMul")
    relu = _node("Relu")
    add = _node("Add")
    many = _node("MatMul")

    def __init__(self) -> None:
        self.ops: dict[str, Module] = {}

    @property
    def cat(self) -> Any:
        return self.ops.setdefault(
            "Concat", Module(lambda tensors: Module.building[-1].add("Concat", tensors, axis=0))
        )

    @property
    def pair(self) -> Any:
        def largest(x: Any) -> Any:
            graph = Module.building[-1]
            graph.weights["count"] = np.array([2], np.int64)
            return graph.add("TopK", [x, Value(graph, "count")], 2)

        return self.ops.setdefault("TopK", Module(largest))

    def tensor(self, values: Any, dtype: Any = None, requires_grad: bool = False) -> Any:
        return np.array(values, dtype or np.float64)

    def parameter(self, values: Sequence[Any]) -> Any:
        return Parameter(values)

    def bits(self, tensor: Any) -> bytes:
        return b"" if tensor is None else self._array(tensor).tobytes()

    def numbers(self, tensor: Any) -> list[Any]:
        return list(self._array(tensor).ravel().tolist())

    @staticmethod
    def _array(tensor: Any) -> Any:
        return tensor.value if isinstance(tensor, Parameter) else np.asarray(tensor)

    def shape(self, tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)

    def overwrite(self, tensor: Any) -> None:
        tensor[...] = 0

    def gradient(self, tensor: Any) -> Any:
        return None

    def backward(self, tensor: Any) -> None:
        pass

    def model(self) -> Any:
        return Network()

    def module(self, forward: Any) -> Any:
        return Module(forward)

    def run_uninstrumentable_op(self) -> None:
        x = self.input()
        self.relu(x)
        (program,) = self.ops["Relu"].programs.values()
        binding = program.session.io_binding()
        binding.bind_cpu_input("x0_0", x)
        binding.bind_output(program.names[0])
        program.session.run_with_iobinding(binding)


class TestOnnxRuntimeDriver(DriverTests):
    """The suite on ONNX Runtime, sessions."""

    lacks: ClassVar = {
        "auxiliary_state": "no op of ONNX writes into a tensor",
        "checkpoints": "ONNX Runtime has no backward pass, so that nothing is computed again",
        "in_place": "no op of ONNX writes into a tensor",
        "out": "no op of ONNX writes into a tensor",
        "backward": "ONNX Runtime has no backward pass",
        "call_sites": "an op is a node of a graph, however often it is run, and from wherever",
        "values": "a graph is analysed before it runs, on symbols",
        "schema": "a weight is an initializer of the graph, and the schema's names are its own",
        "numbers": "`item()` is no op",
        "traceable_calls": "a traceable routine is called when it is traced",
        "batched_values": "a graph is run, not transformed",
        "grad": "a graph is run, not transformed",
        "jvp": "a graph is run, not transformed",
        "vmap": "a graph is run, not transformed",
    }
    gaps: ClassVar = {
        "test_a_value_handed_back_unchanged_adds_nothing": never("a routine is given a view of an array"),
        "test_a_tool_that_decides_by_shape_is_asked_for_each": SYMBOLS,
        "test_ops_of_a_routine_are_not_instrumented": SYMBOLS,
        "test_a_plan_dies_with_its_parameter": never("a plan dies with the session, which holds the weights"),
        "test_one_call_site_over_several_weights_is_several_ops": NODES,
    }

    @pytest.fixture
    def sample(self) -> Sample:
        return OnnxSample()
