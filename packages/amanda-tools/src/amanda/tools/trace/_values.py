"""Facts about the tensors and ops of each framework: memory, versions, names and autodiff's nodes."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import amanda
from amanda import interceptor
from amanda.backend import TensorMap
from amanda.tools.kit import RequiredNames, leaves, tensors_of
from amanda.tools.mapping import TENSORFLOW_HANDLES, itemsize
from amanda.tools.trace._graph import RecordedTensor, TraceFacts

TensorQuery = Callable[[Any], Any]
"""Function of a tensor, such as `shape` and `dtype` of StandardMapping."""


class MemorySpan(NamedTuple):
    """Position of a tensor's elements in its memory, in elements of `width` bytes from the start."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int


class FrameworkValues:
    """Facts about the tensors and ops of any framework, by StandardMapping; subclasses know more.

    gradients: those that autodiff's nodes send to the next; None if nodes have no numbers.
    """

    gradients: interceptor.SentGradients | None = None

    def __init__(self, shape: TensorQuery, dtype: TensorQuery) -> None:
        self._shape = shape
        self._dtype = dtype

    def is_symbolic(self, context: amanda.OpContext) -> bool:
        """Return True for an op of a graph, which is analysed on symbols."""
        return not context.is_eager()

    def facts(self, context: amanda.OpContext) -> TraceFacts:
        """Return the facts of an op, forward or backward."""
        if context.is_backward():
            op = context.get_backward_op()
            return TraceFacts(str(getattr(op, "__name__", op)), "gradient")
        op = context.get_op()
        return TraceFacts(str(getattr(op, "__name__", op)), "activation", (0,) if context["in_place"] else ())

    def note_call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Note the indices of the tensors with which an op calls functions; the base notes nothing."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for a tensor, also for one of unknown rank."""
        return self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        """Return True for a tensor without elements, which refers to a variable, an iterator or the like."""
        return False

    def describe(self, tensor: Any, **fields: Any) -> RecordedTensor:
        """Return the record of a tensor: shape, dtype, device, bytes, and further fields."""
        shape, dtype = self._shape(tensor), self._dtype(tensor)
        # None for what has no elements, such as a handle.
        width = itemsize(dtype)
        size = None if shape is None or None in shape or width is None else prod(shape) * width
        device = str(getattr(tensor, "device", None) or "") or None
        return RecordedTensor(shape, dtype, device, size, **fields)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and name of a tensor that no recorded op made."""
        return "input", self.name(tensor)

    def name(self, tensor: Any) -> str | None:
        """Return the framework's name of a tensor."""
        return None

    def captured_tensor(self, tensor: Any) -> Any:
        """Return the caller's tensor for a function's argument, or its index; None for other tensors."""
        return None

    def version(self, tensor: Any) -> int | None:
        """Return a number that changes when the tensor is written; None without one."""
        return None

    def memory(self, tensor: Any) -> tuple[Any, MemorySpan] | None:
        """Return the object that owns the tensor's memory, and the span in it; None without one."""
        return None

    def memory_address(self, memory: Any) -> int:
        """Return the address by which native code knows the memory of a tensor."""
        return id(memory)

    def next_node_number(self) -> int | None:
        """Return the number of autodiff's next node; None if nodes have no numbers."""
        return None


_REQUIRED = RequiredNames(
    "amanda.tools.trace", "torch", "torch:UntypedStorage._cdata", "torch:Tensor._version",
    "torch:_C._current_autograd_node", "torch:_C._current_graph_task_id",
    "torch:_C._functions.AccumulateGrad._sequence_nr", "torch:autograd._get_sequence_nr",
)  # fmt: skip

_AVERAGES = (3, 4)
"""Positions of the running mean and variance among the inputs of normalisations."""


class PytorchValues(FrameworkValues):
    """Tensors of PyTorch, their memory, and the edges of autograd's graph.

    A weak reference to a tensor or a storage lasts as long as C++ has the object, also while Python has none.
    """

    def __init__(self, shape: TensorQuery, dtype: TensorQuery) -> None:
        import torch

        super().__init__(shape, dtype)
        _REQUIRED.check()
        self._torch = torch
        # By model and id of a tensor: to walk through all parameters takes longer than an op.
        self._kinds_and_paths_by_model: weakref.WeakKeyDictionary[Any, dict[int, tuple[str, str]]] = (
            weakref.WeakKeyDictionary()
        )
        functions: Any = torch._C
        # Nodes of leaves have no number, and are told apart by their variable.
        self.gradients = interceptor.SentGradients(
            functions._current_autograd_node, functions._current_graph_task_id,
            functions._functions.AccumulateGrad,
        )  # fmt: skip

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor)

    def version(self, tensor: Any) -> int | None:
        """Return autograd's count of writes; None for a tensor of the inference mode."""
        version: int | None = None if tensor.is_inference() else tensor._version
        return version

    def facts(self, context: amanda.OpContext) -> TraceFacts:
        """Return the facts of an op; a normalisation writes averages without a new version."""
        facts = super().facts(context)
        if context.is_forward() and context["type"] in ("batch_norm", "instance_norm"):
            attributes = context.get_attrs()
            # Running averages are written by the kernel, without a new version of the tensor.
            if attributes.get("training") or attributes.get("use_input_stats"):
                return facts._replace(written=_AVERAGES)
        return facts

    def describe(self, tensor: Any, **fields: Any) -> RecordedTensor:
        """Return the record of a tensor, of all samples where a transform has wrapped it."""
        new_tensor = super().describe(tensor, **fields)
        samples = tensors_of(tensor).samples(tensor)
        if samples is not None and samples.sizes:
            new_tensor.batches = samples.sizes
            new_tensor.bytes = None if new_tensor.bytes is None else new_tensor.bytes * prod(samples.sizes)
        return new_tensor

    def memory(self, tensor: Any) -> tuple[Any, MemorySpan] | None:
        """Return the storage and the span in it; None for a sparse tensor, or one that a transform hides."""
        try:
            storage, start = tensor.untyped_storage(), tensor.storage_offset()
            return storage, MemorySpan(start, tuple(tensor.shape), tensor.stride(), tensor.element_size())
        except (NotImplementedError, RuntimeError):
            return None

    def memory_address(self, memory: Any) -> int:
        address: int = memory._cdata
        return address

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and path of a parameter or buffer in the outermost called module.

        Without such a path, "parameter" or "input", and None.
        """
        is_parameter = isinstance(tensor, self._torch.nn.Parameter)
        module_class = self._torch.nn.Module
        modules = [subject for subject in interceptor.subjects() if isinstance(subject, module_class)]
        if modules:
            outermost = modules[0]  # to which paths are relative
            kind_and_path = self._kinds_and_paths(outermost).get(id(tensor))
            if kind_and_path is None:
                is_outdated = is_parameter
            else:  # ids are reused: the cached path has to lead to this very tensor
                is_outdated = attrgetter(kind_and_path[1])(outermost) is not tensor
            if is_outdated:
                del self._kinds_and_paths_by_model[outermost]  # the module has changed since
                kind_and_path = self._kinds_and_paths(outermost).get(id(tensor))
            if kind_and_path is not None:
                return kind_and_path
        return ("parameter" if is_parameter else "input"), None

    def _kinds_and_paths(self, root: Any) -> dict[int, tuple[str, str]]:
        """Return kinds and paths of a model's parameters and buffers, by their ids."""
        if root not in self._kinds_and_paths_by_model:
            kinds = {"buffer": root.named_buffers(), "parameter": root.named_parameters()}
            self._kinds_and_paths_by_model[root] = {
                id(tensor): (kind, name) for kind, pairs in kinds.items() for name, tensor in pairs
            }
        return self._kinds_and_paths_by_model[root]

    def next_node_number(self) -> int | None:
        number: int = self._torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        return number


_WRITING_TYPES = re.compile(
    r"Assign\w*|Resource(?:Sparse)?Apply\w+|ResourceScatter\w+|ResourceStridedSliceAssign"
)
_OUTPUT_KINDS = {"ReadVariableOp": "", "Const": "constant", "VarHandleOp": "parameter",
                 "VariableV2": "parameter", "Variable": "parameter"}  # fmt: skip
"""Kinds of outputs, by type of operation."""
_FUNCTION = re.compile(r"__(?:inference|forward|backward)_(.+)_\d+")


class TensorflowValues(FrameworkValues):
    """Tensors of TensorFlow: eager ones, symbols of graphs, arguments of functions, and variables."""

    def __init__(self, shape: TensorQuery, dtype: TensorQuery) -> None:
        super().__init__(shape, dtype)
        self._kind_and_path_by_handle: dict[int, tuple[str, str]] = {}
        self._captured_by_graph: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
        # By the function's name, without the number that each trace of it gets.
        self._arguments_by_function: dict[str, Sequence[int]] = {}

    def is_tensor(self, value: Any) -> bool:
        # NumPy arrays and numbers have an element type too, and are not tensors here.
        return hasattr(value, "_id") and self._dtype(value) is not None

    def is_handle(self, tensor: Any) -> bool:
        return self._dtype(tensor) in TENSORFLOW_HANDLES

    def name(self, tensor: Any) -> str | None:
        return str(tensor.name) if hasattr(tensor, "op") else None

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and path of a variable in the outermost called layer or module."""
        if self._dtype(tensor) != "resource":
            return "input", self.name(tensor)
        # Variables are looked for only when a new handle is met.
        if tensor._id not in self._kind_and_path_by_handle:
            for subject in interceptor.subjects()[:1]:
                self._note_variables(getattr(subject, "variables", ()))
        return self._kind_and_path_by_handle.get(tensor._id, ("parameter", self.name(tensor)))

    def _note_variables(self, variables: Any) -> None:
        """Note kind and path of variables, by the number of the handle."""
        for variable in variables if isinstance(variables, (list, tuple)) else ():
            value = getattr(variable, "value", None)
            # Keras 3 wraps TensorFlow's variable.
            owner = variable if hasattr(variable, "handle") else value
            handle = getattr(owner, "handle", None)
            if handle is not None:
                kind = "parameter" if getattr(variable, "trainable", True) else "buffer"
                name = str(getattr(variable, "path", None) or variable.name).removesuffix(":0")
                self._kind_and_path_by_handle.setdefault(handle._id, (kind, name))

    def facts(self, context: amanda.OpContext) -> TraceFacts:
        """Return the facts of an op; its name is the graph's, or the type in eager mode."""
        if context.is_backward():
            return TraceFacts(str(context.get_backward_op().name), "gradient")
        kind, inputs = context.get_forward_op_type(), context.get_inputs()
        written: Sequence[int] = ()
        if _WRITING_TYPES.fullmatch(kind):
            written = [i for i, value in enumerate(inputs) if self._dtype(value) == "resource"] or (0,)
        name, makes = str(context.get_op().name), _OUTPUT_KINDS.get(kind, "activation")
        return TraceFacts(name, makes, written, brings_in=kind.startswith("IteratorGetNext"))

    def captured_tensor(self, tensor: Any) -> Any:
        """Return the outer tensor of a captured one, or an argument's index, else None; note variables."""
        graph = getattr(tensor, "graph", None)
        if graph is None or not hasattr(graph, "captures"):
            return None
        reference_by_id = self._captured_by_graph.get(graph)
        # A function captures more tensors while it is traced.
        if reference_by_id is None or tensor._id not in reference_by_id:
            # Weak: a captured tensor may hold the graph that is the key here.
            pairs = ((inner._id, weakref.ref(outer)) for outer, inner in graph.captures)
            reference_by_id = self._captured_by_graph[graph] = dict(pairs)
            self._note_variables(getattr(graph, "variables", ()))
        if tensor._id in reference_by_id:
            return reference_by_id[tensor._id]()
        arguments = self._arguments_by_function.get(graph.name, ())
        for index, argument in zip(arguments, graph.inputs, strict=False):
            if argument is tensor or argument._id == tensor._id:
                return index
        return None

    def note_call(self, context: amanda.OpContext, arguments: Sequence[int]) -> None:
        """Note the arguments of the functions that an op calls, whose ops come next."""
        # The first input of these chooses the branch, and is not an argument of a function.
        if context.get_forward_op_type() in ("If", "StatelessIf", "Case", "StatelessCase"):
            arguments = arguments[1:]
        for value in context.get_attrs().values():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict) and "name" in item:  # an attribute that names a function
                    name = _FUNCTION.sub(r"\1", str(item["name"]))
                    self._arguments_by_function[name] = arguments


class JaxValues(FrameworkValues):
    """Arrays of JAX, and symbols of traced programs; weights are known by their slots in models."""

    def __init__(self, shape: TensorQuery, dtype: TensorQuery) -> None:
        super().__init__(shape, dtype)
        # Arrays have no names: a weight is known by the slot of the model that it is in.
        self._weight_paths: TensorMap[str] = TensorMap()

    def is_symbolic(self, context: amanda.OpContext) -> bool:
        """Return True for an op that is traced into a program: its inputs and outputs are symbols."""
        import jax

        values = context.get_inputs() if context.is_forward() else context.get_grad_outputs() or ()
        return any(isinstance(value, jax.core.Tracer) for value in leaves(values))

    def facts(self, context: amanda.OpContext) -> TraceFacts:
        """Return the facts of an op; of a forward op also note the paths of its weights, for `origin`."""
        if context.is_forward():
            for index, value in enumerate(context.get_inputs()):
                variable = None if isinstance(value, (list, tuple)) else context.get_variable(index)
                if variable is not None and self._dtype(value) is not None:
                    self._weight_paths[value] = str(context.get_variable_path(variable))
        return super().facts(context)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return "parameter" and the path of a weight; "input" and None for other arrays."""
        path = self._weight_paths.get(tensor)
        return ("input", None) if path is None else ("parameter", path)


class OnnxruntimeValues(FrameworkValues):
    """Values of ONNX graphs, which have one symbol each."""

    def name(self, tensor: Any) -> str | None:
        return str(tensor.name)

    def origin(self, tensor: Any) -> tuple[str, str | None]:
        """Return kind and name: of an initializer or a value computed from one, a constant, or an input."""
        if tensor.root is not None:
            return "parameter", str(tensor.root)
        return "input" if tensor.constant is None else "constant", self.name(tensor)

    def facts(self, context: amanda.OpContext) -> TraceFacts:
        """Return the facts of an op; its name is the node's, or the type of a node without name."""
        op = context.get_op()
        makes = "constant" if context.get_forward_op_type() == "Constant" else "activation"
        return TraceFacts(str(op.name or op.type), makes)


_VALUES: dict[str, type[FrameworkValues]] = {
    "jax": JaxValues, "onnxruntime": OnnxruntimeValues, "pytorch": PytorchValues,
    "tensorflow": TensorflowValues,
}  # fmt: skip


def values_of(framework: str, shape: TensorQuery, dtype: TensorQuery) -> FrameworkValues:
    """Return the facts about a framework; for other frameworks, those of StandardMapping alone."""
    return _VALUES.get(framework, FrameworkValues)(shape, dtype)
