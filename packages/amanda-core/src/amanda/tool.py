"""Tool: analysis routines, dependencies on other tools, and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

from amanda import interceptor
from amanda.errors import DependencyCycleError, ToolError
from amanda.options import Name, checked, deprecated, shown, warn_deprecated
from amanda.plan.action import Action, InstrumentationPoint, routine_name
from amanda.plan.context import OpContext
from amanda.plan.lifetime import ParameterSlot, forget_plans_of, forget_plans_of_ops, parameter_slots
from amanda.plan.tools import (
    Admission,
    AnalysisRoutine,
    Guard,
    InNamespace,
    RegisteredRoutine,
    ToolState,
    Wrapper,
)
from amanda.scope.scope import Scope, apply, scopes_with
from amanda.scope.threads import caller

__all__ = ["Scope", "Tool", "apply"]


class Tool:
    """Analysis routines that are applied together; subclass it, or register on a plain instance.

    >>> class Names(Tool):
    ...     def __init__(self):
    ...         self.seen = []
    ...         self.add_inst_for_op(lambda context: self.seen.append(context.get_op().__name__))
    """

    follows_dependents = False
    """True if its routines run only at points where a tool that depends on it has one."""
    intercepts = True
    """False for a tool that opens scopes of its own: for such tools alone no driver is attached."""
    calibrates_when_prepared = False
    """True if `prepare`, and `amanda.instrument` at first, run or read a model within `calibrating`."""
    purpose: ClassVar[str | None] = ""
    """Heading under which `amanda tools` lists the tool: "look", "debug", "change" or "compress".

    "" lists it with others; None leaves it out: a tool for authors of tools.
    """
    usage: ClassVar[str] = "with amanda.apply(tool): model(x)"
    """Code that applies the tool to a model, for the error about a constructor that was given a model."""
    is_copied_when_used = True
    """False for a tool that a scope gives what cannot be copied: native counters, modules, plans."""

    _amanda: ToolState

    def __new__(cls, *args: Any, **kwargs: Any) -> Tool:
        """Return a tool that has its state; the arguments are for `__init__`."""
        self = super().__new__(cls)
        # In `__new__`, since a subclass need not call the base's `__init__`.
        self._amanda = ToolState()
        return self

    @checked
    def __init__(self, namespace: Name | None = None) -> None:
        """Make a tool without routines; a subclass need not call this.

        Args:
            namespace: Leading tags, such as "pytorch"; the tool is applied to ops of this namespace alone.
                None for all ops.
        """
        if namespace is not None:
            self.restrict(InNamespace(namespace))

    @classmethod
    def command_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return options for a run in which no program calls the tool's methods, as under `amanda run`.

        Args:
            options: Those of the command line, as the constructor takes them.  A tool that needs
                `calibrating()`, for example, adds an option that does without, or raises an AmandaError that
                names such options.
        """
        return options

    def __repr__(self) -> str:
        """Return the class, and what the result says first where the tool has one."""
        try:
            headline = getattr(getattr(self, "result", None), "headline", "")
        except Exception:  # of a result that cannot be read now
            headline = ""
        # Of another type it may be anything, such as an array, which is neither true nor false.
        has_headline = isinstance(headline, str) and headline
        return f"{type(self).__name__}: {headline}; .result" if has_headline else super().__repr__()

    def __copy__(self) -> Tool:
        """Return a deep copy: the routines of a shallow copy would be methods of the original tool."""
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe the tool for pickle and copy.

        Raises ToolError if a scope had the tool and `is_copied_when_used` is False.
        """
        if self._amanda.was_used and not self.is_copied_when_used:
            name = type(self).__name__
            state = ", and other.load_state_dict(tool.state_dict())" if self.state_dict() else ""
            raise ToolError(
                f"a {name} that was used in a scope cannot be pickled or copied, since it holds what belongs "
                f"to ops of this process: copy its result, or make another {name}{state}"
            )
        return super().__reduce_ex__(protocol)

    @checked(error=ToolError)
    def add_inst_for_op(
        self,
        callback: AnalysisRoutine,
        backward: bool = False,
        require_outputs: bool = False,
        guard: Guard = None,
    ) -> None:
        """Register an analysis routine: it runs once per op and may record actions.

        In an open scope the ops that were analysed before are analysed anew at their next execution.

        Args:
            callback: Routine of an `OpContext`, which records actions by its `insert_...` and `replace_...`.
            backward: True to run at backward ops.
            require_outputs: True to run after the op, when its outputs are known.
            guard: Facts by which the routine decides beyond the op and its inputs' dtype, rank and device;
                for other facts it runs again.  "shape": the shapes of the inputs.  "read": their shapes, at
                the ops at which the routine calls `context.get_input_shapes()`.  A callable: its result for
                the list of inputs, a hashable.
        """
        self._register(callback, backward, require_outputs, guard, closing=False)

    @checked(error=ToolError)
    def add_closing_inst_for_op(
        self, callback: AnalysisRoutine, backward: bool = False, require_outputs: bool = False
    ) -> None:
        """Register a routine that runs after those of every tool that depends on this tool in its scope.

        The routine runs ahead of the routines of dependents in a scope within.

        Args:
            callback: As in `add_inst_for_op`.
            backward: As in `add_inst_for_op`.
            require_outputs: As in `add_inst_for_op`.
        """
        self._register(callback, backward, require_outputs, None, closing=True)

    def _register(
        self,
        callback: AnalysisRoutine,
        backward: bool,
        require_outputs: bool,
        guard: Guard,
        *,
        closing: bool,
    ) -> None:
        """Register a routine, which open scopes use at once; raise ToolError if it takes no context."""
        if not _takes_context(callback):
            raise ToolError(
                "add_inst_for_op wants a routine of one argument, the context, and "
                f"{routine_name(callback)} cannot be called "
                f"with that; write def {getattr(callback, '__name__', 'analyse')}(self, context)"
            )
        point = InstrumentationPoint.of(backward, require_outputs)
        self._amanda.analyses.append(RegisteredRoutine(self, callback, point, guard, closing))
        _update_open_scopes(self)

    def depends_on(self, *tools: Tool) -> None:
        """Run the routines of `tools` before this tool's; `tools` join every scope of this tool.

        Args:
            *tools: Tools whose keys this tool reads in contexts, such as `StandardMapping()`.

        Raises:
            ToolError: For what is no tool.
            DependencyCycleError: If tools depend on each other in a circle; in an open scope at once.
        """
        for tool in tools:
            if not isinstance(tool, Tool):
                # The class instead of an instance is the most frequent mistake here.
                hint = f"; give an instance: {tool.__name__}()" if isinstance(tool, type) else ""
                raise ToolError(f"{type(self).__name__} depends on {shown(tool)}, which is not a Tool{hint}")
        dependencies = self._amanda.dependencies
        dependencies.extend(tools)
        try:
            _update_open_scopes(self)
        except DependencyCycleError:  # the open scope stays as it is
            del dependencies[len(dependencies) - len(tools) :]
            raise

    def stands_for(self) -> Hashable:
        """Return a name that interchangeable tools share: of the tools with one name only the first runs.

        Such tools do the same for the tools that depend on them.  The first may be of a scope around.  A tool
        with restrictions or wrapped routines is not interchangeable.
        None, the default, is for a tool that is interchangeable with no other.
        """
        return None

    @checked(error=ToolError)
    def restrict(self, admits: Admission) -> None:
        """Call this tool's analysis routines for some ops only.

        An op has to pass all restrictions of a tool.  In an open scope they hold from the next execution of
        each op on. `amanda.tools.select` has restrictions by type, module and phase.

        Args:
            admits: Function of an op's context that returns True for an op to be analysed; called at each
                point, after the routines of the tools that this tool depends on.
        """
        self._amanda.admissions.append(admits)
        _update_open_scopes(self)

    @checked(error=ToolError)
    def wrap_routines(self, wrap: Wrapper) -> None:
        """Replace the routine of each action.

        Args:
            wrap: Function of the context, the `ActionType` and the routine; it returns the new routine, or
                None to record no action.  A replacement may return NotImplemented, which lets the op itself
                run.
        """
        self._amanda.wrappers.append(wrap)
        _update_open_scopes(self)

    def unmatched(self) -> list[str]:
        """Return a sentence for each selection that no op has matched, for the report of a closing scope.

        These are the sentences of the restrictions that have a method of this name.
        """
        methods = [getattr(admits, "unmatched", None) for admits in self._amanda.admissions]
        return [text for unmatched in methods if unmatched is not None for text in unmatched()]

    def analyse_again(self, op_ids: Iterable[int] | None = None) -> None:
        """Analyse ops anew at their next execution.

        For a tool that learns from later ops how to treat an earlier op, or whose options have changed.

        Args:
            op_ids: Ids of the ops; None for all ops.
        """
        if op_ids is None:
            forget_plans_of(self)
        else:
            forget_plans_of_ops(self, op_ids)

    def scope_entered(self) -> None:
        """Prepare for a scope with this tool, which has opened: the counterpart of `scope_left`.

        Does nothing unless a tool overrides it.
        """

    def scope_left(self) -> None:
        """Release what may not outlive a scope: called when a scope with this tool has closed.

        Called also after an exception.  Does nothing unless a tool overrides it.
        """

    def op_gone(self, op_id: int) -> None:
        """Drop or sum up the tool's records of an op, which cannot execute again.

        Called before the next analysis, once the op's module or parameter is gone.  Does nothing unless a
        tool overrides it.
        """

    def refused(self, action: Action, reason: str) -> None:
        """Note an action whose routine cannot run at its op, as in a body of ONNX control flow.

        For a result that lists what it lacks; the scope's report lists the action in any case.  Does nothing
        unless a tool overrides it.

        Args:
            action: The action, with its routine.
            reason: Why the routine cannot run, in a few words.
        """

    def write_parts(
        self, source: Path, folder: Path, analyse: Callable[[Tool], None], about: Mapping[str, Any]
    ) -> None:
        """Write the model in a file as several files; called by `amanda.instrument`.

        For a tool that cuts models instead of inserting routines; a tool that overrides it is applied alone.

        Args:
            source: The model, which stays as it is.
            folder: An empty one, which is in its place once all is written.
            analyse: Brings every op of the model to the analysis routines of a tool.
            about: What the metadata of the files say of the tools.
        """
        raise NotImplementedError

    @staticmethod
    def identity_of(variable: Any, owner: Any = None) -> int:
        """Return the number of a parameter or variable, the same as long as the variable lives.

        Args:
            variable: The result of `context.get_variable`.
            owner: The module that holds it.  With it, a parameter that is put into the module anew for each
                call, as accelerate does, has the number of the one that was there before.
        """
        if isinstance(variable, ParameterSlot):
            return variable.identity
        slot_ordinal = None if owner is None else parameter_slots.find_ordinal(owner, variable)
        return interceptor.ordinal(variable) if slot_ordinal is None else slot_ordinal

    @staticmethod
    def caller() -> Hashable | None:
        """Return an object for the thread that executes the program for which a routine runs now.

        For a routine that a graph calls on another thread, it is the thread that runs the graph.  None on a
        thread that a framework started for its own work.  The object lives as long as the thread.
        """
        return caller()

    def keep(
        self,
        context: OpContext,
        name: str,
        make: Callable[[], Any],
        load: Callable[[Any], Any] | None = None,
        variable: Any = None,
        renew: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Return this tool's state at one op, or of a variable; the first call makes the state.

        Parts of a variable that ops read as views have state of their own: "in_proj_weight/mask@64".

        The state is keyed by `place(context)` and `name`.  Call this method in an analysis routine.

        Args:
            context: Context of the op.
            name: Name of the state, such as "mask".
            make: Function that returns the first value, unless `load_state_dict` was given one under the key.
            load: Function that converts a loaded value, such as an array of a file into a variable; None to
                take it as it is.
            variable: The result of `context.get_variable`, for state of a variable instead of an op.  The key
                has the variable's path in the model, if that is known; loaded state is also found under the
                op's key.
            renew: Called with a parameter that was the state before `load_state_dict`, which an optimizer may
                hold, and with the loaded value; writes the value into the parameter and returns it, or
                returns another value.

        Raises:
            ToolError: Where `load_state_dict` was given other state without this key, unless not strict.
        """
        path = None if variable is None else context.get_variable_path(variable)
        # A caller that names the part itself, as in "mask@64", knows better.
        if variable is not None and "@" not in name:
            name += context._facts.variable_part(variable)
        op_key = f"{Tool.place(self, context)}/{name}"  # a subclass may have another place
        key = op_key if path is None else f"{self._number_path(path, variable)}/{name}"
        # In `state`, which `load_state_dict` replaces as a whole, so that no earlier value stays.
        value_by_key, loaded = self._amanda.state.setdefault("values", {}), self._amanda.loaded
        if key not in value_by_key:
            # Also under the op's key, which state has where the variable's path is not known.
            loaded_key = next((candidate for candidate in (key, op_key) if candidate in loaded), None)
            if loaded_key is None:
                self._check_state_may_lack(key)
                value_by_key[key] = make()
            else:
                value = loaded.pop(loaded_key)
                value = value if load is None else load(value)
                former_parameter = self._amanda.former_parameters.pop(key, None)
                if former_parameter is not None and renew is not None:
                    value = renew(former_parameter, value)
                value_by_key[key] = value
        return value_by_key[key]

    def _check_state_may_lack(self, key: str) -> None:
        """Raise ToolError if state was loaded strictly, which lacks this key; empty state allows all keys."""
        names = self._amanda.names_loaded
        if names:
            examples = get_close_matches(key, names, n=3) or names[:3]
            raise ToolError(
                f"{type(self).__name__} has no {key} among the {len(names)} values that it was given to "
                f"load, such as {', '.join(examples)}: they are of another model, or of other options; "
                "load_state_dict(state, strict=False) creates the missing values"
            )

    def _number_path(self, path: str, variable: Any) -> str:
        """Return a variable's path; its first call appends ".1", ".2" if others of that path came before."""
        numbers = self._amanda.state.setdefault("paths", {}).setdefault(path, {})
        number = numbers.setdefault(self.identity_of(variable), len(numbers))
        return path if number == 0 else f"{path}.{number}"

    def place(self, context: OpContext) -> str:
        """Return the key of an op's state: "module path/op", with ".1", ".2" for further ops of that name.

        The first call for an op chooses its key, which stays until `load_state_dict`.
        The key of an op that reads a parameter other than `weight` and `bias` of its module holds the
        parameter's name, too, since the data may say which is read first: "experts/linear(up.1)".
        Ops of several graphs that have one name and read the same variables have one key: what Keras
        traces of a layer to train it, and what to predict.
        """
        facts = context._facts
        key_by_op_id: dict[int, str] = self._amanda.state.setdefault("places", {})
        if facts.op_id not in key_by_op_id:
            name = f"{context.get_scope()}/{getattr(context.get_op(), '__name__', context.get_op())}"
            name += _parameter_suffix(facts.first_variable_path(), context.get_scope())
            # Places of the ops that have this name, each with its graphs and the variables that it reads.
            places = self._amanda.state.setdefault("shared", {}).setdefault(name, [])
            # By order of first use: a module that runs an op of one name twice does so in the same order each
            # time.
            number = _find_or_add_place(places, facts.graph, facts.read_variables())
            key_by_op_id[facts.op_id] = name if number == 0 else f"{name}.{number}"
        return key_by_op_id[facts.op_id]

    def state_dict(self) -> dict[str, Any]:
        """Return the values of `keep` by key, "module path/op/name", and loaded values without use so far."""
        # With the latter, so that saving right after loading loses nothing.
        return {**self._amanda.loaded, **self._amanda.state.get("values", {})}

    def waiting_state(self) -> list[str]:
        """Return the names of loaded values that no op has asked for yet.

        Once every op has run, these are values of other modules.
        """
        # `keep` takes out what it uses, so these are what no op has asked for.
        return sorted(self._amanda.loaded)

    @checked(error=ToolError)
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Replace the state by that of another tool or process; ops are analysed anew.

        Args:
            state: A result of `state_dict`.
            strict: Whether `keep` raises ToolError for a key that the state lacks, unless the state is empty.
        """
        tool_state = self._amanda
        tool_state.names_loaded = sorted(state) if strict else []
        # An optimizer may hold these parameters: loaded values have to be written into them.
        tool_state.former_parameters.update(_select_trainable(tool_state.state.get("values", {})))
        tool_state.state, tool_state.loaded = {}, dict(state)  # a copy, since `keep` takes values out of it
        forget_plans_of(self)

    def parameters(self) -> Iterator[Any]:
        """Yield the values of `keep` that an optimizer may train: those that require a gradient."""
        yield from _select_trainable(self._amanda.state.get("values", {})).values()

    def prepare(self, model: Callable[..., Any], *example: Any, **kwargs: Any) -> Any:
        """Run `model` once on an example in a scope of this tool, so that its state is made.

        Args:
            model: A module or another callable.
            *example: What it is called with.
            **kwargs: Keyword arguments of the call.

        Returns:
            What the model returns.

        Raises:
            ToolError: For a model that cannot be called.
        """
        if not callable(model):
            type_name = type(model).__name__
            raise ToolError(f"prepare was given a {type_name}; give a model, then an example of its inputs")
        with preparation(self) or nullcontext(), apply(self):
            return model(*example, **kwargs)

    def calibrating(self) -> AbstractContextManager[Any]:
        """Return a context of executions by which the tool computes its state before it is used.

        Has no effect unless a tool overrides it.
        """
        return nullcontext()

    def clear(self) -> None:
        """Forget state and results; ops are analysed anew."""
        self.load_state_dict({})

    @deprecated(use="calibrating", since="amanda-core 0.2", gone="0.4")
    def preparing(self) -> AbstractContextManager[Any]:
        """Return `calibrating()` of a tool that needs it for `prepare`.  Deprecated: use `calibrating`."""
        return self.calibrating() if self.calibrates_when_prepared else nullcontext()


def preparation(tool: Tool) -> AbstractContextManager[Any] | None:
    """Return the context that computes a tool's state in advance; None without `calibrates_when_prepared`.

    An override of the deprecated `preparing` goes first, with a warning.
    """
    if type(tool).preparing is not Tool.preparing:  # an override from before `calibrating` was the name
        name = type(tool).__name__
        warn_deprecated(f"{name}.preparing", f"calibrating, and calibrates_when_prepared = True, in {name}",
                        "amanda-core 0.2", "0.4")  # fmt: skip
        return tool.preparing()
    return tool.calibrating() if tool.calibrates_when_prepared else None


def _update_open_scopes(tool: Tool) -> None:
    """Note that a tool's routines, restrictions or dependencies have changed; make open scopes use them."""
    tool._amanda.version += 1
    if tool._amanda.was_used:
        for scope in scopes_with(tool):
            scope.update_routines()


def _takes_context(callback: AnalysisRoutine) -> bool:
    """Return False for a function that cannot be called with one argument; True for an unknown signature."""
    try:
        # Bound and not called: whether the routine works is seen at the first op.
        signature(callback).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _select_trainable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors among some values that an optimizer may train, by key."""
    return {
        key: value for key, value in values.items()
        if getattr(value, "requires_grad", getattr(value, "trainable", False))
    }  # fmt: skip


def _parameter_suffix(path: str | None, scope: str) -> str:
    """Return the end of a state's key that names the parameter which the op reads first: "(up.1)".

    path: the parameter's path in the model.  scope: path of the module that calls the op.
    "" for the `weight` or `bias` of its own module, and where no path is known.
    """
    name = (path or "").removeprefix(f"{scope}.")
    return f"({name})" if name not in ("", "weight", "bias") else ""


def _find_or_add_place(
    places: list[tuple[set[Hashable], Hashable]], graph: Hashable, variables: Hashable
) -> int:
    """Return the index of an op's place among the places of one name; add a place where it is at none.

    An op is at a place if another graph has an op there that reads the same variables.
    places: the graphs and the variables of each place, which this function extends.
    """
    for number, (graphs, place_variables) in enumerate(places):
        # Two ops of one graph are two places, whatever they read; so are two eager ops, which have no graph.
        is_of_another_graph = graph is not None and graphs and graph not in graphs
        if is_of_another_graph and variables == place_variables:
            graphs.add(graph)
            return number
    places.append((set() if graph is None else {graph}, variables))
    return len(places) - 1
