"""Calls of MindSpore's operators: arguments, inputs in schema order, and the inputs that are written."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from amanda.backend import Call, Operation
from amanda.interceptor import Site
from mindspore import Tensor

from . import _signatures
from ._signatures import HAS_UNWRITTEN, NO_DEFAULT, OperatorSignature, Writes, unwritten_outputs, writes_of
from ._targets import writes_first_input
from ._views import TensorElements

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class MindSporeCall(Call):
    """A call of an operator; subclasses know how a kind of native target takes its arguments.

    _original_arguments: args and kwargs of the call.  _signature: names and defaults of the inputs.
    """

    __slots__ = ("_original_arguments", "_signature", "_site")

    op: Operation

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._site = site
        self._original_arguments = args, kwargs
        self.op = site.op
        self.inputs, self._signature = self._bind_arguments(args, kwargs)
        self.names: Sequence[str] = self._signature.names
        self.written_positions, self.target_positions = self._writes()

    @abstractmethod
    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], OperatorSignature]:
        """Return the operator's inputs, without trailing defaults, and its signature."""

    @abstractmethod
    def _call_arguments(self, inputs: Sequence[Any]) -> Arguments:
        """Return the arguments of a call with these inputs."""

    def _writes(self) -> Writes:
        """Return which inputs the operator writes, and which of them it returns."""
        return _WRITES_FIRST if writes_first_input(self._site.key) else _WRITES_NOTHING

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the operator; with the original arguments if no input changed."""
        return self._site.invoke(
            *(self._original_arguments if inputs is self.inputs else self._call_arguments(inputs))
        )

    def as_function(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that runs the operator on other inputs, with this call's other arguments."""
        call = self._copy_without_tensors()

        def run_operator(inputs: Sequence[Any]) -> Any:
            args, kwargs = call._call_arguments(inputs)
            return call._site.target(*args, **kwargs)

        return run_operator

    def _copy_without_tensors(self) -> "MindSporeCall":
        """Return a copy of the call without its tensors, which the copy must not keep alive."""
        # The constructor would bind arguments again.
        call = type(self).__new__(type(self))
        call._site, call._signature, call.inputs = self._site, self._signature, [None] * len(self.inputs)
        args, kwargs = self._original_arguments
        call._original_arguments = (
            _without_tensors(args),
            {name: _without_tensors(value) for name, value in kwargs.items()},
        )
        return call

    def target_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the written tensors that the operator returns, each also as the new object for it."""
        return [*(inputs[i] for i in self.target_positions), *outputs] if self.target_positions else []

    def written_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the written tensors; for `x[index] = y`, the elements at the index."""
        if self._site.key == "setitem":
            return [TensorElements.at(inputs[0], inputs[1])]
        return super().written_tensors(inputs, outputs)

    def append_unreturned(
        self, outputs: Any, inputs: Sequence[Any], values: list[Any], rebuild: Callable[[list[Any]], Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Show tools written inputs instead of outputs that stand for them, and None for unwritten outputs.

        On the CPU many kernels of optimizers leave outputs unwritten. The program gets these as they are,
        unless a tool changed them. Without such outputs `values` and `rebuild` are returned.
        """
        visible_outputs = self._outputs_for_tools(inputs, values)
        if not visible_outputs:
            return values, rebuild
        values_for_tools = [visible_outputs.get(i, value) for i, value in enumerate(values)]

        def rebuild_outputs(new_values: list[Any]) -> Any:
            triples = zip(new_values, values_for_tools, values, strict=True)
            # What tools leave alone stays the kernel's own output, not the value that was shown instead.
            return rebuild([value if new is tool_value else new for new, tool_value, value in triples])

        return values_for_tools, rebuild_outputs

    def _outputs_for_tools(self, inputs: Sequence[Any], values: Sequence[Any]) -> dict[int, Any]:
        """Return values that tools see instead of outputs, by position."""
        return {}

    def attributes(self) -> dict[str, Any]:
        """Return the arguments that are not tensors by name, with defaults."""
        arguments = dict(zip(self.names, self._signature.defaults, strict=False))
        arguments.update(zip(self.names, self.inputs, strict=False))
        return {
            name: value
            for name, value in arguments.items()
            if value is not NO_DEFAULT and not _has_tensor(value)
        }

    def op_type(self) -> str:
        """Return the operator's name, which is the same for each of its spellings."""
        return self._site.key


_WRITES_NOTHING, _WRITES_FIRST = Writes(), Writes((0,), (0,))


class _DeclaredCall(MindSporeCall):
    """A call of a primitive object, whose class declares the arguments that it writes."""

    __slots__ = ()

    @property
    @abstractmethod
    def _primitive(self) -> Any:
        """The primitive object."""

    def _writes(self) -> Writes:
        """Return the declared writes; none where a written argument is not passed."""
        declared_writes = writes_of(type(self._primitive), self.attributes)
        last_written = max(declared_writes.inputs, default=-1)
        # A written argument may be among the trailing defaults, which are not inputs.
        return declared_writes if last_written < len(self.inputs) else _WRITES_NOTHING

    def _outputs_for_tools(self, inputs: Sequence[Any], values: Sequence[Any]) -> dict[int, Any]:
        """Return the written inputs for outputs that stand for them, and None for unwritten outputs."""
        if self.target_positions:
            # The kernel may leave these outputs unwritten; the written inputs have the values.
            count = min(len(values), len(self.target_positions))
            return {i: inputs[self.target_positions[i]] for i in range(count)}
        if self._site.key in HAS_UNWRITTEN:
            return dict.fromkeys(unwritten_outputs(self._site.key, self.attributes()))  # None for each
        return {}


class KernelCall(_DeclaredCall):
    """A call of a generated function of a kernel: `pyboost_relu(primitive, [x])`."""

    __slots__ = ("_trailing_defaults",)

    @property
    def _primitive(self) -> Any:
        return self._original_arguments[0][0]

    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], OperatorSignature]:
        """Return the values without trailing defaults, which are stored for later calls."""
        primitive, values = args
        kind: Any = type(primitive)
        signature = _signatures.kernel_signature(kind, len(values))
        # Defaults at the end are not inputs: a call has the same inputs whether its caller wrote them or not.
        input_count = len(values) - signature.count_trailing_defaults(list(values))
        self._trailing_defaults = tuple(values[input_count:])
        return list(values[:input_count]), signature

    def _call_arguments(self, inputs: Sequence[Any]) -> Arguments:
        return (self._original_arguments[0][0], [*inputs, *self._trailing_defaults]), {}

    def _copy_without_tensors(self) -> MindSporeCall:
        """Return a copy of the call, with its trailing defaults, without its tensors."""
        call = super()._copy_without_tensors()
        assert isinstance(call, KernelCall)
        call._trailing_defaults = self._trailing_defaults
        return call


class OverloadCall(MindSporeCall):
    """A call of an object that picks an overload in native code: `_add_instance(x, y, alpha=2)`.

    _positional_count: number of inputs that the program passed by position.
    """

    __slots__ = ("_positional_count",)

    is_method = False

    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], OperatorSignature]:
        """Return the arguments in the order of the overload's names, up to the last one that is passed.

        The first overload serves if none fits; the values of its `*shape` become one tuple. Stores the
        number of positional inputs for later calls.
        """
        values = list(args[0 if self.is_method else 1 :])
        name = getattr(self._site.target, "__name__", self._site.key)
        signatures = _signatures.overload_signatures(self._site.key, name, self.is_method)
        # Native code picks by types, too; names and number of arguments suffice to name the inputs.
        signature = next(
            (candidate for candidate in signatures if candidate.accepts(len(values), kwargs)), signatures[0]
        )
        # `x.reshape(2, 3)` and `x.reshape((2, 3))` have the same two inputs: x and the tuple.
        if signature.gathered is not None and len(values) > signature.gathered:
            gathered_values = values[signature.gathered :]
            is_list = len(gathered_values) == 1 and isinstance(gathered_values[0], (list, tuple))
            gathered_input = gathered_values[0] if is_list else tuple(gathered_values)
            values = [*values[: signature.gathered], gathered_input]
        # A later call must pass the arguments beyond this number by name, as before.
        self._positional_count = len(values)
        # The documentation may lack an argument that the native function takes.
        undocumented_names = [name for name in kwargs if name not in signature.names]
        names = (*signature.names, *undocumented_names)
        defaults = (*signature.defaults, *[NO_DEFAULT] * len(undocumented_names))
        for i in range(len(values), len(names)):
            if not any(name in kwargs for name in names[i:]):
                break
            values.append(kwargs.get(names[i], defaults[i]))
        return values, OperatorSignature(names, defaults, signature.positional, signature.gathered)

    def _call_arguments(self, inputs: Sequence[Any]) -> Arguments:
        """Return the inputs as the program passed them: the first ones by position, the others by name."""
        args, _ = self._original_arguments
        overload_object = () if self.is_method else args[:1]
        named_inputs = list(zip(self.names, inputs, strict=False))[self._positional_count :]
        kwargs = {name: value for name, value in named_inputs if value is not NO_DEFAULT}
        return (*overload_object, *inputs[: self._positional_count]), kwargs

    def _copy_without_tensors(self) -> MindSporeCall:
        """Return a copy of the call, with its names and its count of positions, without its tensors."""
        call = super()._copy_without_tensors()
        assert isinstance(call, OverloadCall)
        call.names, call._positional_count = self.names, self._positional_count
        return call


class MethodCall(OverloadCall):
    """A call of a native method of tensors: `x.add(y)`."""

    __slots__ = ()

    is_method = True


class AssignCall(MindSporeCall):
    """A call of `x.assign_value(y)`, after which x has the memory of y.

    x is not an input: the call does not read x, which has no memory while a Parameter is created.
    """

    __slots__ = ()

    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], OperatorSignature]:
        """Return y as the only input, named "value"."""
        values = [*args[1:], *kwargs.values()]
        return values, OperatorSignature(("value",), (NO_DEFAULT,), 1)

    def _call_arguments(self, inputs: Sequence[Any]) -> Arguments:
        return (self._original_arguments[0][0], *inputs), {}

    def target_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return x, which the call returns."""
        return list(outputs)


class NamedPrimitiveCall(_DeclaredCall):
    """A call of the executor with a primitive: `executor.run_op_async(primitive, name, (x, y))`."""

    __slots__ = ()

    @property
    def _primitive(self) -> Any:
        return self._original_arguments[0][1]

    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], OperatorSignature]:
        """Return the values in the primitive's tuple, and the primitive's signature."""
        _, primitive, _, values = args
        return list(values), _signatures.primitive_signature(primitive, len(values))

    def _call_arguments(self, inputs: Sequence[Any]) -> Arguments:
        return (*self._original_arguments[0][:3], tuple(inputs)), {}

    def attributes(self) -> dict[str, Any]:
        """Return the arguments that are not tensors, and the attributes of the primitive by other names."""
        attributes = dict(getattr(self._primitive, "attrs", None) or {})
        for name in ("input_names", "output_names"):
            attributes.pop(name, None)
        return {**attributes, **super().attributes()}


class ApplyCall(MindSporeCall):
    """A call of `Function.apply(*values)`, a function with a custom backward."""

    __slots__ = ()

    def _bind_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], OperatorSignature]:
        """Return the values, positions before keywords, with the names of the parameters of `forward`."""
        values = [*args[1:], *kwargs.values()]
        # The first parameter of `forward` is the context, which is left out like a `self`.
        names = _signatures.parameters_of(args[0].forward)
        signature = _signatures.signature_of_count(names, len(values) - len(kwargs))
        return values, OperatorSignature((*signature.names, *kwargs), signature.defaults, len(values))

    def _call_arguments(self, inputs: Sequence[Any]) -> Arguments:
        args, kwargs = self._original_arguments
        count = len(inputs) - len(kwargs)
        return (args[0], *inputs[:count]), dict(zip(kwargs, inputs[count:], strict=True))

    def op_type(self) -> str:
        """Return the function's name."""
        return str(self._original_arguments[0][0].__name__)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, Tensor)


def _without_tensors(values: Any) -> Any:
    if type(values) in (list, tuple):
        return type(values)([_without_tensors(value) for value in values])
    return None if isinstance(values, Tensor) else values
