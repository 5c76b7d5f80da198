"""The tool: saves and changes the tensors at selected points."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
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
from amanda.tools.patch._region import PatchError, Region, is_value
from amanda.tools.patch._result import Patched, PatchResult
from amanda.tools.select import Globs, ModulePaths, Paths, Selection, as_remarks, unmatched
from amanda.tools.steps import execution_number

logger = logging.getLogger("amanda")
_SHOWN = 40
_VALUES = "a tensor, a list with a value for each execution, a dict of these by point, a PatchTool"
Value: TypeAlias = (
    AnyFloat
    | Annotated[Any, Where(_VALUES, lambda value: isinstance(value, PatchTool) or is_value(value))]
    | None
)


class PatchTool(amanda.Tool):
    """Save or change tensors at points of a model; `saved` holds saved values, `result` is a table.

    points: paths of modules whose own calls are the points: "model.layers.1", "model.layers.*", where `*`
        stands within a part; "" is the model.  side: the "output" of the calls, or the "input", their
        positional arguments.  index: number of the tensor, counted through nested tuples and dicts; None for
        all.
    type: words of StandardMapping or names of the framework.  The points are then the ops of these types, in
        the modules of `points`, where given, and in what lies in them.
    module, exclude: globs of paths of modules: points, or ops, that are of a module or lie in it, and those
        that are left.  Without `points` and `type` the points are the calls of all modules in `module`.
    set: the new value.  add: the summand.  scale: the factor.  At most one of the three; without any, values
        are saved.  A value is a number, nan and inf too, a tensor that broadcasts, a list with a value for
        each execution, a dict of these by point name, or a `PatchTool` that has saved values.
    positions: along `axis`, the axis of tokens; negative ones count from the end.  heads: numbers of heads,
        which are `num_heads` equal parts of the last axis.  None for all.
    steps: executions of a point, from 0; in `generate` 0 is the prompt.  None for all.
    differentiable: include changes and saved values in autodiff.  By default a gradient passes a changed
        value unchanged.

    Raises PatchError for contradictory options, and if nothing was selected when the scope closes.
    """

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
        edits = {"set": set, "add": add, "scale": scale}
        given = {name: value for name, value in edits.items() if value is not None}
        if len(given) > 1:
            raise PatchError(
                f"{' and '.join(given)} are given; an intervention has one of set, add and scale"
            )
        self._edit: str = next(iter(given), "save")
        self._value: Any = given.get(self._edit)
        self.region = Region.of(positions, heads, num_heads, axis)
        if self._edit == "save" and not self.region.is_all:
            raise PatchError("positions and heads are for set, add and scale; values are saved whole")
        self.only: frozenset[str] | None = None
        """Names of the points to change; None for all.  Read at each execution."""
        self._side, self._index = side, index
        self._steps = None if steps is None else frozenset([steps] if isinstance(steps, int) else steps)
        self._is_point = type is None
        self._points = (ModulePaths if self._is_point else Paths)("points", points)
        self._selection = Selection(type, module, exclude=exclude)
        self._ends = tuple(one.rpartition(".")[2] for one in self._points.patterns or ("*",))
        self._differentiable = differentiable
        self._paths: dict[str, None] = {}
        self._is_placed = False
        self._records: dict[tuple[int, int], Patched] = {}
        self._remarks: dict[str, None] = {}
        self.saved: dict[str, list[Any]] = {}
        self._is_trained = any(map(requires_gradient, _values(self._value)))
        if self._is_trained and not differentiable:
            self._warn(
                f"the value of {self._edit} requires a gradient and gets none: give differentiable=True"
            )
        self.depends_on(StandardMapping(), point_rules())
        self.add_inst_for_op(self._analyse)

    @property
    def is_copied_when_used(self) -> bool:  # type: ignore[override]
        """True unless saved values take part in autodiff."""
        return not self._differentiable

    @property
    def result(self) -> PatchResult:
        """Return a table of the points so far."""
        result = PatchResult(list(self._records.values()), f"Points: {self._edit}")
        result.remarks = [*self._remarks, *as_remarks(self.unmatched())]
        return result

    def unmatched(self) -> list[str]:
        """Return a sentence for each pattern that no point fitted; an error tells of no point at all."""
        if not self._records:
            return super().unmatched()
        points = unmatched([self._points], noun="point")
        return [*super().unmatched(), *points, *self._selection.unmatched()]

    def clear(self) -> None:
        """Drop saved values, and count executions from 0; analysed ops stay analysed."""
        self.saved.clear()
        for record in self._records.values():
            record.executions = record.changed = record.skipped = 0

    def mean(self, axes: Sequence[int] = (0, 1)) -> dict[str, Any]:
        """Return the mean of each saved point over axes and executions, as a value for `set`."""
        found = {}
        for name, values in self.saved.items():
            arrays = [np.asarray(tensors_of(one).to_numpy(one), np.float64) for one in values]
            moved = [one.sum(tuple(axes), keepdims=True) for one in arrays]
            count = sum(one.size // some.size for one, some in zip(arrays, moved, strict=True))
            found[name] = tensors_of(values[0]).cast(sum(moved) / count, values[0])
        return found

    def scope_entered(self) -> None:
        """Make the selected modules call their points."""
        if self._is_point:
            POINTS[self._side].open(self._ends, self._edit != "save")

    def scope_left(self) -> None:
        """Remove the points; raise PatchError if ops ran, and nothing was selected."""
        if self._is_point:
            POINTS[self._side].close(self._ends, self._edit != "save")
        if not self._records and self._paths and sys.exc_info()[0] is None:
            raise PatchError(self._nothing())

    def _nothing(self) -> str:
        options = [str(self._points) if self._points.patterns is not None else "", str(self._selection)]
        wanted = " and ".join(filter(None, options))
        paths = sorted({path[:end] for path in self._paths for end in _ends(path)} - {""})
        shown = ", ".join(paths[:_SHOWN]) + f" and {len(paths) - _SHOWN} more" * (len(paths) > _SHOWN)
        side = f" with a tensor {self._index} of its {self._side}" if self._is_point else ""
        hint = NOT_A_POINT if self._is_point and self._is_placed else ""
        if self._is_point and any(map(self._has_path, POINTS[self._side].by_keyword)):
            hint = BY_KEYWORD
        return f"PatchTool selected nothing: no op is at {wanted}{side}{hint}; there are the modules {shown}"

    def _has_path(self, path: str) -> bool:
        return self._points(path) and self._selection.has_path(path)

    def _analyse(self, context: amanda.OpContext) -> None:
        paths = context.get_scopes()
        self._paths.update(dict.fromkeys(paths))
        is_selected = self._points(*paths) and self._selection.fits(context)
        self._is_placed = self._is_placed or is_selected
        if not is_selected:
            return
        if self._is_point:
            side, index = context["point"] or ("", 0)
            if side == self._side and self._index in (None, index):
                self._insert(context, context.get_scope(), index, 0)
        elif context["point"] is None:
            values = context.get_inputs() if self._side == "input" else [None] * ((self._index or 0) + 1)
            chosen = range(len(values)) if self._index is None else [self._index]
            for position in chosen:
                if self._side == "output" or context["dtype"](values[position]) is not None:
                    self._insert(context, self.place(context), position, position)

    def _insert(self, context: amanda.OpContext, place: str, index: int, position: int) -> None:
        name = f"{place}[{index}]" if index else place
        key = context.get_op_id(), index
        if key not in self._records:
            kind, source = (context["type"], context.get_source()) if not self._is_point else ("module", "")
            self._records[key] = Patched(context["phase"], kind, context.get_scope(), source, name)
        if self._differentiable and self._is_trained and not context["reaches_values"]:
            self._warn(
                f"no gradient reaches the value of {self._edit} in graphs of {context.namespace[0]}, as at "
                f"{name}: run the model eagerly"
            )
        routine: Any = self._save if self._edit == "save" else self._change
        if self._differentiable:
            routine = amanda.differentiable(_unbound(routine))
        elif self._edit == "save":
            routine = amanda.observer(_unbound(routine))
        given: dict[str, Any] = {"record": self._records[key]}
        if not context.is_eager():
            given["run"] = None
        if self._is_point or self._side == "output":
            context.insert_after_op(routine, outputs=[position], **given)
        else:
            context.insert_before_op(routine, inputs=[position], **given)

    def _save(self, value: Any, record: Patched, run: dict[Any, Any] | None, recomputed: bool) -> None:
        step = execution_number(record, run, recomputed)
        if not recomputed and (self._steps is None or step in self._steps):
            kept = value if self._differentiable else tensors_of(value).detach(value)
            self.saved.setdefault(record.point, []).append(copied(kept))

    def _change(self, value: Any, record: Patched, run: dict[Any, Any] | None, recomputed: bool) -> Any:
        step = execution_number(record, run, recomputed)
        if (self._steps is not None and step not in self._steps) or not self._is_chosen(record):
            return None
        tensors = tensors_of(value)
        shape = tensors.extents(value)
        mask = self.region.mask(shape, record.point)
        if mask is None:
            record.skipped += not recomputed
            return None
        given = self._given(record.point, step)
        self._check_fits(given, shape, record)
        record.changed += not recomputed
        changed = self._edited(value, given)
        if self._edit == "set" or not self.region.is_all:
            changed = tensors.where(tensors.beside(mask, value), changed, value)
        if self._differentiable and self._is_trained and not getattr(changed, "requires_grad", True):
            self._warn(f"no gradient reaches the value of {self._edit}: autodiff is off at {record.point}")
        return changed

    def _check_fits(self, given: Any, shape: Sequence[int], record: Patched) -> None:
        """Raise PatchError for a value that does not broadcast to a shape, and for a saved one of another.

        Saved values may have one row for all rows of a batch, but a prompt of one token is not all tokens.
        """
        extents = tuple(tensors_of(given).extents(given)) if hasattr(given, "shape") else np.shape(given)
        try:
            fits = np.broadcast_shapes(extents, tuple(shape)) == tuple(shape)
        except ValueError:
            fits = False
        is_saved = isinstance(self._value, PatchTool) and len(extents) == len(shape)
        if fits and not (is_saved and extents[1:] != tuple(shape)[1:]):
            return
        op = f"the {record.type} {record.module}" if record.module else f"{record.type} of the model"
        saved = (
            f"the value that was saved for {self._edit}" if is_saved else f"the value given as {self._edit}"
        )
        advice = (
            "save it from inputs of the same shape, or give the part that is meant, such as "
            f"{self._edit}=clean.saved[{record.point!r}][0][:, -1:], as a tensor, which is broadcast"
            if is_saved else "give a tensor that broadcasts to this shape, or a number"
        )  # fmt: skip
        raise PatchError(
            f"{saved} has shape {extents} and does not fit {record.point}, whose shape is {tuple(shape)}, "
            f"at {op}; {advice}"
        )

    def _is_chosen(self, record: Patched) -> bool:
        return self.only is None or record.point in self.only

    def _edited(self, value: Any, given: Any) -> Any:
        if self._edit == "scale":
            return value * (tensors_of(value).cast(given, value) if hasattr(given, "shape") else given)
        made = tensors_of(value).cast(given, value)
        return value + made if self._edit == "add" else made

    def _given(self, point: str, step: int) -> Any:
        """Return the value for an execution of a point."""
        value = self._value.saved if isinstance(self._value, PatchTool) else self._value
        if isinstance(value, Mapping):
            if point not in value:
                raise PatchError(
                    f"{self._edit} has no value for {point}; it has {', '.join(value) or 'none'}"
                )
            value = value[point]
        if isinstance(value, list):
            if step >= len(value):
                raise PatchError(
                    f"{self._edit} has {len(value)} values for {point}, which executes more often; "
                    "select executions with steps, or give one value instead of a list"
                )
            value = value[step]
        return value

    def _warn(self, text: str) -> None:
        sentence = text[0].upper() + text[1:] + "."
        if sentence not in self._remarks:
            self._remarks[sentence] = None
            logger.warning("PatchTool: %s", text)


def _ends(path: str) -> list[int]:
    return [*(i for i, letter in enumerate(path) if letter in "./"), len(path)]


def _values(given: Any) -> list[Any]:
    """Return the tensors in a value of an option."""
    return leaves([given.saved if isinstance(given, PatchTool) else given], structures=True)


def _unbound(method: Any) -> Any:
    """Return a function that calls a method, to be marked for this tool alone."""

    def routine(value: Any, record: Patched, run: dict[Any, Any] | None, *, recomputed: bool) -> Any:
        return method(value, record, run, recomputed)

    return routine
