"""Tools under which diff runs a program: float64, replaced values, and eager ops in compiled code."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import amanda
from amanda.tools.diff._run import OUTPUT_ROLES, Run
from amanda.tools.dump import Dump, Entry, Op
from amanda.tools.kit import RequiredNames, op_tensors, tensors_of, torch_tensors
from amanda.tools.mapping import StandardMapping

if TYPE_CHECKING:
    from numpy.typing import NDArray

ToolAndOptions = tuple[type[amanda.Tool], Mapping[str, Any]]
"""A tool besides the one that records, and its options."""
_NO_BACKWARD_TASK = -1
"""Number of autograd's task on a thread without a backward pass."""

_REQUIRED = RequiredNames(
    "amanda.tools.diff", "torch", "torch:_C._current_graph_task_id",
    "torch:ops.aten._to_copy.default._schema", "torch:ops.aten._unsafe_view.default",
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_map_only",
)  # fmt: skip


class Float64Tool(amanda.Tool):
    """Run floating-point ops of PyTorch in float64, from the first op of a scope until the scope closes.

    Random ops run in float32, so they draw the same numbers as without the tool.  In-place ops keep the
    element type of their tensor.  narrow: ops without a float64 kernel; they ran in float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow: set[str] = set()
        # Stack of PyTorch's modes, from the first op of a scope to its end; else None.
        self._mode: Any = None
        self.add_inst_for_op(self._begin)

    def _begin(self, context: amanda.OpContext) -> None:
        if self._mode is None and str(context.namespace).startswith("pytorch"):
            self._mode = _enter_modes(self.narrow)

    @property
    def remarks(self) -> list[str]:
        """Sentences on what could not run in float64."""
        names = ", ".join(sorted(self.narrow))
        return [f"ops without float64 ran in float32: {names}"] if names else []

    def scope_left(self) -> None:
        """End the run in float64."""
        if self._mode is not None:
            self._mode.close()
            self._mode = None


def _enter_modes(names_of_float32_ops: set[str]) -> Any:
    """Enter modes of PyTorch that run ops in float64, and return the stack that leaves them."""
    # names_of_float32_ops: names of kernels that have no float64 are added to it.
    _REQUIRED.check()
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    narrow_dtypes = {torch.float32, torch.float16, torch.bfloat16}
    written_statistics = ("running_mean", "running_var")

    def cast_floats(dtype: torch.dtype, value: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, value)

    class Float64Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Cast the inputs of each kernel to float64; autograd, above this mode, differentiates the result."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with amanda.disabled():
                return self._run_wide(func, args, kwargs or {})

        def _run_wide(self, func: Any, args: Any, kwargs: Any) -> Any:
            """Run a kernel in float64, or float32 if random or without it; views and writes keep types."""
            tensors = torch_tensors((args, kwargs), structures=True)
            if _copies_or_views(func) or not any(x.is_floating_point() for x in tensors):
                return func(*args, **kwargs)
            # An op in place keeps the type of the tensor that it writes, which views and autograd hold on to.
            if func._schema.is_mutable:
                return self._run_mutable(func, args, kwargs)
            # A generator draws other numbers for float64 than for float32.
            if _is_random(func, args, kwargs):
                return func(*cast_floats(torch.float32, args), **cast_floats(torch.float32, kwargs))
            wide_kwargs = {
                name: torch.float64 if isinstance(value, torch.dtype) and value in narrow_dtypes else value
                for name, value in cast_floats(torch.float64, kwargs).items()
            }
            wide_args = cast_floats(torch.float64, args)
            try:
                outputs = func(*wide_args, **wide_kwargs)
            # There is no kernel for float64.
            except (RuntimeError, NotImplementedError):
                names_of_float32_ops.add(str(func))
                return func(*cast_floats(torch.float32, args), **cast_floats(torch.float32, kwargs))
            for argument, original, wide in zip(func._schema.arguments, args, wide_args, strict=False):
                if argument.name in written_statistics and original is not None:
                    original.copy_(wide)  # a normalisation writes into them, and its schema does not say so
            return outputs

        def _run_mutable(self, func: Any, args: Any, kwargs: Any) -> Any:
            """Run an op in place in the element type of the tensor that it writes."""
            arguments = {argument.name: argument for argument in func._schema.arguments}
            values_by_name = {**dict(zip(arguments, args, strict=False)), **kwargs}
            aliases = {name: arguments[name].alias_info for name in values_by_name}
            written_names = {name for name, alias in aliases.items() if alias is not None and alias.is_write}
            written_tensors = torch_tensors(values_by_name[name] for name in written_names)
            dtype = next((x.dtype for x in written_tensors if x.is_floating_point()), None)
            if dtype is None:
                return func(*args, **kwargs)
            cast_by_name = {
                name: x if name in written_names else cast_floats(dtype, x)
                for name, x in values_by_name.items()
            }
            positional = [cast_by_name.pop(name) for name in list(arguments)[: len(args)]]
            return func(*positional, **cast_by_name)

    def _is_random(func: Any, args: Any, kwargs: Any) -> bool:
        """Return True for ops that draw random numbers, and not for attention without dropout."""
        names = (argument.name for argument in func._schema.arguments)
        values_by_name = {**dict(zip(names, args, strict=False)), **kwargs}
        is_exact_attention = "scaled_dot_product" in str(func) and not values_by_name.get("dropout_p")
        return torch.Tag.nondeterministic_seeded in func.tags and not is_exact_attention

    def _copies_or_views(func: Any) -> bool:
        """Return True for views, for copies, and where autograd converts a gradient to the type of a leaf."""
        if func is torch.ops.aten._to_copy.default:
            return torch._C._current_graph_task_id() != _NO_BACKWARD_TASK
        # A view has to stay one: a copy in float64 would not see writes into its base.
        aliases = (value.alias_info for value in func._schema.returns)
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        # `_unsafe_view` is a view into which kron writes, though its schema does not say so.
        return is_view or func in (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)

    class PromotionMode(TorchFunctionMode):
        """Cast the inputs of a function that raises for mixed element types before any kernel runs."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Call a function; if it raises for mixed types, again in float64, and writes its `out`."""
            kwargs = kwargs or {}
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                tensors = torch_tensors((args, kwargs), structures=True)
                dtypes = {x.dtype for x in tensors if x.is_floating_point()}
                # Functions in Python check that types are equal, and one input is float64 already; what
                # writes in place must not write into a copy.
                if len(dtypes) < 2 or func.__name__.endswith("_"):
                    raise
                with amanda.disabled():
                    wide_args, wide_kwargs = cast_floats(torch.float64, (args, kwargs))
                outputs = func(*wide_args, **wide_kwargs)
                originals, copies = (torch_tensors([options.get("out")]) for options in (kwargs, wide_kwargs))
                with amanda.disabled():
                    for original, wide in zip(originals, copies, strict=True):
                        original.resize_(wide.shape).copy_(wide)
                original_by_id = dict(zip(map(id, copies), originals, strict=True))
                return tree_map_only(torch.Tensor, lambda x: original_by_id.get(id(x), x), outputs)

    stack = ExitStack()
    stack.enter_context(Float64Mode())  # type: ignore[no-untyped-call]
    stack.enter_context(PromotionMode())
    return stack


class OpaqueTool(amanda.Tool):
    """Takes ops out of compiled code, in the order of analysis from `first` on: each calls the eager op."""

    remarks = ()

    def __init__(self, first: int) -> None:
        super().__init__()
        self._compiled_count = first
        self._analysed_op_ids: set[int] = set()
        self.add_inst_for_op(self._take_out)

    def _take_out(self, context: amanda.OpContext) -> None:
        """Replace an op by a call of its eager version, if it comes after the first ones."""
        if context.get_op_id() not in self._analysed_op_ids:
            self._analysed_op_ids.add(context.get_op_id())
            if len(self._analysed_op_ids) > self._compiled_count:
                # The op itself; as a routine it is outside of compiled code.
                context.replace_op(lambda *inputs, op: op(*inputs), op=context.get_op())


def find_failing_op(record: Callable[[ToolAndOptions], Run], error: Exception) -> tuple[Run, int]:
    """Find the op that makes a program fail where it is compiled; return a run without failure, its index.

    In that run the op and all later ones are eager.  record: runs the program under a tool.  Raises `error`,
    which the program raised, where that has another reason: no op compiled fails too, or all of them do not.
    """
    run_by_compiled_count: dict[int, Run] = {}

    def does_fail(compiled_count: int) -> bool:
        """Run the program with so many ops compiled; return True if it fails, and keep the run if not.

        Raises `error` where the program fails with an error of another type.
        """
        try:
            run_by_compiled_count[compiled_count] = record((OpaqueTool, {"first": compiled_count}))
        except Exception as caught:
            if type(caught) is not type(error):
                raise error from caught
            return True
        return False

    if does_fail(0):
        raise error
    # The tool counts analyses of forward ops, in the order in which a dump has these.
    op_count = len(_forward_op_indices(run_by_compiled_count[0]))
    # Each try runs the whole program: bisection takes the logarithm of the number of ops.
    working_count = bisect_left(range(1, op_count + 1), True, key=does_fail)
    if working_count == op_count:
        raise error
    run = run_by_compiled_count[working_count]
    return run, _forward_op_indices(run)[working_count]


def _forward_op_indices(run: Run) -> list[int]:
    return [index for index, op in enumerate(run.ops) if op.phase != "backward"]


Place = tuple[str, str, str, str, int]
"""Phase, type, module and line of an op, and its number among those that are equal in these."""


def place_of(ops: Sequence[Op], index: int) -> Place:
    """Return the place of an op of a dump, by which a run of the same program finds the op again."""
    places_without_number = [(op.phase, op.type, op.module, op.source) for op in ops[: index + 1]]
    return (*places_without_number[index], places_without_number.count(places_without_number[index]) - 1)


class ReplacedTool(amanda.Tool):
    """Replace the outputs, or the gradients, of an op by those that an op had in another run.

    source, op: folder of a dump with full tensors, and the index of an op in it.  target, target_op: folder
    of a dump of the program that is run now, and the index of the op in it whose values are replaced.

    reasons: why some executions have their own values.
    """

    def __init__(self, source: Path, op: int, target: Path, target_op: int) -> None:
        super().__init__()
        self.reasons: set[str] = set()
        self._dump = Dump(source)
        self._entries_by_execution: dict[int, list[Entry]] = {}
        for entry in self._dump:
            if entry.op == op and entry.role in OUTPUT_ROLES:
                self._entries_by_execution.setdefault(entry.execution, []).append(entry)
        self._target_place = place_of(Dump(target).ops, target_op)
        self._place_by_op: dict[tuple[int, int | None], Place] = {}
        self._count_by_place: Counter[tuple[str, str, str, str]] = Counter()
        self._execution_count = 0
        self.depends_on(StandardMapping())
        self.add_inst_for_op(self._replace_forward)
        self.add_inst_for_op(self._replace_backward, backward=True)

    @property
    def remarks(self) -> list[str]:
        return [f"an op kept values of its own: {', '.join(sorted(self.reasons))}"] if self.reasons else []

    def _replace_forward(self, context: amanda.OpContext) -> None:
        if self._is_target(context, context["phase"], context["type"]):
            context.insert_after_op(self._replace_outputs, dtype=context["dtype"])

    def _replace_backward(self, context: amanda.OpContext) -> None:
        kind = context["backward_type"]
        if kind != "accumulate_grad" and self._is_target(context, "backward", kind):
            context.insert_after_backward_op(self._replace_outputs, dtype=context["dtype"])

    def _is_target(self, context: amanda.OpContext, phase: str, kind: str) -> bool:
        """Return True for the op whose place is that of the replaced op; count ops of equal places."""
        op_key = context.get_op_id(), context.get_backward_op_id()
        # A program meets its ops in the same order again, so equal ops are told apart by their number.
        if op_key not in self._place_by_op:
            line_place = phase, kind, context.get_scope(), context.get_source()
            self._place_by_op[op_key] = (*line_place, self._count_by_place[line_place])
            self._count_by_place[line_place] += 1
        return self._place_by_op[op_key] == self._target_place

    def _replace_outputs(self, *values: Any, dtype: Any) -> list[Any] | None:
        """Return the other run's values of the next execution; None, with a reason, if they do not fit."""
        entries = self._entries_by_execution.get(self._execution_count, [])
        self._execution_count += 1
        outputs = list(op_tensors(values, dtype))
        pairs = [(output, self._dump.array(entry)) for output, entry in zip(outputs, entries, strict=False)]
        # A flat index beyond the position: a list among the outputs, or before.
        if len(outputs) != len(entries) or any(output.position != output.flat_index for output in outputs):
            self.reasons.add("it gives other tensors than in a, or lists")
        elif any(array is None or array.shape != tuple(output.tensor.shape) for output, array in pairs):
            self.reasons.add("it gives tensors of other shapes than in a")
        else:
            new_values = list(values)
            for output, array in pairs:
                new_values[output.position] = _cast(array, output.tensor)
            return new_values
        return None


def _cast(array: NDArray[Any] | None, like: Any) -> Any:
    """Return numbers as a tensor like another; those of a type that NumPy lacks go through float32."""
    assert array is not None
    numpy_array = array if array.dtype.isbuiltin == 1 else array.astype("float32")
    return tensors_of(like).cast(numpy_array.copy(), like)
