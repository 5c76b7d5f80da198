"""The interface of an eager driver: calls of ops, and tensors."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from amanda.plan.facts import OpFacts
from amanda.plan.tensors import TensorOps, spread
from amanda.plan.trees import TreeSlot

if TYPE_CHECKING:
    from amanda import interceptor
    from amanda.eager.trace import Trace
    from amanda.eager.views import Views
    from amanda.plan.lifetime import SlotOf


class Call(ABC):
    """One call of an op: its inputs in schema order, and a repetition of the call with other inputs.

    op: the operator that tools see, with a `__name__`; as a rule `Site.op`.
    inputs: the arguments in the order of the operator's schema, without trailing defaults; a list of tensors
    is one input.
    names: names of the inputs in the schema, as many as there are inputs.
    written_positions: positions of the inputs that the op writes into.
    target_positions: positions of the inputs that the op writes and returns: `self` of an in-place op,
    `out=`.
    slots: slots of parameters, see `with_slots`.
    """

    __slots__ = ("inputs", "names", "op", "target_positions", "written_positions")

    op: Any
    inputs: list[Any]
    names: Sequence[str]
    written_positions: Sequence[int]
    target_positions: Sequence[int]
    slots: Sequence[TreeSlot] = ()

    @abstractmethod
    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op itself on these inputs."""

    def fit_to_memory(self, inputs: list[Any]) -> list[Any]:
        """Return changed inputs in memory that the op accepts; some ops read beyond a tensor's elements.

        The base returns the inputs as they are.
        """
        return inputs

    def as_function(self) -> Callable[[Sequence[Any]], Any] | None:
        """Return a function that runs the op on inputs like this call's; None where there is none.

        The function holds none of this call's inputs."""
        return None

    def invoke_for_replacement(self, inputs: Sequence[Any]) -> Any:
        """Run the op for a replacement; return a single output as itself."""
        return self.invoke(list(inputs))

    def target_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the user's tensors that the op has written and returned.

        Args:
            inputs: Values with which the op ran, in the order of its schema.
            outputs: The op's flat outputs.
        """
        return spread(inputs[i] for i in self.target_positions) if self.target_positions else []

    def unreturned_positions(self, outputs: Any) -> Sequence[int]:
        """Return the positions of inputs that the op has written and did not return.

        Args:
            outputs: The op's result, as the framework returns it.
        """
        return ()

    def append_unreturned(
        self, outputs: Any, inputs: Sequence[Any], values: list[Any], rebuild: Callable[[list[Any]], Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return the op's flat result with the inputs that the op wrote without returning them at its end.

        The function that is returned ignores the added inputs.

        Args:
            outputs: The op's result, as the framework returns it.
            inputs: Values with which the op ran.
            values: The flat result, from `EagerOps.flatten`.
            rebuild: Puts the flat result back into its form.
        """
        # A batch normalization writes running statistics that it does not return.
        unreturned = [inputs[i] for i in self.unreturned_positions(outputs)]
        if not unreturned:
            return values, rebuild
        result_count = len(values)
        return [*values, *unreturned], lambda all_values: rebuild(list(all_values[:result_count]))

    def written_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the user's tensors that the op has written, for `Views.copy_writes`.

        Args:
            inputs: Values with which the op ran, in the order of its schema.
            outputs: The op's flat outputs.
        """
        return [*spread(inputs[i] for i in self.written_positions), *self.target_tensors(inputs, outputs)]

    # True here: an op that is not known to be harmless is checked for writes at its first execution.
    def may_write_inputs(self) -> bool:
        """Return True if the op may write into its inputs, also an op without a schema that declares it."""
        return True

    def may_write_undeclared(self) -> bool:
        """Return True if the op may write other tensors, or inputs that no schema declares, as scripts do."""
        return False

    def has_derivative(self) -> bool:
        """Return False for an op of which autodiff never records anything, such as `ones_like`."""
        return True

    def accepts_equal_inputs(self) -> bool:
        """Return True if native code may replace an input by a tensor of equal dtype and shape.

        True only for ops that do not write inputs and do not read memory outside of an input's elements.
        """
        return False

    def in_form_of_result(self, result: Any) -> Any:
        """Return a replacement's result in the form of the op's result, such as a named tuple.

        The base returns it as it is.
        """
        return result

    def argument_indices(self) -> tuple[int | tuple[int, int], ...] | None:
        """Return the index of each input among the call's arguments, keywords after positions; -1: a default.

        A pair stands for an input that is a tuple of arguments: index of the first and behind the last.
        None where an input is not an argument of the call, such as a converted one, and in the base.
        """
        return None

    def attributes(self) -> dict[str, Any]:
        """Return the non-tensor arguments by name."""
        return {}

    def variable_positions(self) -> Sequence[int]:
        """Return the positions of inputs that were read from a variable, where the inputs do not show it."""
        return ()

    def op_type(self) -> str:
        """Return the framework's own name for what the op computes, one for all its spellings."""
        return str(getattr(self.op, "__name__", self.op))


class SignatureCall(Call):
    """A call of an operator in Python, whose inputs are in the order of its signature.

    keywords: names of arguments that the framework adds to a call, and that are no inputs.

    Args:
        driver: Driver whose tensors are among the arguments.
        site: Site of the operator.
        args: Positional arguments of the call; slots from `with_slots` come first.
        kwargs: Keyword arguments of the call.
        function: Function with the operator's signature; None for the site's original.
    """

    keywords: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        driver: TensorOps,
        site: interceptor.Site,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.slots = [value for value in args if isinstance(value, TreeSlot)]
        args = args[len(self.slots) :]
        self.driver, self.op, self._site, self._arguments = driver, site.op, site, (args, kwargs)
        self._signature = _signature(function or site.original)
        named = {name: value for name, value in kwargs.items() if name not in self.keywords}
        arguments = self._signature.bind(*args, **named).arguments
        self.names, self.inputs = list(arguments), list(arguments.values())
        out_positions = [self.names.index("out")] if arguments.get("out") is not None else []
        self.written_positions = self.target_positions = out_positions

    def unreturned_positions(self, outputs: Any) -> Sequence[int]:
        """Return the positions of what the operator has written and not returned."""
        return [i for i in self.written_positions if i not in self.target_positions]

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the operator on inputs, each passed by position or by keyword as the program has it."""
        if inputs is self.inputs:
            return self._site.invoke(*self._arguments)
        input_by_name = dict(zip(self.names, inputs, strict=True))
        args, kwargs = [], dict(self._arguments[1])
        for name, parameter in self._signature.parameters.items():
            if name in kwargs:
                kwargs[name] = input_by_name[name]
            elif parameter.kind is parameter.VAR_POSITIONAL:
                args += input_by_name.get(name, ())
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs |= input_by_name.get(name, {})
            elif name in input_by_name:
                args.append(input_by_name[name])
        return self._site.invoke(tuple(args), kwargs)

    def attributes(self) -> dict[str, Any]:
        """Return the arguments that are no tensors and no lists of tensors, by name."""
        named = zip(self.names, self.inputs, strict=True)
        return {name: value for name, value in named if self.driver.read_each(value, id) is None}


_signature = lru_cache(4096)(inspect.signature)


def _restore_single_value(values: list[Any]) -> Any:
    return values[0]


def _restore_none(values: list[Any]) -> None:
    return None


class SavedTensors:
    """Tensors that the backward ops of an op save, which may share memory with tensors written later."""

    def run_op(self, call: Call, inputs: list[Any]) -> Any:
        """Run an op and record the tensors that its backward ops save; the base records none.

        Args:
            call: Call of the op.
            inputs: Values with which the op runs.
        """
        return call.invoke(inputs)

    def copy_before_write(self) -> None:
        """Replace the saved tensors by copies, before a write changes them; the base saves none."""


class EagerOps(TensorOps):
    """Primitives of a framework's calls and tensors, which a driver implements.

    call_type: class of the calls of operators in Python.
    identity_types: types of the values that distinguish ops, such as parameters.
    slot_of: returns the name of the slot in which an object holds a parameter; None where the object does not
    hold the parameter. Another tensor in the same slot, as after offloading, is the same parameter to tools.
    reader: access of native code to tensors; None where native code does not read them.
    may_run_natively: whether native code may run routines at such calls; if not, it may still run calls that
    have no work.
    views: links between values and the views that they replaced; None where tensors never share memory.
    """

    call_type: type[SignatureCall] = SignatureCall
    identity_types: tuple[type, ...] = ()
    slot_of: SlotOf | None = None
    reader: interceptor.Reader | None = None
    may_run_natively: bool = True
    views: Views | None = None

    namespace: Any

    def bind(self, site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the call with its inputs in schema order.

        The base returns a call of `call_type`.

        Args:
            site: Site of the operator.
            args: Positional arguments, as the program passes them.
            kwargs: Keyword arguments, as the program passes them.
        """
        return self.call_type(self, site, args, kwargs)

    def flatten(self, outputs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return an op's result as a list, and a function that puts such a list back into its form.

        The base knows lists, tuples, also named ones, a single value, and None for no value.
        """
        if isinstance(outputs, (list, tuple)):
            kind = type(outputs)
            # A named tuple takes fields as separate arguments; its `_make` takes a list.
            return list(outputs), getattr(kind, "_make", kind)
        if outputs is None:
            return [], _restore_none
        return [outputs], _restore_single_value

    def invoke(self, site: interceptor.Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call as the program does.

        Args:
            site: Site of the operator.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
        """
        return site.invoke(args, kwargs)

    def flatten_with_unreturned(
        self, call: Call, outputs: Any, inputs: Sequence[Any]
    ) -> tuple[list[Any], Callable[[list[Any]], Any]]:
        """Return the result of `flatten` for a call, with inputs that the op wrote and did not return.

        Args:
            call: Call of the op.
            outputs: The op's result, as the framework returns it.
            inputs: Values with which the op ran.

        Returns:
            The flat result, and a function that puts a list of such values back into the result's form.
        """
        return call.append_unreturned(outputs, inputs, *self.flatten(outputs))

    @abstractmethod
    def needs_grad(self, inputs: Sequence[Any]) -> Hashable:
        """Return which of the inputs need a gradient; None where autodiff records nothing."""

    def saved_tensors_recorder(self, values: Sequence[Any]) -> SavedTensors | None:
        """Return a `SavedTensors` that runs an op on values which a routine may write into afterwards.

        None where `find_saved_tensors` finds all saved tensors after the op has run.
        """
        return None

    def may_hide_saved_tensors(self, value: Any) -> bool:
        """Return True if an op that writes this value may hide what it saves from `find_saved_tensors`."""
        return True

    def find_saved_tensors(self, written: Sequence[Any], outputs: Sequence[Any]) -> SavedTensors:
        """Return the tensors that backward ops have saved of the values that their op has just written.

        Args:
            written: Tensors that the op has written.
            outputs: The op's outputs, from which its backward ops are found as well.
        """
        return SavedTensors()

    def restore_autodiff_roles(
        self,
        original_inputs: Sequence[Any],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        results: list[Any],
    ) -> list[Any]:
        """Return the routines' results with the same role in autodiff as the op's outputs have.

        A leaf that the op creates stays a leaf, and an input that the op returns keeps its gradient.

        Args:
            original_inputs: The op's inputs, as the program passes them.
            inputs: Values with which the op ran.
            outputs: The op's outputs, before the routines.
            results: The outputs after the routines.
        """
        return results

    def is_program_tensor(self, value: Any, inputs: Sequence[Any]) -> bool:
        """Return True for an output that is a tensor of the program, such as an input, not a new tensor.

        Args:
            value: Output of the op.
            inputs: Inputs of the op, which may be lists of tensors.
        """
        return self.is_tensor(value) and any(value is tensor for tensor in spread(inputs))

    def unwrap_for_analysis(self, values: list[Any]) -> list[Any]:
        """Return the values for analysis routines; overridden where a framework wraps values for autodiff."""
        return values

    def describe(self, call: Call, subjects: Sequence[Any]) -> OpFacts:
        """Return the facts of the op of a call at its first execution, for the contexts of its tools.

        A driver extends what the call itself tells by the facts `scope`, `scope_aliases`, `variable_of`,
        `path_of` and `part_of`. Functions among the facts are called later, and keep no module alive.

        Args:
            call: First call of the op.
            subjects: Objects of the enclosing calls, such as modules, the outermost first.
        """
        return OpFacts(
            op=call.op, op_id=0, namespace=self.namespace, names=call.names,  # the caller sets `op_id`
            inputs=self.unwrap_for_analysis(call.inputs), attributes=call.attributes(),
            op_type=call.op_type(), variable_positions=call.variable_positions(),
            compute=call.as_function(), device_of=self.device_of,
        )  # fmt: skip

    def uninstrumented_reason(self, site: interceptor.Site) -> tuple[str, str] | None:
        """Return a description and a reason if a call cannot be instrumented at this moment, else None."""
        return None

    @abstractmethod
    def capture_backward_ops(self) -> AbstractContextManager[Any]:
        """Return a context around the op that finds its backward ops; created before the routines run.

        `attach_trace` receives what the context returns as it is entered.
        """

    def note_op_inputs(self, capture: Any, inputs: Sequence[Any]) -> None:
        """Record the inputs of the op, or of its replacement, before the context `capture` is entered.

        The inputs may be results of routines; backward ops of these results do not belong to the op.

        Args:
            capture: Context from `capture_backward_ops`.
            inputs: Values with which the op, or its replacement, is to run.
        """

    @abstractmethod
    def attach_trace(self, trace: Trace, nodes: Any, values: list[Any]) -> None:
        """Attach the trace to the backward ops that `capture_backward_ops` has found.

        Args:
            trace: Record of the op's execution.
            nodes: Value that the context returned as it was entered.
            values: The op's outputs, and the inputs that it wrote.
        """

    def backward_ops_between(self, before_routines: int, op_start: int, op_end: int) -> Any:
        """Return what `capture_backward_ops` gives, from readings of the clock of the driver's `reader`.

        Args:
            before_routines: Reading of the clock before the routines at the inputs.
            op_start: Reading before the op.
            op_end: Reading after the op.
        """
        raise NotImplementedError

    def native_trace_marker(self, trace: Trace, writes_input: bool) -> Any:
        """Return an argument of a `Program` with which native code attaches this trace to each execution.

        Args:
            trace: Record that the executions share.
            writes_input: Whether the op writes into an input tensor.
        """
        raise NotImplementedError
