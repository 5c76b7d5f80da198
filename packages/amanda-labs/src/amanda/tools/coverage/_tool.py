"""The tool that records which ops ran and which of them hooks at leaf modules would see, and its result."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ClassVar

import amanda
from amanda.options import checked
from amanda.tools.kit import RequiredNames
from amanda.tools.mapping import VOCABULARY, MappingTool, StandardMapping
from amanda.tools.results import Column, PlacesResult
from amanda.tools.select import SelectOptions, select

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEYS = ("phase", "type", "module", "source", "model")
_COUNTS = ("calls", "whole", "entered", "left")


@dataclass
class OpCoverage:
    """One op, forward or backward.

    model: class of the outermost module that calls the op.  calls: number of executions.  entered: executions
    whose inputs a hook would have seen.  left: those whose outputs.  whole: those with both.
    """

    phase: str
    type: str
    module: str
    source: str
    model: str
    calls: int = 0
    whole: int = 0
    entered: int = 0
    left: int = 0


class CoverageResult(PlacesResult[OpCoverage]):
    """Executions of ops, and those that hooks of modules would have seen.

    ops: one entry for each op.  by: the keys of a row, of `KEYS`.
    """

    name: ClassVar[str] = "coverage"
    keys: ClassVar[Sequence[str]] = KEYS
    _op_class = OpCoverage
    _summed = _COUNTS
    _counted: ClassVar[Sequence[Column]] = (
        *(Column(name, show="{:,}".format, total=True) for name in ("executed", "hooked", "entered", "left")),
        Column("share", show="{:.1%}".format, number=True, unit="share"),
    )

    def __init__(self, places: Iterable[OpCoverage], by: Sequence[str] = KEYS) -> None:
        self.ops = [place for place in places if place.calls]
        self._set_keys(by, "Ops that hooks of modules see")

    def total(self, what: str = "calls", phase: str | None = None) -> int:
        """Return the number of executions.

        Args:
            what: "calls", all; "whole", those that hooks see whole; "entered" or "left", those of which hooks
                see the inputs or the outputs alone.
            phase: "forward" or "backward"; None for both.
        """
        return sum(getattr(place, what) for place in self.ops if phase in (None, place.phase))

    def share(self, phase: str | None = None) -> float:
        """Return the share of executions that hooks see whole, from 0 to 1; 1 if nothing was executed.

        Args:
            phase: "forward" or "backward"; None for both.
        """
        calls = self.total("calls", phase)
        return self.total("whole", phase) / calls if calls else 1.0

    @property
    def types(self) -> Mapping[str, int]:
        """Types of forward ops with their executions, the most frequent first."""
        counts = Counter[str]()
        for place in self.ops:
            if place.phase == "forward":
                counts[place.type] += place.calls
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def without_word(self) -> Mapping[str, int]:
        """Executions by the framework's own type, of forward ops for which StandardMapping has no word."""
        return {kind: calls for kind, calls in self.types.items() if kind not in VOCABULARY}

    def rows(self) -> Sequence[Sequence[Any]]:
        """Return rows by their keys, those with most executions first."""
        rows = []
        for key, ops in self._grouped(self.ops).items():
            sums = {count: sum(getattr(op, count) for op in ops) for count in _COUNTS}
            rows.append((*key, *sums.values(), sums["whole"] / sums["calls"]))
        calls_position = len(self._by)  # behind the keys
        return sorted(rows, key=lambda row: (-row[calls_position], row[:calls_position]))

    def _facts(self) -> Mapping[str, Any]:
        """Return totals of each phase, the types of ops, those without a word, and each op."""
        totals = {
            phase: {count: self.total(count, phase) for count in _COUNTS}
            for phase in dict.fromkeys(place.phase for place in self.ops)
        }
        return {
            "totals": totals, "types": self.types, "without_word": self.without_word, **super()._facts()
        }  # fmt: skip

    def notes(self) -> Sequence[str]:
        """Return the share of each phase, and types for which StandardMapping has no word."""
        notes = [
            f"Hooks at leaf modules see {self.total('whole', phase):,} of {self.total('calls', phase):,} "
            f"{phase} ops ({self.share(phase):.1%}): the ops that are alone in a call of a leaf module."
            for phase in ("forward", "backward")
            if self.total("calls", phase)
        ]
        if missing := self.without_word:
            listed = ", ".join(f"{kind} ({calls})" for kind, calls in missing.items())
            notes.append(f"StandardMapping has no word for {listed}.")
        return notes


class CoverageTool(amanda.Tool):
    """Count the executed ops, and the ops that hooks on leaf modules would see.

    `result` has the counts, `clear` sets them to 0.  A leaf module has no modules in it.  Hooks see a forward
    op whole if it is the only op in a call of a leaf module: the pre-hook sees inputs, the hook outputs.
    Of several ops in a call, hooks see the inputs of the first and the outputs of the last.  Hooks see a
    backward op whole if it is the only backward op of such a call; they never see the ops that accumulate
    gradients in parameters.  In a graph no module is called, so innermost name scopes count as leaf modules.

    Args:
        **selection: Options of `select`, such as module="encoder".
    """

    purpose = "look"

    @checked
    def __init__(self, **selection: Unpack[SelectOptions]) -> None:
        super().__init__()
        self._eager_op_by_id: dict[int, OpCoverage] = {}
        self._graph_op_by_id: dict[int, OpCoverage] = {}
        # By thread: replicas of a model run at once.
        self._open_call_by_thread: dict[int, tuple[FrameType, ModuleCall]] = {}
        self._clear_count = 0
        modules = [["pytorch", TORCH.write_finder], ["tensorflow/*/eager", KERAS.write_finder]]
        self.depends_on(StandardMapping(), MappingTool(modules))
        self.add_inst_for_op(self._instrument_forward)
        self.add_inst_for_op(self._instrument_backward, backward=True)
        select(self, **selection)

    @property
    def result(self) -> CoverageResult:
        """The counts of what was executed so far, which later executions and `clear` do not change.

        Closes the open calls of modules: later ops in them count as ops of new calls.
        """
        self._open_call_by_thread.clear()
        _count_seen_in_graphs(self._graph_op_by_id.values())
        return CoverageResult(map(replace, [*self._eager_op_by_id.values(), *self._graph_op_by_id.values()]))

    def clear(self) -> None:
        """Set all counts to 0; ops that were analysed stay analysed."""
        self._open_call_by_thread.clear()
        self._clear_count += 1
        for op in (*self._eager_op_by_id.values(), *self._graph_op_by_id.values()):
            op.calls = op.whole = op.entered = op.left = 0

    def _instrument_forward(self, context: amanda.OpContext) -> None:
        """Count executions of a forward op, in the call of its module where there are modules.

        Writes `model`, the class of the outermost module, into the context.
        """
        modules: ModuleFinder | None = context.get("modules")
        context["model"] = modules.outermost_class(sys._getframe()) if modules else ""
        op = self._op_coverage(context, context.get_op_id(), "forward", context["type"])
        if modules:
            context.insert_before_op(self._count_in_module, inputs=[], op=op, modules=modules)
        else:
            context.insert_before_op(self._count_call, inputs=[], op=op)

    def _instrument_backward(self, context: amanda.OpContext) -> None:
        """Count executions of a backward op, in the module's call of its forward op, if that had one.

        Ops that accumulate gradients are in no call.
        """
        op = self._op_coverage(
            context, context.get_backward_op_id() or 0, "backward", context["backward_type"]
        )
        if context.get("modules") and op.type != "accumulate_grad":
            context.insert_before_backward_op(self._count_in_module_backward, grad_outputs=[], op=op)
        else:
            context.insert_before_backward_op(self._count_call, grad_outputs=[], op=op)

    def _op_coverage(self, context: amanda.OpContext, op_id: int, phase: str, kind: str) -> OpCoverage:
        """Return the counts of an op, new ones at its first analysis."""
        op_by_id = self._eager_op_by_id if context.get("modules") else self._graph_op_by_id
        if op_id not in op_by_id:
            labels = (context.get_scope(), context.get_source(), context.get("model", ""))
            op_by_id[op_id] = OpCoverage(phase, kind, *labels)
        return op_by_id[op_id]

    @staticmethod
    @amanda.observer
    def _count_call(op: OpCoverage) -> None:
        """Count an execution that belongs to no call of a module."""
        op.calls += 1

    @amanda.observer
    def _count_in_module(self, op: OpCoverage, modules: ModuleFinder, run: dict[str, Any]) -> None:
        """Count an execution, and add the op to the call of its module, if that is a leaf.

        The call is the open one of this thread if it has the same frame, else a new one; `run["call"]` has
        it for the backward ops of this execution.
        """
        op.calls += 1
        frame = modules.innermost_frame(sys._getframe(1))
        if frame is None:
            self._open_call_by_thread.pop(get_ident(), None)  # a frame keeps the arguments of its call alive
            return
        frame_of_call, call = self._open_call_by_thread.get(get_ident(), (None, None))
        if call is None or frame_of_call is not frame:
            call = modules.open_call(frame, self._clear_count)
            self._open_call_by_thread[get_ident()] = frame, call
        run["call"] = call
        if call.is_leaf:
            call.forward.append(op)

    @amanda.observer
    def _count_in_module_backward(self, op: OpCoverage, run: dict[str, Any]) -> None:
        """Count an execution, and add the op to the call of its forward op, if that is a leaf's.

        Not after `clear`: the forward half of the call is gone, and half a call would count wrongly.
        """
        op.calls += 1
        call: ModuleCall | None = run.get("call")
        if call is not None and call.is_leaf and call.clear_count == self._clear_count:
            call.backward.append(op)


def _count_seen_in_graphs(ops: Iterable[OpCoverage]) -> None:
    """Set `whole`, `entered` and `left` of ops in graphs, as if innermost name scopes were leaf modules."""
    ops_by_scope: dict[tuple[str, str], list[OpCoverage]] = {}
    for op in ops:
        op.whole = op.entered = op.left = 0
        if op.calls and op.module and op.type != "accumulate_grad":
            ops_by_scope.setdefault((op.phase, op.module), []).append(op)
    # A scope with scopes in it is not a leaf, whichever of its ops lie in it directly.
    scopes = {scope for _, scope in ops_by_scope}
    parents = {scope[:i] for scope in scopes for i, letter in enumerate(scope) if letter in "/."}
    for (_, scope), ops_in_scope in ops_by_scope.items():
        if scope in parents:
            continue
        # As if the scope were one call, whose ops run in this order.
        span = OpSpan()
        for op in ops_in_scope:
            span.append(op)
        # The span has counted one call; the scope was entered as often as its ops ran.
        for op in ops_in_scope:
            op.whole = op.calls if op.whole else 0
            op.entered = op.calls if op.entered else 0
            op.left = op.calls if op.left else 0


_REQUIRED_KERAS = RequiredNames(
    "amanda.tools.coverage", "keras", "keras.src.layers.layer:Layer._flatten_layers"
)
_REQUIRED_TORCH = RequiredNames("amanda.tools.coverage", "torch", "torch:nn.Module._call_impl")


class OpSpan:
    """Counts of the ops of a call in one phase: a hook sees what enters the first op and leaves the last."""

    __slots__ = ("_count", "_first", "_last")

    def __init__(self) -> None:
        self._count = 0
        self._first: OpCoverage
        self._last: OpCoverage

    def append(self, op: OpCoverage) -> None:
        """Append an op to the call, and change the counters of the ops.

        The first op is `entered`, the last `left`, an only one `whole`; the counts by which the op before was
        the last, or the only one, are taken back.
        """
        if self._count == 0:
            self._first = op
            op.entered += 1
            op.whole += 1
        else:
            # The first op was alone so far; now its outputs stay within the call.
            if self._count == 1:
                self._first.whole -= 1
            self._last.left -= 1
        op.left += 1
        self._last = op
        self._count += 1


class ModuleCall:
    """One call of a module.  is_leaf: the module has no modules in it.  clear_count: of the tool before."""

    __slots__ = ("backward", "clear_count", "forward", "is_leaf")

    def __init__(self, is_leaf: bool, clear_count: int) -> None:
        self.is_leaf = is_leaf
        self.clear_count = clear_count
        self.forward, self.backward = OpSpan(), OpSpan()


class ModuleFinder:
    """Finder of the calls of modules on the stack.

    codes: return the code objects of the methods that call hooks.  is_leaf: return True for a module without
    modules in it.
    """

    def __init__(self, codes: Callable[[], frozenset[CodeType]], is_leaf: Callable[[Any], bool]) -> None:
        self._codes = codes
        self._is_leaf = is_leaf

    def write_finder(self, context: amanda.OpContext) -> None:
        """Write this finder to the context, as `modules`."""
        context["modules"] = self

    def innermost_frame(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame of the innermost call of a module; None outside of modules."""
        # Code objects are compared, not names: any function may be called `__call__`.
        codes = self._codes()
        while frame is not None and frame.f_code not in codes:
            frame = frame.f_back
        return frame

    def outermost_class(self, frame: FrameType | None) -> str:
        """Return the name of the class of the outermost module that is called; "" outside of modules."""
        codes, name = self._codes(), ""
        while frame is not None:
            if frame.f_code in codes:
                name = type(frame.f_locals["self"]).__name__
            frame = frame.f_back
        return name

    def open_call(self, frame: FrameType, clear_count: int) -> ModuleCall:
        """Return a new record for the call in a frame."""
        return ModuleCall(self._is_leaf(frame.f_locals["self"]), clear_count)


@cache
def _torch_call_codes() -> frozenset[CodeType]:
    """Return the code of the method of modules that calls hooks; raise ToolError where PyTorch lacks it."""
    from torch.nn import Module

    # Module.__call__ is another function by version; all of them run hooks in _call_impl.
    _REQUIRED_TORCH.check()
    return frozenset({Module._call_impl.__code__})


_LAYER_CLASSES = (("keras.src.layers.layer", "Layer"), ("tf_keras.src.engine.base_layer", "Layer"))
_code_by_keras_module: dict[str, CodeType] = {}


def _keras_call_codes() -> frozenset[CodeType]:
    """Return the code of `Layer.__call__` of each imported Keras; raise ToolError if Keras 3 lacks a name."""
    for module_name, class_name in _LAYER_CLASSES:
        if module_name in _code_by_keras_module:
            continue
        layer_class = getattr(sys.modules.get(module_name), class_name, None)
        if layer_class is not None:
            if module_name.startswith("keras."):
                _REQUIRED_KERAS.check()
            # Keras wraps __call__ to shorten tracebacks; frames have the code of the inner function.
            call = inspect.unwrap(vars(layer_class)["__call__"])
            _code_by_keras_module[module_name] = call.__code__
    return frozenset(_code_by_keras_module.values())


def _is_leaf_module(module: Any) -> bool:
    """Return True for a module of PyTorch without modules in it."""
    return next(module.children(), None) is None


def _is_leaf_layer(layer: Any) -> bool:
    """Return True for a layer of Keras without layers in it."""
    return next(iter(layer._flatten_layers(include_self=False)), None) is None


TORCH = ModuleFinder(_torch_call_codes, _is_leaf_module)
KERAS = ModuleFinder(_keras_call_codes, _is_leaf_layer)
"""Finders of modules, and of layers in eager mode: in a graph no layer is called."""
