"""Calls of torch's ops, bound to their schemas, and tests for calls that torch makes within an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

import torch
from amanda.backend import Call
from amanda.interceptor import Site, running
from torch._functorch.autograd_function import custom_function_call

from ._levels import is_wrapped
from ._requirements import torch_attribute
from ._schema import Binding
from ._storages import WrittenElements, copy_in_storage_like, copy_laid_out_like, is_strided


class TorchCall(Call):
    """One call of an op at a site, with its arguments bound to the inputs of the op's schema.

    callee_args: the callee, where it is an argument of the site that comes before those of the op (an
    OpOverload, a Function subclass); empty where the site itself is the op.
    """

    __slots__ = ("_binding", "_callee_args", "_invoke_site", "_program_arguments", "_site")

    def __init__(
        self, site: Site, op: Any, callee_args: tuple[Any, ...], args: tuple[Any, ...],
        kwargs: dict[str, Any], binding: Binding, in_place: bool,
        invoke_site: Callable[[Site, tuple[Any, ...], dict[str, Any]], Any],
    ) -> None:  # fmt: skip
        """Bind a call to its inputs; invoke_site: makes the call as the program would."""
        self._site = site
        self._invoke_site = invoke_site
        self._callee_args = callee_args
        self._program_arguments = args, kwargs
        self._binding = binding
        self.op = op
        self.inputs = binding.inputs(args, kwargs)
        self.names: Sequence[str] = binding.names
        # Most ops write nothing: the test spares them a call.
        may_write = binding.always_written or binding.statistics
        self.written_positions = binding.written_positions(self.inputs) if may_write else ()
        self.target_positions = (
            _target_positions(binding, self.inputs, in_place) if binding.always_written else ()
        )

    def invoke(self, inputs: list[Any]) -> Any:
        """Run the op; with the arguments as the user gave them where nothing changed."""
        if inputs is self.inputs:  # the very objects of the program, so that identity tests of torch hold
            args, kwargs = self._program_arguments
        else:
            args, kwargs = self._binding.call_arguments(inputs)
        return self._invoke_site(self._site, (*self._callee_args, *args), kwargs)

    def fit_to_memory(self, inputs: list[Any]) -> list[Any]:
        """Return the inputs with a routine's value for the first one copied into memory like the original's.

        Only for an op that may make a view of its first input, or that reads all its memory: with another
        layout `reshape` would make a view where the program's call copies, or the reverse.  A value that is
        not strided, or has another shape, stays as it is.  `as_strided` gets the rest of the original's
        storage too, but under a transform the elements alone.
        """
        original, value = self.inputs[0], inputs[0]  # the program's, and a routine's if it has changed that
        if value is original or not _may_return_view(self._site.key):
            return inputs
        if self._site.key == "as_strided":
            # The memory of a wrapper of a transform cannot be read beyond its elements.
            is_transformed = is_wrapped(original) or is_wrapped(value)
            if is_transformed:
                return [torch.empty_like(original).copy_(value), *inputs[1:]]
            return [copy_in_storage_like(original, value), *inputs[1:]]
        if not (is_strided(original) and is_strided(value)) or original.stride() == value.stride():
            return inputs
        if original.shape != value.shape:
            return inputs
        return [copy_laid_out_like(original, value), *inputs[1:]]

    def as_function(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that runs the op on inputs like this call's."""
        op, callee_args, binding = self._site.op, self._callee_args, self._binding

        def compute(inputs: Sequence[Any]) -> Any:
            args, kwargs = binding.call_arguments(inputs)
            return op(*callee_args, *args, **kwargs)

        return compute

    def target_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the tensors that the op wrote and returned.

        An autograd.Function returns an input itself only if it marked the input dirty.
        """
        if self._site.key != "Function.apply":
            return super().target_tensors(inputs, outputs) if self.target_positions else []
        return [
            tensor
            for tensor in inputs
            if isinstance(tensor, torch.Tensor) and any(tensor is output for output in outputs)
        ]

    def unreturned_positions(self, outputs: Any) -> Sequence[int]:
        """Return the positions of written inputs that the op does not return: all if it returned None."""
        binding = self._binding
        if not binding.always_written:
            return ()
        positions = binding.always_written if outputs is None else binding.unreturned_positions
        return [i for i in positions if self.inputs[i] is not None]

    def may_write_inputs(self) -> bool:
        """Return True if the schema says that the op writes, or if the op is an object, as a Function is."""
        return bool(self.written_positions or self._callee_args)

    def may_write_undeclared(self) -> bool:
        """Return True for an autograd.Function and for TorchScript, whose code may write any tensor."""
        return bool(self._callee_args) and self._site.key in _SITES_OF_PROGRAM_CODE

    def has_derivative(self) -> bool:
        """Return False for an op that reads only the form of a tensor."""
        return self._site.key not in _FORM_ONLY_OPS

    def accepts_equal_inputs(self) -> bool:
        """Return True unless the op may write, or its result depends on how a tensor lies in memory."""
        return not self.may_write_inputs() and not _may_return_view(self._site.key)

    def written_tensors(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """Return the tensors that the op has written, of `x[index] = y` the elements at the index."""
        # The schema says that `x[index] = y` writes all of x; tools and views need the elements.
        if self._site.key != "setitem":
            return super().written_tensors(inputs, outputs)
        return [WrittenElements.at(inputs[0], inputs[1])]

    def in_form_of_result(self, result: Any) -> Any:
        """Return a replacement's tuple or list as the named tuple that the op returns; other results as is.

        So is a tuple or list if torch has no named tuple of that length for the op.
        """
        # Torch has another class for results by `out=`: `max_out` beside `max`.
        name = f"{self._site.key}_out" if self.target_positions else self._site.key
        named_tuple_class = getattr(torch.return_types, name, None)
        if type(result) not in (tuple, list) or named_tuple_class is None:
            return result
        has_equal_length = named_tuple_class.n_sequence_fields == len(result)
        return named_tuple_class(result) if has_equal_length else result

    def argument_indices(self) -> tuple[int | tuple[int, int], ...] | None:
        """Return which argument each input is; None for a call through an object, such as a custom op's."""
        return (
            None
            if self._callee_args
            else self._binding.argument_indices(
                len(self._program_arguments[0]), tuple(self._program_arguments[1])
            )
        )

    def attributes(self) -> dict[str, Any]:
        """Return the arguments that are not tensors by name, defaults included."""
        return self._binding.attributes(self.inputs)

    def op_type(self) -> str:
        """Return ATen's operator without overload, a custom op's "library::name", or a Function's name."""
        if not self._callee_args:
            return self._site.key
        name = getattr(self.op, "_qualified_op_name", None) or getattr(self.op, "__name__", str(self.op))
        return str(name).removeprefix("aten::")


_SITES_OF_PROGRAM_CODE = frozenset({"Function.apply", "ScriptFunction", "ScriptMethod"})
"""Keys of sites that run code of the program within one op."""


_FORM_ONLY_OPS = frozenset(
    {f"{name}_like" for name in ("empty", "full", "ones", "rand", "randint", "randn", "zeros")}
    | {f"new_{name}" for name in ("empty", "empty_strided", "full", "ones", "zeros")}
)
"""Ops that make a tensor of the form of another, and of none of its numbers."""


@cache
def _may_return_view(op_name: str) -> bool:
    """Return True for an op that may return a view of its first input, by its schemas in ATen."""
    # A result that aliases an input without writing it is a view, by any overload.
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{op_name}")
    aliases = [result.alias_info for schema in schemas for result in schema.returns]
    # Indexing has no schema of that name in ATen.
    return op_name == "getitem" or any(alias and not alias.is_write for alias in aliases)


class CollectiveCall(TorchCall):
    """One call of a process group's method; a list of lists of tensors becomes one flat list of tensors."""

    __slots__ = ("_lengths_by_position",)

    def __init__(self, *arguments: Any) -> None:
        """Bind a call, and flatten its lists of lists; the lengths of the inner lists nest them again."""
        super().__init__(*arguments)
        self._lengths_by_position = {
            i: [len(tensors) for tensors in value]
            for i, value in enumerate(self.inputs)
            if isinstance(value, (list, tuple)) and value and all(isinstance(item, list) for item in value)
        }
        for i in self._lengths_by_position:
            self.inputs[i] = [tensor for tensors in self.inputs[i] for tensor in tensors]

    def invoke(self, inputs: list[Any]) -> Any:
        """Make the call, with lists as they were."""
        return super().invoke(inputs if inputs is self.inputs else self._with_nested_lists(inputs))

    def accepts_equal_inputs(self) -> bool:
        """Return False: inputs are flat lists, arguments may be lists of lists."""
        return False

    def as_function(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that makes the call with inputs like this call's."""
        compute, with_nested_lists = super().as_function(), self._with_nested_lists
        return lambda inputs: compute(with_nested_lists(inputs))

    def _with_nested_lists(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs with the flattened lists nested as in the call, and the others as they are."""
        return [
            _split_by_lengths(value, self._lengths_by_position[i])
            if i in self._lengths_by_position
            else value
            for i, value in enumerate(inputs)
        ]


def _split_by_lengths(flat: Sequence[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Return consecutive items of a list as lists of these lengths."""
    values = iter(flat)
    return [[next(values) for _ in range(length)] for length in lengths]


def _target_positions(binding: Binding, inputs: Sequence[Any], in_place: bool) -> tuple[int, ...]:
    """Return the positions of the inputs that the call writes its results into: 0 for an op in place.

    Inputs that are None are left out, and those that the op fills for its backward op alone.
    """
    if in_place:
        return (0,)
    # rrelu's `noise` is written, but is not a result: the op fills it for its backward op.
    return tuple(i for i in binding.always_written if binding.names[i] != "noise" and inputs[i] is not None)


FUNCTION_CALL = custom_function_call
"""The operator by which torch.func brings a program's autograd.Function to each transform."""
_KERNEL_MODULES = (
    "torch._meta_registrations", "torch._refs", "torch._decomp", "torch._prims", "torch._prims_common",
    "torch.nested._internal",
)  # fmt: skip
"""Modules with kernels: for the device meta, for tensors without data, and for jagged tensors."""

_NO_TASK = -1
"""Number of autograd's task on a thread without a backward pass."""
_graph_task = torch_attribute("_C._current_graph_task_id") or (lambda: _NO_TASK)


def is_called_by_kernel(frame: FrameType | None) -> bool:
    """Return True for a call that a kernel in Python makes, in the forward or the backward pass.

    frame: of the call.  If a program calls a function of these modules directly, its calls are ops.
    """
    # Outside of an op and of a backward pass every call is the program's: no frame need be looked at.
    if running() is None and _graph_task() == _NO_TASK:
        return False
    while frame is not None:
        module_name = str(frame.f_globals.get("__name__"))
        if module_name.startswith(_KERNEL_MODULES):
            return True
        if not module_name.startswith(("torch.", "contextlib", "amanda.")):
            return False  # the program's code: it calls torch, not a kernel
        frame = frame.f_back
    return False


def is_dispatched_in_backward(frame: FrameType | None) -> bool:
    """Return True for an operator that `__torch_dispatch__` of a mode or a subclass calls in a backward pass.

    Such an operator belongs to a node of autograd.  In the forward pass it belongs to an op, which the
    interceptor has seen begin.
    """
    if _graph_task() == _NO_TASK:
        return False
    while frame is not None and frame.f_code is not _BACKWARD:
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
    return False


_BACKWARD = torch.autograd.function.BackwardCFunction.apply.__code__
"""Code that calls the backward of a program's Function, whose calls are ops."""


def is_call_for_next_transform(frame: FrameType) -> bool:
    """Return True for a call by which torch.func brings an autograd.Function to the next transform.

    frame: of the call.  The program's own call, at the level of all transforms in force, is the op.
    """
    caller: FrameType | None = frame
    while caller is not None and str(caller.f_globals.get("__name__")).startswith("amanda.interceptor"):
        caller = caller.f_back  # of a detour, without the native interceptor
    if caller is None:
        return False
    is_in_rule_of_transform = caller.f_globals.get("__name__") == type(FUNCTION_CALL).__module__
    if is_in_rule_of_transform:
        return True
    if caller.f_code is _CALL_FROM_APPLY:
        return True  # the native `apply`, which makes this call, is the op
    # Two frames out, `FUNCTION_CALL` makes the call.
    return caller.f_back is not None and caller.f_back.f_code is _FUNCTION_CALL_CODE


_FUNCTION_CALL_CODE = type(FUNCTION_CALL).__call__.__code__
_CALL_FROM_APPLY = getattr(torch_attribute("autograd.function._call_custom_function_call"), "__code__", None)
"""Code by which the native `apply` brings a Function to transforms; None before torch 2.14."""
