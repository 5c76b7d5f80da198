"""The tool that saves or changes tensors at selected points."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import amanda
from amanda.options import AnyFloat, NonNegativeInt, PositiveInt, Where, checked
from amanda.tools.kit import leaves, tensors_of
from amanda.tools.libraries import numpy as np
from amanda.tools.mapping import StandardMapping
from amanda.tools.patch._frameworks import (
    BY_KEYWORD,
    NOT_A_POINT,
    POINTS,
    Side,
    copied,
    point_rules,
    requires_gradient,
)
from amanda.tools.patch._result import (
    Patched,
    PatchError,
    PatchResult,
    Region,
    ValuesByPoint,
    is_value,
)
from amanda.tools.results import count_of
from amanda.tools.select import Globs, ModulePaths, Paths, Selection, as_remarks, unmatched
from amanda.tools.steps import execution_number

logger = logging.getLogger("amanda")
_MAX_MODULES = 40
_VALUES = "a tensor, a list with a value for each execution, a dict of these by point, a PatchTool"
Value: TypeAlias = (
    AnyFloat
    | Annotated[Any, Where(_VALUES, lambda value: isinstance(value, PatchTool) or is_value(value))]
    | None
)


class PatchTool(amanda.Tool):
    """Save or change tensors at modules or ops.

    Args:
        points: Paths of modules whose calls are the points: "model.layers.1", "model.layers.*", where `*`
            matches no dot; "" is the model.
        side: The "output" of the calls, or the "input", their positional arguments.
        index: Position of the tensor after nested tuples, lists and dicts are flattened; None for all.
        type: Op types, as StandardMapping or the framework names them.  The points are then the ops of these
            types, in the modules of `points` and in their submodules.
        module: Globs of module paths; only points in `module` and not in `exclude` are used.  Without
            `points` and `type` the points are the calls of all modules in `module`.
        exclude: See `module`.
        set: The new value.
        add: A value to add.
        scale: A factor.  Give at most one; without any, values are saved.  A value is a number (or nan, inf),
            a tensor that broadcasts, a list with one value for each execution, a dict from point names to
            these, or a `PatchTool` that has saved values.
        positions: Indices to change along `axis`, the token axis; negative indices count from the end.
            None for all.
        heads: Indices of heads to change, of `num_heads` equal parts of the last axis.  None for all.
        num_heads: See `heads`.
        axis: Axis of tokens; 1 in tensors of (batch, tokens, features).
        steps: Executions of a point, from 0; in `generate` 0 is the prompt.  None for all.
        differentiable: Include changes and saved values in autodiff.  By default the gradient of a changed
            value goes to the old value.

    Raises:
        PatchError: For contradictory options, and if nothing was selected when the scope closes.
    """

    purpose = "change"

    @checked(error=PatchError)
    def __init__(
        self,
        points: Sequence[str] | str | None = None,
        side: Side = "output",
        index: NonNegativeInt | None = 0,
        type: Globs = None,
        set: Value = None,
        add: Value = None,
        scale: Value = None,
        positions: list[int] | int | None = None,
        heads: list[int] | int | None = None,
        num_heads: PositiveInt | None = None,
        axis: int = 1,
        steps: list[NonNegativeInt] | NonNegativeInt | None = None,
        differentiable: bool = False,
        module: Globs = None,
        exclude: Globs = None,
    ) -> None:
        super().__init__()
        if points is None and module is None and type is None:
            raise PatchError("no points and no type; give a module such as 'model.layers.1', a type, or both")
        self._edit, self._value = _check_edit(set, add, scale)
        self.region = Region.of(positions, heads, num_heads, axis)
        if self._edit == "save" and not self.region.is_all:
            raise PatchError("positions and heads are for set, add and scale; values are saved whole")
        self.only: frozenset[str] | None = None
        """Names of the points to change; None for all.  Read at each execution."""
        self._side, self._index = side, index
        self._steps = None if steps is None else frozenset([steps] if isinstance(steps, int) else steps)
        self._selects_modules = type is None  # else ops
        self._point_patterns = (ModulePaths if self._selects_modules else Paths)("points", points)
        self._selection = Selection(type, module, exclude=exclude)
        # Modules test the ends alone: `*` when points are not given.
        self._end_patterns = tuple(
            path.rpartition(".")[2] for path in self._point_patterns.patterns or ("*",)
        )
        self._differentiable = differentiable
        self._seen_paths: dict[str, None] = {}
        self._has_selected_op = False
        self._record_by_point: dict[tuple[int, int], Patched] = {}
        self._remarks: dict[str, None] = {}
        self.saved: dict[str, list[Any]] = ValuesByPoint()
        # Tensors of the value may be trained, such as a vector that is added.
        value = self._value.saved if isinstance(self._value, PatchTool) else self._value
        self._has_trained_value = any(map(requires_gradient, leaves([value], structures=True)))
        if self._has_trained_value and not differentiable:
            self._warn(
                f"the value of {self._edit} requires a gradient and gets none: give differentiable=True"
            )
        self.depends_on(StandardMapping(), point_rules())
        self.add_inst_for_op(self._analyze_op)

    @property
    def is_copied_when_used(self) -> bool:  # type: ignore[override]
        """True unless saved values take part in autodiff."""
        return not self._differentiable

    @property
    def result(self) -> PatchResult:
        """Return a table of the points with their counts so far, with remarks on unmatched patterns."""
        records = list(map(copy.copy, list(self._record_by_point.values())))
        result = PatchResult(records, f"Points: {self._edit}")
        result.remarks = [*self._remarks, *as_remarks(self.unmatched())]
        return result

    def unmatched(self) -> list[str]:
        """Return a sentence for each pattern that no point fitted.

        None on points if no point ran at all: that is an error when the scope closes.
        """
        if not self._record_by_point:
            return super().unmatched()
        points = unmatched([self._point_patterns], noun="point")
        return [*super().unmatched(), *points, *self._selection.unmatched()]

    def clear(self) -> None:
        """Drop saved values, and count executions from 0; analysed ops stay analysed."""
        self.saved.clear()
        for record in self._record_by_point.values():
            record.executions = record.changed = record.skipped = 0

    def mean(self, axes: Sequence[int] = (0, 1)) -> dict[str, Any]:
        """Return the mean of each saved point over axes and executions, as a value for `set`.

        Means are computed in float64, and have the element type and device of the point's first value.

        Args:
            axes: Axes over which the mean is taken; they stay with an extent of 1.
        """
        means = {}
        for name, values in self.saved.items():
            # In float64, as a sum over many tokens loses bits in half precision.
            arrays = [np.asarray(tensors_of(value).to_numpy(value), np.float64) for value in values]
            sums = [array.sum(tuple(axes), keepdims=True) for array in arrays]
            count = sum(array.size // total.size for array, total in zip(arrays, sums, strict=True))
            means[name] = tensors_of(values[0]).cast(sum(sums) / count, values[0])
        return means

    def scope_entered(self) -> None:
        """Make the selected modules call their points."""
        if self._selects_modules:
            POINTS[self._side].open(self._end_patterns, self._edit != "save")

    def scope_left(self) -> None:
        """Remove the points; raise PatchError if ops ran without an exception, and nothing was selected."""
        if self._selects_modules:
            POINTS[self._side].close(self._end_patterns, self._edit != "save")
        # An exception of the program goes on its way; a scope without ops says nothing about the selection.
        if not self._record_by_point and self._seen_paths and sys.exc_info()[0] is None:
            raise PatchError(self._nothing_selected())

    def _nothing_selected(self) -> str:
        """Return the text of the error for options that selected nothing."""
        options = [
            str(self._point_patterns) if self._point_patterns.patterns is not None else "",
            str(self._selection),
        ]
        selection = " and ".join(filter(None, options))
        # Each path with those of the modules around it.
        paths = sorted({path[:end] for path in self._seen_paths for end in _prefix_ends(path)} - {""})
        more = f" and {len(paths) - _MAX_MODULES} more" if len(paths) > _MAX_MODULES else ""
        modules = ", ".join(paths[:_MAX_MODULES]) + more
        side = f" with a tensor {self._index} of its {self._side}" if self._selects_modules else ""
        hint = NOT_A_POINT if self._selects_modules and self._has_selected_op else ""
        if self._selects_modules and any(map(self._has_path, POINTS[self._side].by_keyword)):
            hint = BY_KEYWORD
        place = f"{selection}{side}{hint}"
        return f"PatchTool selected nothing: no op is at {place}; there are the modules {modules}"

    def _has_path(self, path: str) -> bool:
        """Return True if the options select the path of a module."""
        return self._point_patterns(path) and self._selection.has_path(path)

    def _analyze_op(self, context: amanda.OpContext) -> None:
        """Insert the routines of an op that is a selected point, or has selected tensors.

        Also records the op's paths, for the error of a selection without a point.  Raises PatchError for the
        index of an input that the op does not have.
        """
        paths = context.get_scopes()
        self._seen_paths.update(dict.fromkeys(paths))
        is_selected = self._point_patterns(*paths) and self._selection.fits(context)
        self._has_selected_op = self._has_selected_op or is_selected
        if not is_selected:
            return
        point: tuple[str, int] | None = context["point"]  # side and index, if the op is a module's point
        if self._selects_modules:  # by the identity ops that are their points, with one tensor each
            if point is not None:
                side, index = point
                if side == self._side and self._index in (None, index):
                    self._insert_routine(context, context.get_scope(), index, position=0)
        elif point is not None:
            return  # ops of the program are selected, and a point is none
        elif self._side == "output":
            is_first_output = self._index == 0 and not context["may_return_lists"]
            self._insert_routine(context, self.place(context), self._index, 0 if is_first_output else None)
        else:
            self._insert_before(context)

    def _insert_before(self, context: amanda.OpContext) -> None:
        """Insert the routines of the selected inputs; raise PatchError for an index that no input has."""
        count, dtype, place = 0, context["dtype"], self.place(context)
        for position, value in enumerate(context.get_inputs()):
            values = leaves([value])
            has_tensor = any(dtype(leaf) is not None for leaf in values)
            # Numbers in a list, such as extents, are one input.
            is_list = has_tensor and isinstance(value, (list, tuple))
            first, count = count, count + (len(values) if is_list else 1)
            if has_tensor and (self._index is None or first <= self._index < count):
                if is_list:
                    self._insert_routine(context, place, self._index, position, first)
                else:
                    self._insert_routine(context, place, first, position)
        if self._index is not None and self._index >= count:
            raise _no_such_tensor(self._index, place, count, "input")

    def _insert_routine(
        self, context: amanda.OpContext, place: str, index: int | None, position: int | None,
        first: int | None = None,
    ) -> None:  # fmt: skip
        """Insert the routine that saves or changes a tensor, with a new record of its point at first.

        Warns where no gradient reaches a value that is trained.

        place: name of the module or op.  index: of the tensor at that side of it; None for all tensors.
        position: of the value among the inputs or outputs of the context's op; None for all outputs.
        first: of a list at the position, the index of its first tensor; None for a tensor.
        """
        kind = "module" if self._selects_modules else context["type"]
        source = "" if self._selects_modules else context.get_source()
        op_id, labels = context.get_op_id(), (context["phase"], kind, context.get_scope(), source)

        def record_at(index: int) -> Patched:
            """Return the record of a tensor's point, a new one at first."""
            name = f"{place}[{index}]" if index else place
            return self._record_by_point.setdefault((op_id, index), Patched(*labels, name))

        record = record_at((first or 0) if index is None else index)
        if self._differentiable and self._has_trained_value and not context["reaches_values"]:
            self._warn(
                f"no gradient reaches the value of {self._edit} in graphs of {context.namespace[0]}, as at "
                f"{record.point}: run the model eagerly"
            )
        method: Any = self._save_value if self._edit == "save" else self._change_value
        if position is None or first is not None:
            # Each execution may have another number of outputs, which is not known before the op has run.
            routine = _make_function_of_all(method, record_at, context["dtype"], index, first or 0, place)
            keywords: dict[str, Any] = {}
        else:
            routine, keywords = _make_function(method), {"record": record}
        if self._differentiable:
            routine = amanda.differentiable(routine)
        elif self._edit == "save":
            routine = amanda.observer(routine)
        # Ops of graphs do not run again in a backward pass, so executions are counted without `run`.
        if not context.is_eager():
            keywords["run"] = None
        positions = None if position is None else [position]
        if self._selects_modules or self._side == "output":
            context.insert_after_op(routine, outputs=positions, **keywords)
        else:
            context.insert_before_op(routine, inputs=positions, **keywords)

    def _save_value(self, value: Any, record: Patched, run: dict[Any, Any] | None, recomputed: bool) -> None:
        """Count an execution; save a copy of its value if it is selected, detached unless differentiable."""
        step = execution_number(record, run, recomputed)
        if not recomputed and (self._steps is None or step in self._steps):
            # Detached, so that a saved value does not keep the graph of the whole pass alive.
            tensor = value if self._differentiable else tensors_of(value).detach(value)
            self.saved.setdefault(record.point, []).append(copied(tensor))

    def _change_value(self, value: Any, record: Patched, run: dict[Any, Any] | None, recomputed: bool) -> Any:
        """Count an execution and return the changed value; None if point, step or region is not selected.

        Raises PatchError for a point without a value, or a value of another shape.  Warns where autodiff is
        off and the value is trained.
        """
        step = execution_number(record, run, recomputed)
        if self._steps is not None and step not in self._steps:
            return None
        if self.only is not None and record.point not in self.only:
            return None
        tensors = tensors_of(value)
        shape = tensors.extents(value)
        mask = self.region.mask(shape, record.point)
        if mask is None:
            # Counted once, though a checkpoint runs the op twice.
            if not recomputed:
                record.skipped += 1
            return None
        operand = self._operand_at(record.point, step)
        self._check_shape(operand, shape, record)
        if not recomputed:
            record.changed += 1
        new_value = self._apply_edit(value, operand)
        if self._edit == "set" or not self.region.is_all:
            # For `set` also where all is selected: the operand broadcasts to the shape of the value.
            new_value = tensors.where(tensors.beside(mask, value), new_value, value)
        if self._differentiable and self._has_trained_value and not getattr(new_value, "requires_grad", True):
            self._warn(f"no gradient reaches the value of {self._edit}: autodiff is off at {record.point}")
        return new_value

    def _check_shape(self, operand: Any, shape: Sequence[int], record: Patched) -> None:
        """Raise PatchError for a value that does not broadcast to the shape of a point.

        A saved value of equal rank has to have equal extents behind the batch: it may have one row for all
        rows of a batch, but a prompt of one token is not all tokens.
        """
        shape = tuple(shape)
        extents = (
            tuple(tensors_of(operand).extents(operand)) if hasattr(operand, "shape") else np.shape(operand)
        )
        try:
            broadcasts = np.broadcast_shapes(extents, shape) == shape
        except ValueError:
            broadcasts = False
        is_saved = isinstance(self._value, PatchTool) and len(extents) == len(shape)
        has_same_rows = extents[1:] == shape[1:]
        if not broadcasts or (is_saved and not has_same_rows):
            raise PatchError(self._wrong_shape(extents, shape, record, is_saved))

    def _wrong_shape(
        self, extents: Sequence[int], shape: Sequence[int], record: Patched, is_saved: bool
    ) -> str:
        """Return the text of the error for a value with extents that do not fit the shape of a point."""
        op = f"the {record.type} {record.module}" if record.module else f"{record.type} of the model"
        if is_saved:
            value = f"the value that was saved for {self._edit}"
            advice = (
                "save it from inputs of the same shape, or give the part that is meant, such as "
                f"{self._edit}=clean.saved[{record.point!r}][0][:, -1:], as a tensor, which is broadcast"
            )
        else:
            value = f"the value given as {self._edit}"
            advice = "give a tensor that broadcasts to this shape, or a number"
        return (
            f"{value} has shape {extents} and does not fit {record.point}, whose shape is {shape}, "
            f"at {op}; {advice}"
        )

    def _apply_edit(self, value: Any, operand: Any) -> Any:
        """Return the value with the operand added or multiplied; for `set` the operand, not broadcast.

        The operand is cast to the value's type.
        """
        if self._edit == "scale":
            # A plain number scales without a cast, which would round it to the element type first.
            return value * (tensors_of(value).cast(operand, value) if hasattr(operand, "shape") else operand)
        cast_operand = tensors_of(value).cast(operand, value)
        return value + cast_operand if self._edit == "add" else cast_operand

    def _operand_at(self, point: str, step: int) -> Any:
        """Return the value for an execution of a point, out of the dicts and lists that were given or saved.

        Raises PatchError for a point, or an execution, without a value.
        """
        values = self._value.saved if isinstance(self._value, PatchTool) else self._value
        if isinstance(values, Mapping) and point not in values:
            raise PatchError(f"{self._edit} has no value for {point}; it has {', '.join(values) or 'none'}")
        value_of_point = values[point] if isinstance(values, Mapping) else values
        if not isinstance(value_of_point, list):
            return value_of_point
        if step >= len(value_of_point):
            raise PatchError(
                f"{self._edit} has {len(value_of_point)} values for {point}, which executes more often; "
                "select executions with steps, or give one value instead of a list"
            )
        return value_of_point[step]

    def _warn(self, text: str) -> None:
        """Log a remark, and keep it for the result, once."""
        sentence = text[0].upper() + text[1:] + "."
        if sentence not in self._remarks:
            self._remarks[sentence] = None
            logger.warning("PatchTool: %s", text)


def _check_edit(set_value: Any, add_value: Any, scale_value: Any) -> tuple[str, Any]:
    """Return the edit with its value, "save" and None without one; raise PatchError for several."""
    edits = {"set": set_value, "add": add_value, "scale": scale_value}
    edit_values = [(name, value) for name, value in edits.items() if value is not None]
    if len(edit_values) > 1:
        names = " and ".join(name for name, _ in edit_values)
        raise PatchError(f"{names} are given; an intervention has one of set, add and scale")
    return edit_values[0] if edit_values else ("save", None)


def _prefix_ends(path: str) -> list[int]:
    """Return where the paths of the modules around a module end, and its own."""
    return [*(i for i, letter in enumerate(path) if letter in "./"), len(path)]


def _no_such_tensor(index: int, place: str, count: int, noun: str) -> PatchError:
    """Return the error about an index that no input or output of an op has."""
    return PatchError(
        f"index is {index} and {place} has {count_of(count, noun)}, counted from 0; "
        "give the index of one of them, or None for all"
    )


def _make_function(method: Any) -> Any:
    """Return a new function that calls a bound method: a mark on it is of this tool alone."""

    def routine(value: Any, record: Patched, run: dict[Any, Any] | None, *, recomputed: bool) -> Any:
        return method(value, record, run, recomputed)

    return routine


def _make_function_of_all(
    method: Any, record_at: Callable[[int], Patched], dtype: Callable[[Any], Any], selected: int | None,
    first: int, place: str,
) -> Any:  # fmt: skip
    """Return a new function that calls a bound method for tensors of an op's values, also of lists.

    record_at: return the record of the tensor at an index.  dtype: return None for what is no tensor.
    selected: index of the tensor; None for all.  first: index of the first one.  place: name of the op.
    """

    def routine(*values: Any, run: dict[Any, Any] | None, recomputed: bool) -> Any:
        results: list[Any] = []

        def apply_to(value: Any) -> Any:
            # An op of TensorFlow may have one output that is a list, such as Split.
            if type(value) in (list, tuple):
                return type(value)(map(apply_to, value))
            index = first + len(results)
            is_selected = selected in (None, index) and dtype(value) is not None
            results.append(method(value, record_at(index), run, recomputed) if is_selected else None)
            return value if results[-1] is None else results[-1]

        new_values = [apply_to(value) for value in values]
        if selected is not None and selected >= first + len(results):
            raise _no_such_tensor(selected, place, len(results), "output")
        return None if all(result is None for result in results) else new_values

    return routine
