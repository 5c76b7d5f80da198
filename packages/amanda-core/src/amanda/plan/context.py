"""OpContext: what an analysis routine sees of one op, and where it records actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from amanda.errors import ActionError, AmandaError, MissingKeyError, did_you_mean
from amanda.namespace import Namespace
from amanda.plan.action import NO_KWARGS, Action, ActionType, InstrumentationPoint, Routine
from amanda.plan.facts import (
    OpFacts,
    Selection,
    check_action_at_point,
    check_replacement,
    check_routine,
    resolve_positions,
    selected_positions,
)
from amanda.plan.tensors import sample_count, spread
from amanda.plan.tools import in_dependency_order

if TYPE_CHECKING:
    from amanda.plan.tools import AnyTool

__all__ = ["OpContext", "OpFacts", "Selection"]


STANDARD_KEYS = frozenset(
    {"type", "in_place", "phase", "backward_type", "weight_index", "weight_grad_index", "layout",
     "weight_groups", "weight_layout", "shape", "dtype"}
)  # fmt: skip
"""Keys that `amanda.tools.mapping.StandardMapping` writes."""


FACTS = frozenset(
    {"op", "op_id", "inputs", "outputs", "backward_op", "backward_op_id", "grad_outputs", "grad_inputs"}
)
"""Keys under which a context gives what its methods give, unless a tool has written them: `context["op"]`."""


class OpContext(dict[str, Any]):
    """One op as its tools see it: a dict that they share, and what the driver knows of the op.

    A backward op has a context of its own, which starts as a copy of its forward op's.
    """

    __slots__ = ("_actions", "_analyse", "_facts", "_point", "_tool")

    def __init__(
        self,
        facts: OpFacts,
        analyse: Callable[[OpContext, InstrumentationPoint], None],
        inherited: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(inherited or {})
        self._facts = facts
        self._analyse = analyse
        self._actions: list[Action] = []
        self._point: InstrumentationPoint | None = None
        self._tool: AnyTool | None = None

    # Tools use contexts as keys; a dict itself has no hash.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<OpContext of {self._facts.name} {self._facts.op_id:#018x}: {dict.__repr__(self)}>"

    def __missing__(self, key: str) -> Any:
        """Return the fact of this name; for any other key raise MissingKeyError, which says who writes it."""
        # Contexts of the first Amanda had these keys, so they work unless a tool has written them.
        if key in FACTS:
            return getattr(self, f"get_{key}")()
        tool_name = "a tool" if self._tool is None else type(self._tool).__name__
        tool_names = (
            [] if self._tool is None else [type(tool).__name__ for tool in in_dependency_order([self._tool])]
        )
        if key in STANDARD_KEYS and "StandardMapping" in tool_names:
            fix = f"StandardMapping has no rule for {self.namespace}: give it one, StandardMapping(rules)"
        elif key in STANDARD_KEYS:
            fix = f"StandardMapping writes it: self.depends_on(StandardMapping()) in {tool_name}"
        else:
            suggestion = did_you_mean(str(key), map(str, self))
            fix = f"write it before, in a tool that {tool_name} depends on; {suggestion}"
        raise MissingKeyError(f"{tool_name} reads {key!r} of a context that has no such key: {fix}")

    def get_op(self) -> Any:
        """Return the forward op: PyTorch's callable, TensorFlow's operation; it has a `__name__`."""
        return self._facts.op

    def get_op_type(self) -> str:
        """Return the framework's own name for what the op computes, one for all its spellings.

        PyTorch: "add" for `a + b`, `torch.add` and `Tensor.__radd__`.  TensorFlow: the operation's type. For
        a backward op: the word that tables show, `context["backward_type"]` of StandardMapping, such as
        "linear_backward".

        Raises:
            AmandaError: For a backward op where no StandardMapping has written the word.
        """
        if self.is_forward():
            return self._facts.op_type
        word = self.get("backward_type")
        if word is None:
            forward_type = self._facts.op_type
            raise AmandaError(
                f"get_op_type of {self._facts.name}, a backward op of {forward_type}: frameworks have no "
                "type for it; depend on StandardMapping(), which gives it a word such as "
                f'"{forward_type}_backward", or read get_backward_op().__name__, or get_forward_op_type()'
            )
        return str(word)

    def get_forward_op_type(self) -> str:
        """Return the framework's own name for what the forward op computes, also in the backward pass."""
        return self._facts.op_type

    def get_op_id(self) -> int:
        """Return 64 bits that name the op's place in the program."""
        return self._facts.op_id

    def get_inputs(self) -> list[Any]:
        """Return the op's inputs in the order of its schema.

        Raises:
            AmandaError: When the inputs were dropped: they live until the op's first backward pass.
        """
        return list(self._facts.inputs or self._require_values(self._facts.inputs, "inputs"))

    def get_input_names(self) -> tuple[str, ...]:
        """Return the names of the inputs in the order of the op's schema, also of inputs not given."""
        return tuple(self._facts.names)

    def get_input_shapes(self) -> tuple[Any, ...]:
        """Return the shape of each input: a tuple for a tensor, a tuple of these for a list, None for others.

        After this call the op's actions are for these shapes alone: for other shapes the op is analysed
        again.

        Raises:
            AmandaError: Outside of forward analysis routines, for a tool without a routine with
                `guard="read"` or "shape", and in graphs, where tensors may have no shape yet.
        """
        tool = self._tool
        guards = [] if tool is None else [routine.guard for routine in tool._amanda.analyses]
        # Without a guard the plan would be used for calls of other shapes, and be wrong without a word.
        if not self.is_eager() or self.is_backward() or not {"read", "shape"}.intersection(guards):
            raise AmandaError(
                f"get_input_shapes of {self._facts.name} in {self.namespace} is for forward analysis "
                'routines of eager mode, of a tool that has registered one with guard="read"; at other '
                "points read the shapes of tensors, or give a routine a keyword `shapes`"
            )
        # `ToolStack.store_plan` makes shapes a part of the key of this op's plans from now on.
        self._facts.reads_shapes = True
        return tuple(self._facts.input_shapes)

    def get_samples(self) -> int:
        """Return how many samples an execution computes at once: 1 unless a vmap maps the op.

        In eager mode the shapes of the inputs say that: see `get_input_shapes`.
        """
        return sample_count(self.get_input_shapes()) if self.is_eager() else self._facts.sample_count

    def get_outputs(self) -> list[Any] | None:
        """Return the op's outputs; None before the op, to a routine registered for points after it too.

        Raises:
            AmandaError: In a routine registered for points before the op alone, and as in `get_inputs`.
        """
        if self._facts.outputs is None and not self._facts.has_dropped_values:
            if self.is_forward():
                self._check_point("get_outputs", is_backward=False, is_after=True)
            return None
        return self._require_values(self._facts.outputs, "outputs")

    def get_backward_op(self) -> Any:
        """Return the backward op; None in the forward pass, to a routine registered for both passes.

        Raises:
            AmandaError: In an analysis routine of the forward pass alone.
        """
        if self._facts.backward_op is None:
            self._check_point("get_backward_op", is_backward=True)
        return self._facts.backward_op

    def get_backward_op_id(self) -> int | None:
        """Return 64 bits that name the backward op; None in the forward pass."""
        return self._facts.backward_op_id

    def get_backward_order(self) -> int:
        """Return 1 for a backward op of the op, 2 for a backward op of that, ...; 0 in the forward pass.

        The name of a backward op does not tell: one of order 2 may have that of one of order 1.
        """
        return self._facts.backward_order

    def get_grad_outputs(self) -> list[Any] | None:
        """Return the gradients of the forward op's outputs, which enter the backward op; None before that.

        Raises:
            AmandaError: In an analysis routine of the forward pass alone.
        """
        if self._facts.grad_outputs is None:
            self._check_point("get_grad_outputs", is_backward=True)
        return self._facts.grad_outputs

    def get_grad_inputs(self) -> list[Any] | None:
        """Return the gradients of the forward op's inputs, which leave the backward op; None before that.

        Raises:
            AmandaError: In an analysis routine of the forward pass, or before the backward op, alone.
        """
        if self._facts.grad_inputs is None:
            self._check_point("get_grad_inputs", is_backward=True, is_after=True)
        return self._facts.grad_inputs

    def _check_point(self, method: str, is_backward: bool, is_after: bool = False) -> None:
        """Raise AmandaError if an analysis routine runs at a point at which a method has nothing to give.

        A routine that its tool has registered for a later point too, such as a rule of a mapping, gets None.
        """
        point, tool = self._point, self._tool
        # Outside of analysis, as in a context that a tool keeps, nothing is known to be too early.
        if point is None or tool is None or _point_gives(point, is_backward, is_after):
            return
        routines = tool._amanda.analyses
        running_callbacks = [routine.callback for routine in routines if routine.point is point]
        # One function may be registered for several points.
        if any(
            routine.callback in running_callbacks and _point_gives(routine.point, is_backward, is_after)
            for routine in routines
        ):
            return
        is_option_needed = {"backward": is_backward, "require_outputs": is_after}
        options = [f"{name}=True" for name, is_needed in is_option_needed.items() if is_needed]
        when = f"{'backward' if point.is_backward else 'forward'} pass"
        raise AmandaError(
            f"{method} of {self._facts.name} has nothing to give to an analysis routine "
            f"{'after' if point.is_after else 'before'} the op in the {when}; register the routine with "
            f"add_inst_for_op(routine, {', '.join(options)})"
        )

    def get_scope(self) -> str:
        """Return the path of the module that calls the op ("layer1.0.conv1"), or the graph's name scope."""
        return self._facts.scope

    def get_scopes(self) -> tuple[str, ...]:
        """Return the path that `get_scope` gives, and other paths of that module.

        For a layer of Keras these are the path of the layers' names and its endings: "model/block/dense",
        "block/dense" and "dense".
        """
        return tuple(dict.fromkeys((self._facts.scope, *self._facts.scope_aliases)))

    def get_source(self) -> str:
        """Return the user's "file:line" that leads to the op."""
        return self._facts.source

    def get_device(self) -> str:
        """Return the device of the op's first tensor, in the framework's words: "cpu", "cuda:0".

        "" where no tensor has one yet: frameworks place the ops of a graph when it runs.

        Raises:
            AmandaError: When the values were dropped, as in `get_inputs`.
        """
        values = [*self.get_inputs(), *(self._facts.outputs or ())]
        return next((name for name in map(self._facts.device_of, spread(values)) if name), "")

    def get_attrs(self) -> dict[str, Any]:
        """Return the op's non-tensor arguments by name."""
        # A copy: the facts are shared by the contexts of all tools.
        return dict(self._facts.attributes or {})

    def get_parameters(self) -> tuple[int, ...]:
        """Return the positions of inputs that were read of a variable, where the input itself does not tell.

        TensorFlow's eager mode gives an op the tensor that a variable held; PyTorch gives the parameter.
        """
        return tuple(self._facts.variable_positions)

    def get_computation(self) -> Callable[[Sequence[Any]], Any]:
        """Return a function that runs the op on other inputs, as many as `get_inputs` gives, in their order.

        The function holds no values, and computes values, not symbols, also for a graph's op.  In a routine,
        where instrumentation is off, no tool sees its calls.

        Raises:
            AmandaError: For an op without a function.
        """
        # Graphs give `original`, which computes values instead of symbols; eager calls give `compute`.
        if self._facts.original is not None:
            return self._facts.original()
        if self._facts.compute is None:
            raise AmandaError(f"{self._facts.name} cannot be called on other inputs in {self.namespace}")
        return self._facts.compute

    def get_value(self, index: int | str) -> Any:
        """Return the present value of an input, also where `get_inputs` is symbolic.

        Args:
            index: Position or name, such as "weight".
        """
        return self._facts.read_value(self._input_at(index, "get_value"))

    def get_variable(self, index: int | str, item: int | None = None) -> Any:
        """Return what holds an input's value from one execution to the next; None where nothing does.

        PyTorch: the parameter, or the leaf, that the input is or is a view of; of a tensor that the program
        hands in for a parameter, as `functional_call` does, the slot of the module.
        TensorFlow: the handle of the variable that it was read of (`variable.handle`), in a session's graph
        the tensor that makes it.

        Args:
            index: Position or name of the input, such as "weight".
            item: Position in the input where that is a list, such as the tensors of `cat`.
        """
        value = self._input_at(index, "get_variable")
        return self._facts.variable_of(value if item is None else value[item])

    def get_variable_path(self, variable: Any) -> str | None:
        """Return the path of a variable in the model: "layer1.0.conv1.weight".

        The path begins at the outermost module; of several paths it is the first.  None where no module has
        the variable, and where the driver does not know.

        Args:
            variable: Result of `get_variable`.
        """
        return self._facts.path_of(variable)

    def is_forward(self) -> bool:
        """Return True for the context of a forward op."""
        return self._facts.backward_op_id is None

    def is_backward(self) -> bool:
        """Return True for the context of a backward op."""
        return self._facts.backward_op_id is not None

    def is_after(self) -> bool:
        """Return True in an analysis routine that runs after the op, where its outputs are known."""
        return self._point is not None and self._point.is_after

    def is_eager(self) -> bool:
        """Return True if the op runs when the program calls it, False for an op of a graph."""
        return self._facts.namespace[-1] == "eager"

    def is_static(self) -> bool:
        """Return True for an op of a file that is instrumented: routines have to be `@amanda.traceable`.

        Nothing runs there: what is not in the file, or in the tool, is not known.
        """
        return self._facts.namespace[-1] == "static"

    @property
    def namespace(self) -> Namespace:
        """Framework, version and mode that the op belongs to; a fourth tag "static" for an op of a file."""
        return self._facts.namespace

    def insert_before_op(self, func: Routine, inputs: Selection = None, **kwargs: Any) -> None:
        """Call `func` on the op's inputs before each execution; what it returns takes their place.

        In graphs, analysis routines that require outputs may call it, too: `func` runs behind the routines
        that those without outputs have recorded, also of tools that depend on this one.

        Args:
            func: Routine of the values at `inputs`.  It returns None to leave them, one value where one was
                selected, or a sequence of as many values.
            inputs: Positions or names, such as `["weight"]`; None for all.
            **kwargs: Given to every call of `func`.

        Raises:
            ActionError: For inputs that the op does not have, and after the analysis of the op.
        """
        self._record_action(ActionType.INSERT_BEFORE_OP, func, inputs, kwargs)

    def insert_after_op(self, func: Routine, outputs: Selection = None, **kwargs: Any) -> None:
        """Call `func` on the op's outputs after each execution; what it returns takes their place.

        Args:
            func: Routine of the values at `outputs`, which returns what one of `insert_before_op` does.
            outputs: Positions or names; None for all; `[]` for a routine that needs no value.
            **kwargs: Given to every call of `func`.

        Raises:
            ActionError: For outputs that the op does not have, and after the analysis of the op.
        """
        self._record_action(ActionType.INSERT_AFTER_OP, func, outputs, kwargs)

    def insert_before_backward_op(self, func: Routine, grad_outputs: Selection = None, **kwargs: Any) -> None:
        """Call `func` on the gradients that enter the backward op; what it returns takes their place.

        Args:
            func: Routine of the gradients at `grad_outputs`.
            grad_outputs: Positions; None for all.
            **kwargs: Given to every call of `func`.

        Raises:
            ActionError: In the analysis of a forward op, and for gradients that the op does not have.
        """
        self._record_action(ActionType.INSERT_BEFORE_BACKWARD_OP, func, grad_outputs, kwargs)

    def insert_after_backward_op(self, func: Routine, grad_inputs: Selection = None, **kwargs: Any) -> None:
        """Call `func` on the gradients that leave the backward op; what it returns takes their place.

        Args:
            func: Routine of the gradients at `grad_inputs`.
            grad_inputs: Positions; None for all.
            **kwargs: Given to every call of `func`.

        Raises:
            ActionError: In the analysis of a forward op, and for gradients that the op does not have.
        """
        self._record_action(ActionType.INSERT_AFTER_BACKWARD_OP, func, grad_inputs, kwargs)

    def replace_op(
        self, func: Routine, inputs: Selection = None, reads: Sequence[tuple[int, int]] = (), **kwargs: Any
    ) -> None:
        """Call `func` instead of the op; it takes part in autodiff as the op would have.

        Without `inputs`, `func` gets the op's tensors, and other inputs by name where it has a parameter
        of that name; all inputs in order where it has as many parameters, or `*inputs`.

        `func` may return NotImplemented to let the op itself run; in a graph, where there is nothing but
        the replacement, that is an error.  A parameter named `original` gets a function that computes the op
        itself, in any mode: `original(*inputs)`, with as many inputs as the op has here.

        Graphs of TensorFlow and ONNX Runtime support `reads`, those of PyTorch do not.

        Args:
            func: Function of the inputs that returns the op's outputs.
            inputs: Positions or names.
            reads: In a graph, inputs of other ops that have been analysed before, by op id and position:
                `func` gets their values as the list `reads`, and gradients go to them, past the ops in
                between.
            **kwargs: Given to every call of `func`.

        Raises:
            ReplaceConflictError: When another tool replaces the op already.
            ActionError: For `reads` in an eager mode, for inputs that the op does not have, and after the
                analysis of the op.
        """
        if reads and self._facts.graph is None:
            raise ActionError(
                f"replace_op of {self._facts.name} is to read inputs of other ops; that is for graphs, where "
                "they are known: eagerly, keep what an execution hands on in the tool"
            )
        self._record_action(ActionType.REPLACE_OP, func, inputs, kwargs, tuple(reads))

    def replace_backward_op(self, func: Routine, grad_outputs: Selection = None, **kwargs: Any) -> None:
        """Run `func` for the gradients that leave the backward op; the kernel may still run.

        Args:
            func: Routine of the gradients at `grad_outputs`; it returns all gradients that leave the op.
            grad_outputs: Positions; None for all.
            **kwargs: Given to every call of `func`.

        Raises:
            ActionError: In the analysis of a forward op.
            ReplaceConflictError: When another tool replaces the op already.
        """
        self._record_action(ActionType.REPLACE_BACKWARD_OP, func, grad_outputs, kwargs)

    # The name and its argument are the paper's.
    def trigger_callback(self, i_point: InstrumentationPoint) -> tuple[Action, ...]:
        """Run the analysis routines of a point; return the actions recorded; drop them if one raises."""
        earlier_action_count = len(self._actions)
        self._point = i_point
        try:
            self._analyse(self, i_point)
        except BaseException:
            del self._actions[earlier_action_count:]  # another thread may make the analysis again
            raise
        self._point = self._tool = None
        return tuple(self._actions[earlier_action_count:])

    def _input_at(self, index: int | str, method: str) -> Any:
        """Return an input by position or name; ActionError for an absent one.  method: caller, for errors."""
        inputs = self.get_inputs()
        (position,) = resolve_positions(self._facts, (index,), method, len(inputs))
        return inputs[position]

    def _require_values(self, values: list[Any] | None, value_kind: str) -> list[Any]:
        """Return a copy of the values; raise AmandaError where they were dropped."""
        if values is not None:
            return list(values)
        raise AmandaError(
            f"the {value_kind} of {self._facts.name} are gone: forward values are kept for the analysis of "
            "the first execution; keep what you need of them in the context"
        )

    def _record_action(
        self,
        kind: ActionType,
        func: Routine,
        select: Selection,
        kwargs: Mapping[str, Any],
        reads: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Record an action, with its routine wrapped as the tool says, or raise ActionError if it is unfit.

        Nothing is recorded where a wrapper of the tool returns None.
        """
        check_routine(kind, func, kwargs)
        if self._point is None or self._tool is None:
            raise ActionError(
                f"{kind.value} was called outside an analysis routine; actions are recorded while "
                "the callback given to add_inst_for_op runs"
            )
        check_action_at_point(self._facts, kind, self._point)
        if kind.is_replacement:
            check_replacement(self._facts, kind, self._tool, self._actions)
        routine: Routine | None = func
        # Checked before and wrapped after: a wrapper sees only routines that the op can take.
        for wrap in self._tool._amanda.wrappers:
            routine = None if routine is None else wrap(self, kind, routine)
        if routine is None:
            return
        positions = None if select is None else selected_positions(self._facts, kind, select)
        action = Action(kind, routine, self._tool, positions, kwargs or NO_KWARGS, reads)
        if action.takes_shapes and not self.is_eager():
            raise ActionError(
                f"{action} has a keyword `shapes`, which eager mode alone gives; {self._facts.name} is an op "
                f"of {self.namespace}: read the shapes of the values that the routine is given"
            )
        self._actions.append(action)


def _point_gives(point: InstrumentationPoint, is_backward: bool, is_after: bool) -> bool:
    """Return True for a point of a pass, and after the op if `is_after`."""
    return point.is_backward == is_backward and (point.is_after or not is_after)
